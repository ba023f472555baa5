"""Publishing: rows of evaluated runs, merged; the page as a function of the JSON; and one clear line where something lacks."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import row_store
from experiments.paper import publish
from experiments.paper.claims import trials
from experiments.paper.commands import PROGRAM
from experiments.paper.results import AXES, BETWEEN, ERRORS, KEY, PREDICTED, REGULARIZERS, Results
from experiments.paper.suite import SUITE
from tests.experiments.paper.fake_publication import fake_rows
from tests.experiments.paper.test_claims import BETTER, curves
from tests.robustness.conftest import shorten_autoattack
from tests.study.fake_runs import fake_study
from tests.study.small_studies import CPU, SILENT, stripes_file, tiny_run, tiny_study
from wassersmooth import cli
from wassersmooth.robustness import suites
from wassersmooth.study import experiment, figure_data, presets
from wassersmooth.study.config import Study
from wassersmooth.study.errors import StudyError
from wassersmooth.study.published_models import load_published
from wassersmooth.study.runs import Run, runs_in

ROOT = Path(__file__).parent.parent.parent.parent
POINTS = ("none", "euclidean:eta=0.2", "wasserstein:eta=0.3,radius=1")
SPECIFIED = {"regularizer", "selection", "eta", "radius", "mass", "seed", "epochs", "errors", "flips", "seconds", "commit"}


def stored_in(folder: Path, found: list[dict[str, Any]], **facts: Any) -> Path:
    path = folder / "paper.json"
    with row_store.changing(path) as stored:
        stored |= {**facts, "rows": row_store.merged(stored["rows"], found, KEY)}
    return path


def few_probes(patch: pytest.MonkeyPatch) -> None:
    """The masking checks have tests of their own; here they only have to run."""
    for suite, limits in suites.LIMITS.items():
        patch.setitem(suites.LIMITS, suite, replace(limits, probes=10, square_queries=5))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole publication of tiny networks: three regularizers, two seeds."""
    folder = tmp_path_factory.mktemp("publication")
    with pytest.MonkeyPatch.context() as patch:
        shorten_autoattack(patch)
        few_probes(patch)
        study = tiny_study(folder, epochs=2, seeds=(0, 1), regularizers=POINTS)
        stripes_file(folder, test=200)
        runs = experiment.train(study, "tiny", folder / "study", CPU, SILENT)
        patch.setattr(figure_data, "_collect_neighborhoods", lambda *rest: None)
        experiment.measure(runs, SILENT, "cpu", SUITE, 24, autoattack_images=3)
        publish.publish(runs, folder / "results" / "paper.json", "within_one_point", None, None, SILENT)
        publish.render(folder / "results" / "paper.json")
    return folder


@pytest.mark.slow
def test_a_publication_from_end_to_end(published: Path) -> None:
    results = published / "results"
    found = row_store.read(results / "paper.json")["rows"]
    assert [(row["regularizer"], row["seed"]) for row in found] == [
        (kind, seed) for kind in sorted(REGULARIZERS) for seed in (0, 1)
    ]
    for row in found:
        assert row.keys() >= SPECIFIED | {"hardware", "intervals", "images", "verdict"}
        assert list(row["errors"]) == [*ERRORS, *PREDICTED]
        assert row["images"].keys() == {*ERRORS, *PREDICTED, "flips"}
        assert row["flips"].keys() == set(AXES)
        assert row["flips_by_reach"]["vertical"].keys() == {"2", "4"}
        assert (row["images"]["clean"], row["images"]["autoattack_2_pixel"]) == (24, 3)
        (measured,) = row["evaluated"]
        assert set(measured["rows"]) == {*ERRORS, *PREDICTED, *(f"flips_{axis}" for axis in AXES), "masking"}
    text = (results / "paper.md").read_text()
    for heading in ("Table 1.", "AutoAttack.", "Table 2.", "Gradient masking", "The networks", "Provenance", "Commands"):
        assert heading in text
    assert "Given by hand: no search is stored in the file. Euclidean eta" in text
    assert "compare orders, not values" in text
    assert sorted(path.name for path in (results / "images").iterdir()) == [
        "paper-epsilon-within_one_point.png",
        "paper-errors-within_one_point.png",
        "paper-figure2.png",
    ]


