"""The paper's own protocol: rows of small networks, measured as the library measures, resumed, and told on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import row_store
from experiments.paper import protocol
from experiments.paper.claims import trials
from experiments.paper.commands import NETWORKS, PROGRAM
from experiments.paper.protocol import REACH, crossing, reaches_of, read_rows
from experiments.paper.protocol_page import protocol_section
from experiments.paper.results import REGULARIZERS, Results
from tests.experiments.paper.fake_publication import fake_rows
from tests.study.small_studies import tiny_run, train_to_the_end
from wassersmooth import attacks, cli, variations
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run
from wassersmooth.study.tables import DASH

ATTACKED = ("fgsm_8_normalized", "fgsm_25_normalized", "ifgsm20_8_normalized")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    run, loaded = tiny_run(tmp_path_factory.mktemp("trained"), epochs=1)
    train_to_the_end(run, loaded)
    return run, loaded


def measure(run: Run, output: Path, *more: str) -> list[dict[str, Any]]:
    sizes = ["--fgsm-images", "12", "--ifgsm-images", "6", "--flips-images", "5"]
    words = ["protocol", str(run.folder), "--output", str(output), "--device", "cpu", *sizes, *more]
    assert cli.main(words, PROGRAM) == 0
    return read_rows(output)


def test_rows_are_what_the_library_measures(trained: tuple[Run, Any], tmp_path: Path) -> None:
    run, loaded = trained
    found = {row["measure"]: row for row in measure(run, tmp_path / "rows.json")}
    flips = {f"flips_{axis}_{padding}" for axis in ("horizontal", "vertical") for padding in ("zeros", "edge", "reflect")}
    assert found.keys() == {"clean", *flips, *ATTACKED, *(f"{name}_predicted" for name in ATTACKED)}
    assert {name: row["images"] for name, row in found.items()} == {
        name: 6 if name.startswith("ifgsm") else 5 if name in flips else 12 for name in found
    }
    assert all(row["seed"] == 0 and row["regularizer"] == "none" and row["epochs"] == 1 for row in found.values())
    assert all({"commit", "versions", "hardware"} <= row["origin"].keys() and row["seconds"] >= 0 for row in found.values())
    assert all("experiments.paper" in row["command"] for row in found.values())

    model = run.load_model(loaded).eval()
    order = torch.randperm(len(loaded.test), generator=torch.Generator().manual_seed(0))
    images, labels = loaded.test.images[order], loaded.test.labels[order]
    attack = attacks.FGSM(8 / 255, units="normalized", against="predictions")
    wrong = model(attack(model, images[:12], labels[:12])).argmax(1) != labels[:12]
    assert found["fgsm_8_normalized_predicted"]["error"] == pytest.approx(100 * float(wrong.double().mean()), abs=1e-3)
    reach = loaded.test.images.shape[-1] - 1
    for longest in (2, reach):
        flipped = variations.label_flips(model, images[:5], "vertical", longest, "edge").double().mean()
        assert found["flips_vertical_edge"]["by_reach"][str(longest)][0] == pytest.approx(float(flipped), abs=1e-3)
    assert reach < REACH


def test_a_second_command_measures_only_what_is_missing(trained: tuple[Run, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert cli.main(["protocol", str(trained[0].folder), "--output", str(path), "--seconds", "0"], PROGRAM) == 0
    assert read_rows(path) == []
    rows = measure(trained[0], path)
    before = path.read_bytes()
    assert measure(trained[0], path) == rows
    assert path.read_bytes() == before
    path.write_text(json.dumps({"rows": rows[3:]}))
    again = measure(trained[0], path)
    old, new = ([{k: v for k, v in row.items() if k not in ("seconds",)} for row in each] for each in (rows, again))
    assert old == new
    more = measure(trained[0], path, "--fgsm-images", "15")
    assert {row["images"] for row in more if row["measure"] == "clean"} == {15}
    assert {row["images"] for row in measure(trained[0], path) if row["measure"] == "clean"} == {15}  # more are kept


def test_rows_of_other_weights_are_replaced(trained: tuple[Run, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = measure(trained[0], path)
    path.write_text(json.dumps({"rows": [row | {"model_sha256": "another", "images": 99} for row in rows]}))
    again = measure(trained[0], path)
    assert {row["model_sha256"] for row in again} == {rows[0]["model_sha256"]}


def test_bad_input_is_one_line(trained: tuple[Run, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged.json").write_text('{"rows": [{"measure": "clean"}]}')
    folder = str(trained[0].folder)
    for words, message in (
        (["protocol", str(tmp_path / "nowhere")], "nowhere"),
        (["protocol", folder, "--fgsm-images", "-1"], "fgsm_images must be at least 0; got -1"),
        (["protocol", folder, "--output", str(tmp_path / "damaged.json")], "row 1 is damaged"),
    ):
        assert cli.main(words, PROGRAM) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(message, said)


def test_flips_by_reach_are_those_of_the_inner_frames() -> None:
    changes = torch.tensor([[True, False, True, True], [False, True, False, True]])
    assert {reach: flips.tolist() for reach, flips in reaches_of(changes)} == {1: [1, 1], 2: [3, 2]}
    assert crossing([1.0, 2.0, 3.0], 2.0) == 2
    assert crossing([1.0, 2.0], 2.5) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by_reach": {"1": [1, 1, 1], "3": [1, 1, 1]}}, "every reach from 1 on"),
        ({"by_reach": {}, "error": 5.0}, "either an error or by_reach"),
        ({"by_reach": {"1": [1, 1]}}, "by_reach: 1: expected"),
    ],
)
def test_a_row_that_was_edited_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = next(row for row in rows_of_protocol() if "by_reach" in row)
    whole = row | {"eta": 0.1, "radius": 0, "mass": 0.0, "dataset": "cifar10", "model": "resnet20", "test_sha256": "a"}
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [whole]}))
    assert read_rows(tmp_path / "rows.json") == [whole]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [whole | change]}))
    with pytest.raises(StudyError, match=message):
        read_rows(tmp_path / "rows.json")


def test_the_published_networks_are_what_is_measured_without_folders() -> None:
    assert [path.stem for path in NETWORKS] == list(REGULARIZERS)


def rows_of_protocol(**errors: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Of one network for each regularizer."""
    found = []
    for place, kind in enumerate(REGULARIZERS):
        common = {"regularizer": kind, "kind": kind, "epochs": 200, "seed": 0, "model_sha256": f"sha {kind}", "images": 1000}
        common |= {"origin": {"commit": "c" * 40, "hardware": "a CPU", "versions": {"torch": "2"}}, "seconds": 60.0}
        common |= {"command": "python -m experiments.paper protocol"}
        for name, values in {"clean": (16.0, 17.0, 16.5), **errors}.items():
            found.append(common | {"measure": name, "error": values[place], "interval": [0, 1], "wrong": ""})
        flips = {str(reach): [0.5 * reach - place, 0, 0] for reach in range(1, 25)}
        found.append(common | {"measure": "flips_horizontal_zeros", "by_reach": flips})
    return found


