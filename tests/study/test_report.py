"""The report as files: self-contained, accessible, escaped, and there whatever is missing or broken in the runs."""

import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_runs import PAPERS, POINTS, fake_study
from tests.study.small_studies import CPU, SILENT, tiny_study
from wassersmooth import cli
from wassersmooth.study import experiment
from wassersmooth.study.report import pictures
from wassersmooth.study.report.data import StudyRecord
from wassersmooth.study.report.page import write_report
from wassersmooth.study.report.reading import LOST, read_study
from wassersmooth.study.report.summary import answers
from wassersmooth.study.tables import short_commit

VOID = {"meta", "img", "br", "line", "circle", "rect", "path", "use", "link"}


class Outline(HTMLParser):
    """Checks that elements close in order, and gathers what the tests ask about."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_study(tmp_path_factory.mktemp("runs") / "made-up", seeds=2)


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    path = write_report(study)
    assert path == study / "report.html"
    return path.read_text()


@pytest.mark.slow
def test_the_page_has_every_part(page: str) -> None:
    outline = Outline(page)
    names = {attributes.get("id") for attributes in outline.all("figure")}
    charts = {"error-curve", "strip", "curves", "perturbations", "neighbors", "training"}
    assert names == charts | {f"table-{number}" for number in range(1, 7)}
    assert len(outline.all("figcaption")) == len(outline.all("figure"))
    assert {"errors", "translations", "provenance"} <= {attributes.get("id") for attributes in outline.all("section")}
    assert "Remarks on the files" not in outline.words
    assert "left out" not in outline.words


def test_the_page_needs_nothing_from_outside_and_runs_nothing(page: str) -> None:
    outline = Outline(page)
    assert not outline.all("script")
    assert not outline.all("link")
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    for _, attributes in outline.elements:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"url\((?!#)|@import", page)
    assert "default-src 'none'" in page


def test_every_picture_has_words_and_every_name_is_there_once(page: str) -> None:
    outline = Outline(page)
    assert outline.all("img")
    assert all(attributes.get("alt") for attributes in outline.all("img"))
    drawings = [a for a in outline.all("svg") if a.get("aria-hidden") != "true"]
    assert len(drawings) == 9, "error against epsilon, 4 of single attacks, 4 of training"
    assert all(a.get("role") == "img" and len(a.get("aria-label") or "") > 40 for a in drawings)
    ids = [a["id"] for _, a in outline.elements if "id" in a]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', page)
    assert set(used) <= set(ids)


def test_drawings_follow_the_colors_and_the_font_of_the_page(page: str) -> None:
    drawings = "".join(re.findall(r"<svg role.*?</svg>", page, flags=re.DOTALL))
    assert "var(--s2)" in drawings
    assert "var(--ink)" in drawings
    assert "DejaVu" not in drawings
    assert not re.search(r"(?:fill|stroke): ?#(?!ffffff)[0-9a-f]{6}", drawings), "a color that would not follow dark mode"


def test_the_same_runs_give_the_same_report(study: Path, page: str) -> None:
    assert write_report(study).read_text() == page
    assert not list(study.glob(".*")) + list(study.glob("*.part"))


def test_tables_are_written_beside_it(study: Path, page: str) -> None:
    markdown, latex = (study / "tables.md").read_text(), (study / "tables.tex").read_text()
    assert markdown.startswith("# made-up\n")
    assert "paper: Wasserstein" not in markdown, "digits are not the paper's experiment"
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 6


@pytest.mark.slow
def test_user_text_is_escaped_everywhere(tmp_path: Path) -> None:
    attack = r"<script>alert('x')</script>\g\1"
    folder = fake_study(
        tmp_path / "a <script>alert(1)<", seeds=1, pictures=True, dataset=attack, model='"><img src=x onerror=y>'
    )
    run = next(folder.glob("none*"))
    run.rename(folder / "<script>alert(2)<")
    run = folder / "<script>alert(2)<"
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation |= {"verdict": attack, "masking": [{"evidence": attack}]}
    evaluation["errors"] |= {attack: 50.0}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    provenance = {"commit": attack, "versions": {attack: attack}, "device": attack, "command": [attack]}
    (run / "provenance.json").write_text(json.dumps(provenance))
    (run / "metrics.jsonl").write_text(attack)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"regularizer": attack}))
    page = write_report(folder).read_text()
    outline = Outline(page)
    assert not outline.all("script")
    assert not [a for a in outline.all("img") if a.get("onerror")]
    assert "<script" in str([a["alt"] for a in outline.all("img")]), "the words of a picture are escaped, not lost"
    assert "<script" not in page + (folder / "tables.md").read_text()
    assert "<script>alert(2)<" in outline.words


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("content", [None, b"", b"{ \xff not json", b"[1, 2]", b'{"errors": 7, "epoch": "x", "curve": []}'])
def test_a_missing_or_broken_file_costs_one_line_and_the_other_runs_stay(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    run = next(folder.glob("euclidean*"))
    (run / name).unlink(missing_ok=True)
    if content is not None:
        (run / name).write_bytes(content)
    outline = Outline(write_report(folder).read_text())
    about = [line for line in outline.text if line.startswith(f"{run.name}/{name}: ")]
    harmless = content is not None and content.startswith(b'{"') and name == "provenance.json"
    harmless |= name == "certificates.json" and content is None  # few runs have one
    assert len(about) == (0 if harmless else 1), "an object without the keys that are asked for may be an older version's"
    assert all("\n" not in line and len(line) < 400 for line in about)
    for point in ("None", "Wasserstein"):
        assert point in outline.words


def test_a_metrics_file_cut_short_shows_the_epochs_before(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    path = next(folder.glob("none*")) / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])
    words = Outline(write_report(folder).read_text()).words
    assert "line 12 of 12 is broken" in words
    assert "the 11 epochs before it are shown" in words


def test_losses_that_are_not_numbers_do_not_stop_the_report(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for run in folder.iterdir():
        lines = [{"epoch": 1, "loss": float("nan")}, {"epoch": 2, "loss": float("inf")}, {"epoch": 3, "loss": None}]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    outline = Outline(write_report(folder).read_text())
    sections = {attributes.get("id") for attributes in outline.all("section")}
    assert "errors" in sections
    assert "learning" not in sections, "a section without content is left out in silence"
    assert "Training:" not in outline.words


def test_runs_that_are_not_evaluated_yet_are_said_to_be(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for path in folder.glob("*/evaluation.json"):
        path.unlink()
    words = Outline(write_report(folder).read_text()).words
    assert "No run has been evaluated yet." in words
    assert "wassersmooth evaluate" in words
    assert "Training" in words


def test_nothing_but_broken_runs_is_still_a_report(tmp_path: Path) -> None:
    (tmp_path / "s" / "run").mkdir(parents=True)
    (tmp_path / "s" / "run" / "config.json").write_text("not json")
    assert "No run of this study could be read." in Outline(write_report(tmp_path / "s").read_text()).words


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names of files that are not text")
def test_a_folder_whose_name_is_not_text(tmp_path: Path) -> None:
    study = tmp_path / os.fsdecode(b"a\xffb")
    (study / "run").mkdir(parents=True)
    (study / "run" / "config.json").write_text("not json")
    assert "<h1>a?b</h1>" in write_report(study).read_text(encoding="utf-8")
    assert (study / "tables.md").read_text(encoding="utf-8").startswith("# a?b")


def test_an_empty_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match="holds no run folder"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    old = write_report(folder).read_text()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"the report needs the package matplotlib; install it .*'wassersmooth\[study\]'"):
        write_report(folder)
    assert (folder / "report.html").read_text() == old


def test_other_regularizers_and_strengths_have_columns_and_colors_of_their_own(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False, **PAPERS)
    more = fake_study(tmp_path / "more", seeds=1, pictures=False, **PAPERS)
    for number, run in enumerate(sorted(more.iterdir())):
        kind = ("uniform", "wasserstein", "adversarial")[number]
        point = {"regularizer": kind, "eta": 0.7 if number < 2 else 8 / 255, "radius": 4 * (number < 2)}
        config = json.loads((run / "config.json").read_text()) | point
        (run / "config.json").write_text(json.dumps(config))
        run.rename(folder / f"more-{number}")
    page = write_report(folder).read_text()
    head = re.search(r'id="table-1".*?</thead>', page, flags=re.DOTALL)
    assert head is not None
    swatches = re.findall(r"swatch (s\d)", head[0])
    assert len(set(swatches)) == len(swatches) == 6
    assert swatches[:3] == ["s0", "s1", "s2"]
    assert "η = 0.7, radius 4" in head[0]
    assert "η = 8/255" in head[0]
    assert "Image-independent" in head[0]
    papers = re.findall(r"<span>paper</span> 30\.20", page)
    assert len(papers) == 2, "beside one Wasserstein column, in each unit"


def test_seeds_are_one_column_and_machines_do_not_matter(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=2, pictures=False)
    for number, path in enumerate(folder.glob("*/config.json")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"device": f"cuda:{number}", "threads": number}))
    head = re.search(r'id="table-1".*?</thead>', write_report(folder).read_text(), flags=re.DOTALL)
    assert head is not None
    assert head[0].count("swatch") == len(POINTS)


def test_runs_that_do_not_compare_are_said_on_the_page_in_the_tables_and_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    assert cli.main(["report", str(folder)]) == 0
    assert "alike" not in capsys.readouterr().out + (folder / "report.html").read_text() + (folder / "tables.md").read_text()
    path = next(folder.glob("none*")) / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"suite": "quick"}))
    assert cli.main(["report", str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Not all runs were measured alike: none-seed0 (suite quick, ")
    assert said[0].endswith(f"wassersmooth evaluate {folder} --suite standard")
    assert len(said) == 2
    line = "Not all runs were measured alike: none-seed0 (suite quick, 400 test images)"
    assert line in Outline((folder / "report.html").read_text()).words
    assert line in (folder / "tables.md").read_text()


def test_a_commit_keeps_the_sign_of_a_changed_tree() -> None:
    assert short_commit("0123456789abcdef") == "0123456789ab"
    assert short_commit("0123456789abcdef+") == "0123456789ab+"
    assert short_commit("0123456+") == "0123456+"


def test_a_run_is_not_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = next(path.parent for path in fake_study(tmp_path / "study").glob("*/config.json"))
    assert cli.main(["report", str(run)]) == 2
    assert "report needs the folder of a study" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"{ \xff not json", b"[1, 2]"])
def test_a_damaged_evaluation_is_refused_with_the_command_that_writes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    study = tiny_study(tmp_path, epochs=1)
    (run,) = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    experiment.measure([run], SILENT, "cpu", "quick", 12)
    path = run.folder / "evaluation.json"
    whole = path.read_bytes()
    path.write_bytes(content)
    assert cli.main(["report", str(tmp_path / "study")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wassersmooth: {path}")
    assert error.endswith(f"; measured.jsonl still has its rows; write it again with: wassersmooth evaluate {run.folder}\n")
    assert cli.main(["evaluate", str(run.folder), "--suite", "quick", "--test-images", "12", "--device", "cpu"]) == 0
    assert json.loads(path.read_bytes())["errors"] == json.loads(whole)["errors"]
    path.unlink()
    assert cli.main(["report", str(tmp_path / "study")]) == 0, "one that was never made is no damage"


def test_a_run_that_cannot_be_looked_at_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, original = fake_study(tmp_path / "s", seeds=1, pictures=False), Path.stat

    def refuse(self: Path, **named: bool) -> os.stat_result:
        if self.parent.name == "none-seed0":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, **named)

    monkeypatch.setattr(Path, "stat", refuse)
    assert cli.main(["report", str(folder)]) == 2
    place = folder / "none-seed0" / "config.json"
    assert capsys.readouterr().err.startswith(f"wassersmooth: {place} cannot be read (Permission denied); fix the permissions")
    page = write_report(folder)  # after training, as reproduce does
    assert "none-seed0: not readable (" in page.read_text()


def test_errors_on_other_images_are_not_compared(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    comparing = re.compile("beyond the choice of test images|cannot be told")
    path = next(folder.glob("none*")) / "evaluation.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"suite": "quick"}))
    assert comparing.search(Outline(write_report(folder).read_text()).words), "the same images, by another suite"
    path.write_text(json.dumps(record | {"test_sha256": "another"}))
    words = Outline(write_report(folder).read_text()).words
    assert "their errors do not compare" in words
    assert not comparing.search(words)
    assert not comparing.search((folder / "tables.md").read_text())
    assert "The error on clean test images is" in words


def test_three_answers_come_first_then_one_plot_then_tables(page: str) -> None:
    questions = re.findall(r'<section class="answer"><h2>(.*?)</h2>', page)
    assert questions == ["Clean error", "Error under attack, 8/255", "Can the attacks be trusted?"]
    order = [page.index(mark) for mark in ('class="answers"', 'id="error-curve"', 'id="table-1"')]
    assert order == sorted(order)
    assert 'id="glance"' not in page


def test_answers_are_the_numbers_of_the_groups(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    path = next(folder.glob("none*")) / "evaluation.json"
    record = json.loads(path.read_text())
    record["errors"]["clean"] = 7.3
    record["curve"][3] |= {"error": 91.2, "low": 88.1, "high": 94.2}
    record["verdict"] = "masked: gradients vanish"
    path.write_text(json.dumps(record))
    first, attacked, trusted = (answer.rows[0] for answer in answers(read_study(folder)))
    assert (first.value, attacked.value, attacked.note) == ("7.3 %", "91.2 %", "88.1 to 94.2")
    assert (trusted.value, trusted.bad, trusted.note) == ("no", True, "signs of gradient masking: gradients vanish")
    assert (first.bad, attacked.bad) == (False, True), "guessing among ten classes is wrong on 90 % of the images"
    record["errors"]["clean"], record["intervals"]["clean"] = 89.0, [88.0, 90.0]
    path.write_text(json.dumps(record))
    assert [row.bad for row in answers(read_study(folder))[0].rows] == [True, False, False]


def test_an_evaluation_of_an_earlier_version_still_has_answers(tmp_path: Path) -> None:
    """One without a curve: from the sizes of its single attacks, or from what its keys say."""
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for path in folder.glob("*/evaluation.json"):
        record = json.loads(path.read_text())
        del record["curve"], record["summary"], record["classes"]
        path.write_text(json.dumps(record))
    study = read_study(folder)
    assert [answer.question for answer in answers(study)][1] == "Error under 20 margin-loss PGD steps at 8/255 in pixel units"
    sized = [
        {"name": f"fgsm_{n}", "error": error, "low": error - 1, "high": error + 1, "images": 400}
        | {"epsilon": n / 255, "units": "pixel", "norm": "linf"}
        for n, error in ((8, 60.0), (2, 70.0), (25, 80.0))
    ]
    for path in folder.glob("*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"entries": sized}))
    curve = read_study(folder).groups[0].curve()
    assert [(round(255 * point.epsilon), point.error) for point in curve] == [(2, 70.0), (8, 70.0), (25, 80.0)]
    assert 'id="error-curve"' in write_report(folder).read_text()


@pytest.mark.slow
def test_one_unit_of_epsilon_where_the_normalization_changes_nothing(tmp_path: Path) -> None:
    folder = fake_study(tmp_path / "s", seeds=1)
    assert "normalized units" in write_report(folder).read_text()
    for path in folder.glob("*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"std": [1.0]}))
    assert "normalized units" not in write_report(folder).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"dataset": "digits"}, {"model": "small"}, {"epochs": 24}, {"augment": True}])
def test_the_papers_numbers_stand_beside_its_own_experiment_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False, **PAPERS)
    assert "<span>paper</span> 30.20" in write_report(folder).read_text()
    other = fake_study(tmp_path / "t", seeds=1, pictures=False, **PAPERS | change)
    assert "<span>paper</span>" not in write_report(other).read_text()


def test_neighborhoods_of_other_images_stand_in_the_papers_study_alone(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read_study(study)
    assert pictures.neighborhoods(record) is not None
    for run in record.runs:
        if run.pictures is not None and "neighbors" in run.pictures.facts:
            run.pictures.facts["neighbors"]["origin"] = "the digits of scikit-learn"
    assert pictures.neighborhoods(record) is None
    monkeypatch.setattr(StudyRecord, "is_the_papers", True)
    assert pictures.neighborhoods(record) is not None


@pytest.mark.parametrize(
    "curve", [7, ["x"], [{"epsilon": "x"}], [{"epsilon": 0.1, "units": "pixel", "norm": 3}], [{"made": "up"}]]
)
def test_a_damaged_curve_costs_the_plot_and_not_the_page(tmp_path: Path, curve: object) -> None:
    folder = fake_study(tmp_path / "s", seeds=1, pictures=False)
    for path in folder.glob("*/evaluation.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"curve": curve}))
    page = write_report(folder).read_text()
    assert 'class="answers"' in page
    assert 'id="error-curve"' not in page