def test_a_published_network_is_loaded_by_one_line(published: Path) -> None:
    for run in runs_in(published / "study"):
        if run.config.seed == 0:
            model = load_published(published / "results" / "models" / f"{run.config.regularizer.kind}.safetensors")
            own = run.load_model()
            assert all((a == b).all() for a, b in zip(model.state_dict().values(), own.state_dict().values(), strict=True))
            assert not model.training


@pytest.mark.slow
def test_evaluate_agrees_with_what_is_stored_beside_the_networks(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_probes(monkeypatch)
    agrees_on_the_subset(published / "results" / "models", tmp_path, [])


def agrees_on_the_subset(models: Path, output: Path, more: list[str]) -> None:
    index = json.loads((models / "models.json").read_text())
    subset = index["subset"]
    files = [str(models / name) for name in index["models"]]
    fixed = ["--suite", subset["suite"], "--test-images", str(subset["images"]), "--device", "cpu", "--no-pictures"]
    assert cli.main(["evaluate", *files, "--output", str(output), *fixed, *more]) == 0
    for name, model in index["models"].items():
        found = json.loads((output / Path(name).stem / "evaluation.json").read_text())
        assert (found["model_sha256"], found["test_sha256"]) == (model["sha256"], subset["test_sha256"])
        for measure, error in model["errors"].items():
            assert abs(found["errors"][measure] - error) <= 100 / subset["images"] + 1e-9  # one image


def test_the_committed_networks_answer_as_they_did(cifar10: Path, tmp_path: Path) -> None:
    models = ROOT / "results" / "paper" / "models"
    if not list(models.glob("*.safetensors")):
        pytest.skip("the networks are in the repository, and not in a source distribution")
    agrees_on_the_subset(models, tmp_path, ["--data-dir", str(cifar10)])


def test_the_committed_page_is_what_the_json_renders_to() -> None:
    path = ROOT / "results" / "paper" / "paper.json"
    text, plots = publish.page_of(path)
    assert path.with_suffix(".md").read_text() == text, "run: python -m experiments.paper render"
    assert all((path.parent / "images" / f"paper-{name}.png").is_file() for name in plots)


def test_the_tables_of_the_results_are_those_of_the_page() -> None:
    page = (ROOT / "results" / "paper" / "paper.md").read_text().splitlines()
    section = (ROOT / "docs" / "results.md").read_text().split("\n## What holds of the paper")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert len(shown) > 10
    assert [line for line in shown if line not in page] == []


def test_rendering_again_gives_the_same_files(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = published / "results"
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    assert cli.main(["render", "--results", str(results / "paper.json")], PROGRAM) == 0
    assert {path: path.read_bytes() for path in results.rglob("*") if path.is_file()} == before
    assert "page:" in capsys.readouterr().out


def test_publishing_again_replaces_rows_and_another_selection_adds_some(published: Path, tmp_path: Path) -> None:
    path, runs = tmp_path / "paper.json", runs_in(published / "study")
    first = [run for run in runs if run.config.seed == 1]
    publish.publish(first, path, "within_one_point", None, None, SILENT)
    publish.publish(first, path, "within_one_point", None, None, SILENT)
    assert len(row_store.read(path)["rows"]) == 3
    publish.publish(first, path, "most_robust", None, None, SILENT)
    found = row_store.read(path)["rows"]
    assert len({tuple(row[name] for name in KEY) for row in found}) == len(found) == 6
    assert not (tmp_path / "models").exists()  # networks are those of seed 0


def test_the_page_of_full_rows_and_a_search(tmp_path: Path) -> None:
    measured = {"point": {"kind": "euclidean", "eta": 0.2, "radius": 0, "mass": 0.0}, "clean": 16.0, "robust": 90.0, "seeds": 1}
    plain = measured | {"point": {"kind": "none", "eta": 0.0, "radius": 0, "mass": 0.0}}
    search = {"unregularized": plain, "selected": {"within_one_point": measured, "most_robust": measured}}
    search |= {"points": [measured], "attack": "IFGSM", "recipe": {"epochs": 16, "milestones": [8, 12], "validation": 0.1}}
    search["recipe"]["images"] = 5000
    longer = search | {"recipe": search["recipe"] | {"epochs": 64}}
    path = stored_in(tmp_path, fake_rows() + fake_rows(2, "most_robust"), sweeps={"most_robust": {"euclidean": search}})
    text, plots = publish.page_of(path)
    assert "Of the 12 settings of the paper's 6 rows: **shown** " in text
    assert "Chosen by: the best robust error, whatever it costs." in text
    assert "compare orders" not in text
    assert "models.json" not in text
    (said,) = re.findall(r"\*\*shown\*\* (\d+), \*\*not shown\*\* (\d+), \*\*contradicted\*\* (\d+)", text)
    judged = Counter(re.findall(r"^\| table .*? \| \*\*(.*?)\*\* \|", text, re.MULTILINE))
    assert tuple(map(int, said)) == (judged["shown"], judged["not shown"], judged["contradicted"])
    assert judged.total() == 12
    parts = re.findall(r"^- .*?: (\d+) shown, (\d+) not shown, (\d+) contradicted; ", text, re.MULTILINE)
    assert [sum(map(int, part)) for part in parts] == [12, 12, 12, 11]  # natural images have no column for strong penalties
    assert "table 1: FGSM, epsilon 8/255 | normalized units | **not shown** | -51.1 ± " in text
    assert "strengths, none of which meet there; a curve takes 3" in text
    assert "**holds**" not in text
    assert "**lowest" not in text
    assert "Bold" not in text
    trained = (
        "each trained for 16 epochs (milestones [8, 12]: a shorter schedule than the final 200 epochs), 1 seed, and measured"
    )
    assert f"{trained} on 5,000 of the images held out (10 % of the training images), under IFGSM." in text
    assert "| 0.2 | 0 | 0 | 16.00 | 90.00 | within_one_point, most_robust |" in text
    assert "82.22" in text
    assert text.count("Table 1.") == 2
    for other, said in (
        (search, "**Most robust.** The search above (Within one point of clean error)."),
        (longer, "for 64 epochs"),
    ):
        stored_in(tmp_path, [], sweeps={"within_one_point": {"euclidean": other}, "most_robust": {"euclidean": search}})
        assert said in publish.page_of(path)[0]
        assert ("have a separate, longer search" in publish.page_of(path)[0]) == (other is longer)
    assert [name for name in plots if name.startswith("errors")] == ["errors-within_one_point", "errors-most_robust"]
    assert all(draw()[:4] == b"\x89PNG" for draw in plots.values())


def test_the_sweep_decides_which_of_several_points_is_published(published: Path, tmp_path: Path) -> None:
    runs = runs_in(published / "study")
    other = {"kind": "euclidean", "eta": 0.9, "radius": 0, "mass": 0.0}
    search = {"euclidean": {"selected": {"within_one_point": None, "most_robust": {"point": other}}}}
    with pytest.raises(StudyError, match="selected no euclidean point as within_one_point"):
        publish._chosen(runs, search, "within_one_point")
    with pytest.raises(StudyError, match=r"no run of euclidean:eta=0\.9, which the sweep selected"):
        publish._chosen(runs, search, "most_robust")
    search["euclidean"]["selected"]["most_robust"] = {"point": other | {"eta": 0.2}}
    assert len(publish._chosen(runs, search, "most_robust")) == 6


def test_runs_that_lack_something_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = fake_study(tmp_path / "study", seeds=1, pictures=False)
    results = ["--results", str(tmp_path / "paper.json")]
    for arguments, message in (
        (["publish", str(study), *results], "lacks autoattack_8_pixel, autoattack_2_pixel.*experiments.paper evaluate "),
        (
            ["publish", str(study), *results, "--selection", "best"],
            "must be one of within_one_point, most_robust, between; got 'best'",
        ),
        (["publish"], "publish needs the folder"),
        (["evaluate", str(tmp_path / "nowhere")], "nowhere does not exist"),
        (["render", *results], "does not exist"),
    ):
        assert cli.main(arguments, PROGRAM) == 2
        said = capsys.readouterr().err
        assert said.startswith("python -m experiments.paper: ")
        assert said.count("\n") == 1
        assert re.search(message, said)
    assert not (tmp_path / "paper.json").exists()


def test_a_damaged_or_exchanged_network_is_refused(published: Path, tmp_path: Path) -> None:
    models = published / "results" / "models"
    for name in ("models.json", "none.safetensors"):
        (tmp_path / name).write_bytes((models / name).read_bytes())
    (tmp_path / "none.safetensors").write_bytes((models / "euclidean.safetensors").read_bytes())
    with pytest.raises(StudyError, match=r"does not have the SHA-256 of .*models\.json"):
        load_published(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: 3, "expected an object, got int"),
        (lambda row: {name: value for name, value in row.items() if name not in ("errors", "seed")}, "without seed, errors"),
        (
            lambda row: row | {"errors": row["errors"] | {"clean": None}},
            "errors: clean: expected a number from 0 to 100; got None",
        ),
        (lambda row: row | {"errors": 5}, "errors: expected an object; got 5"),
        (lambda row: row | {"seed": "x"}, "seed: expected a whole number from 0 to 4294967295; got 'x'"),
    ],
)
def test_a_damaged_row_is_one_line(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Any], Any], message: str
) -> None:
    path = stored_in(tmp_path, row_store.read(published / "results" / "paper.json")["rows"])
    found = row_store.read(path)["rows"]
    path.write_text(json.dumps({"rows": [*found, damage(found[1] | {"seed": 7})]}))
    before = path.read_bytes()
    for command in (["render"], ["publish", str(published / "study")]):
        assert cli.main([*command, "--results", str(path)], PROGRAM) == 2
        said = capsys.readouterr().err
        assert f" is damaged ({message}); restore the file" in said
        assert said.count("\n") == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize(("name", "lacks"), [("evaluation.json", "lacks clean"), ("provenance.json", "lacks seconds")])