def test_the_page_says_what_explains_each_row() -> None:
    results = Results.of([row | {"model_sha256": f"sha {row['regularizer']}"} for row in fake_rows(1)])
    rows = rows_of_protocol(fgsm_8_normalized_predicted=(82.0, 33.0, 38.0), fgsm_25_normalized_predicted=(60.0, 60.0, 60.0))
    text = protocol_section(rows, results, trials(results, rows))
    assert "within 0.2 points of the paper's level without a penalty, 82.2" in text
    assert "Euclidean is 1.9 points above the paper's and Wasserstein is 7.8 points above the paper's (not explained: W" in text
    assert (
        "Euclidean / Wasserstein are 33.0 / 38.0 at clean errors of 17.0 / 16.5; their order at equal clean error is " in text
    )
    assert "**not shown**" in text
    answer = text.split("\n\n")[1]
    assert "None explained in part (1 of 2 rows within 5 points); Euclidean explained in part (1 of 2 rows" in answer
    assert "Wasserstein not explained (0 of 2 rows within 5 points); 1 seed of each" in answer
    assert "Of 3 rows: 0 shown, 3 not shown, 0 contradicted; none of them could be compared." in answer
    assert "; labels, normalized units come nearer" in text  # fgsm_25, whose labels are made to fit
    assert (
        "the plain network reaches the paper's 10.01 flips with zeros at reach 21, where Euclidean / Wasserstein have" in text
    )
    assert "9.50 / 8.50 (the paper: 7.90 / 6.49)" in text
    assert f"| horizontal | edge | {DASH} / {DASH} / {DASH} |" in text
    assert "python -m experiments.paper protocol" in protocol_section([], results, [])


def test_networks_that_are_not_on_the_page_are_left_out() -> None:
    results = Results.of([row | {"model_sha256": f"other {row['regularizer']}"} for row in fake_rows(1)])
    assert "Not measured yet" in protocol_section(rows_of_protocol(), results, [])


def test_rows_in_the_repository_are_whole() -> None:
    path = Path(__file__).parents[3] / "results/paper/protocol.json"
    rows = read_rows(path)
    assert len({row_store.key_of(row, protocol.KEY) for row in rows}) == len(rows)
    assert {row["kind"] for row in rows} == set(REGULARIZERS)