def test_an_empty_file_of_a_run_is_one_line(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, lacks: str
) -> None:
    shutil.copytree(published / "study", tmp_path / "study")
    (tmp_path / "study" / "none-seed1" / name).write_text("{}")
    assert cli.main(["publish", str(tmp_path / "study"), "--results", str(tmp_path / "paper.json")], PROGRAM) == 2
    said = capsys.readouterr().err
    assert "none-seed1" in said
    assert lacks in said
    assert said.count("\n") == 1
    assert not (tmp_path / "paper.json").exists()


def test_damaged_pictures_are_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / figure_data.FILE).write_bytes(b"no safetensors at all")
    run, _ = tiny_run(tmp_path)
    with pytest.raises(StudyError, match=r"exhibits\.safetensors cannot be read \(.*\); move it and evaluation\.json away"):
        publish._strip([Run(tmp_path, run.config)])


def test_strengths_in_between_are_rows_of_no_selection(published: Path, tmp_path: Path) -> None:
    runs, path = runs_in(published / "study"), tmp_path / "paper.json"
    publish.publish(runs, path, "within_one_point", None, None, SILENT)
    publish.publish(runs, path, BETWEEN, None, None, SILENT)
    rows = row_store.read(path)["rows"]
    assert Counter(row["selection"] for row in rows) == {"within_one_point": 6, BETWEEN: 4}
    assert {row["regularizer"] for row in rows if row["selection"] == BETWEEN} == {"euclidean", "wasserstein"}
    text, plots = publish.page_of(path)
    assert "| Euclidean | between | 0 | 0.2 |" in text
    assert not any(BETWEEN in name for name in plots)
    with pytest.raises(StudyError, match="no run of euclidean or wasserstein among the 2 given"):
        publish.publish([run for run in runs if run.config.regularizer.kind == "none"], path, BETWEEN, None, None, SILENT)


def test_the_page_says_what_is_known_of_the_order_and_why_no_more(tmp_path: Path) -> None:
    known = publish.page_of(stored_in(tmp_path, curves(BETTER)))[0]
    counts = re.search(r"equal clean error\? Of 12 settings (\d+) can be compared: (\d+) shown, (\d+) not", known)
    assert counts is not None
    order = [trial.comparisons["order"].decides for trial in trials(Results.of(curves(BETTER)))]
    assert int(counts[1]) == sum(order) < 12
    assert int(counts[2]) > 0
    assert "clean errors: None 16.4 %; Euclidean 16.1 %, 17.1 %, 18.1 % and 22.1 %; Wasserstein 16.1 %" in known
    text = publish.page_of(stored_in(tmp_path / "single", curves(BETTER, seeds=1)))[0]
    assert "at equal clean error? Not known in any of 12 settings.**" in text
    assert "what is not in the table below is not trained yet" in text
    assert "**Not known yet**: every reading is implemented" in text


def test_the_plan_of_strengths_in_between_is_the_paper_s_recipe() -> None:
    usual = presets.with_preset(Study(), "cifar10-paper")
    plan = presets.with_both(Study(), "cifar10-paper", ROOT / "experiments" / "paper" / "between.toml")
    assert len(plan.runs("between")) == 12
    for name in ("data", "model", "training"):
        assert getattr(plan, name) == getattr(usual, name)
    assert not set(plan.regularizers) & set(usual.regularizers)
