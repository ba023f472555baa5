"""The readings of the paper: a plan that is trained in seconds at a small scale, resumed, and judged by known rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.paper import readings_page
from experiments.paper.commands import PROGRAM
from experiments.paper.plans import BY_NAME, FULL, READINGS, SEEDS, Setting, chosen_readings, settings_of
from experiments.paper.readings import read_rows
from experiments.paper.readings_page import JUDGED, MEASURES, readings_section
from tests.study.small_studies import tiny_run
from wassersmooth import cli
from wassersmooth.learning.objectives import Plain
from wassersmooth.study.training import TrainingState, training

NAMES = ("none", "disk", "zero-padding", "logits")


def train(folder: Path, *more: str) -> int:
    words = ["readings", "--small", "--output", str(folder / "rows.json"), "--runs", str(folder / "runs"), "--device", "cpu"]
    return cli.main([*words, *more], PROGRAM)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readings")
    assert train(folder, *NAMES, "--seeds", "0") == 0
    return folder


def test_every_network_of_the_plan_gets_a_row(trained: Path) -> None:
    rows = read_rows(trained / "rows.json")
    wanted = settings_of(chosen_readings(NAMES), (0,))
    assert {(row["reading"], row["eta"], row["seed"]) for row in rows} == {(s.reading.name, s.eta, s.seed) for s in wanted}
    assert len(rows) == 1 + 3 * 3
    for row in rows:
        assert row["errors"].keys() == {"clean", *MEASURES[:5]}
        assert row["flips"].keys() == {"horizontal", "vertical"}
        assert row["wrong"].keys() == row["errors"].keys()
        assert {"commit", "versions", "hardware"} <= row["origin"].keys()
        assert row["command"].startswith("python -m experiments.paper")
    assert len({json.dumps(row["wrong"]) for row in rows if row["reading"] != "none"}) > 1


def test_the_reading_is_what_is_trained(trained: Path) -> None:
    """Readings of one strength and seed differ in nothing but what is minimized."""
    disk, padded = (trained / "runs" / name / "euclidean-eta0.42-seed0" for name in ("disk", "zero-padding"))
    assert (disk / "config.json").read_bytes() == (padded / "config.json").read_bytes()
    assert (disk / "model.safetensors").read_bytes() != (padded / "model.safetensors").read_bytes()
    penalties = [json.loads((folder / "metrics.jsonl").read_text())["penalty"] for folder in (disk, padded)]
    assert all(penalties)
    assert penalties[0] != penalties[1]


def test_a_second_command_trains_only_what_is_missing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "rows.json"
    before, rows = path.read_bytes(), read_rows(path)
    assert train(trained, *NAMES, "--seeds", "0") == 0
    assert path.read_bytes() == before
    path.write_text(json.dumps({"rows": rows[:-2]}))
    assert train(trained, *NAMES, "--seeds", "0", "--seconds", "0") == 0
    assert "2 of 10 rows are missing; the same command continues" in capsys.readouterr().out
    assert train(trained, *NAMES, "--seeds", "0") == 0  # from the networks that are there
    again = read_rows(path)
    assert [row["errors"] for row in again] == [row["errors"] for row in rows]


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "rows.json").write_text('{"rows": [{"reading": "none"}]}')
    for act, message in (
        (lambda: train(tmp_path, "unit-mas"), "did you mean unit-mass"),
        (lambda: train(tmp_path, "--seeds", "0", "0"), "each once"),
        (lambda: train(tmp_path / "damaged"), "row 1 is damaged"),
        (lambda: cli.main(["readings", "--small"], PROGRAM), "--small needs its own"),
    ):
        assert act() == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(message, said)
    assert not (tmp_path / "rows.json").exists()


def test_an_objective_replaces_that_of_the_regularizer(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=1, regularizers=("euclidean:eta=0.5",))
    from tests.study.small_studies import CPU, SILENT

    with run.claimed():
        for _ in training(run, loaded, CPU, SILENT, Plain()):
            pass
    assert run.metrics()[0]["penalty"] == 0
    assert TrainingState(run.config, loaded, CPU).objective is None


def test_the_plan_has_three_strengths_of_every_reading() -> None:
    assert len(settings_of(list(READINGS), SEEDS)) == 3 * (1 + 3 * (len(READINGS) - 1))
    assert FULL.training.epochs == 24
    assert FULL.data.train_images is not None
    assert FULL.data.train_images % FULL.training.batch_size == 0  # one shape to prepare
    for reading in READINGS:
        assert len(set(reading.etas)) == len(reading.etas) == (3 if reading.metric else 1)
        assert not reading.against or BY_NAME[reading.against].of == reading.of
    first = settings_of(list(READINGS), SEEDS)[: 3 * len(READINGS)]
    assert {one.eta for one in first} == {reading.etas[0] for reading in READINGS}  # middle strengths first
    assert Setting(BY_NAME["none"], 0.0, 1).key == {"reading": "none", "eta": 0.0, "seed": 1}


def row(reading: str, eta: float, seed: int, clean: float, robust: float) -> dict[str, Any]:
    errors = {"clean": clean + 0.05 * seed} | {name: robust + 0.05 * seed for name in MEASURES[:5]}
    flips = {"horizontal": robust / 10 + 0.01 * seed, "vertical": robust / 10 + 0.01 * seed}
    intervals = {name: [value - 0.02, value + 0.02] for name, value in errors.items()}
    intervals |= {f"flips_{axis}": [value - 0.002, value + 0.002] for axis, value in flips.items()}
    found = {"reading": reading, "eta": eta, "seed": seed, "epochs": 24, "errors": errors, "images": {}, "wrong": {}}
    found |= {"flips": flips, "intervals": intervals, "command": "python -m experiments.paper readings"}
    return found | {"origin": {"commit": "c" * 40, "hardware": "a GPU", "versions": {"torch": "2"}}}


def curve(reading: str, moved: float, seeds: int = 3) -> list[dict[str, Any]]:
    """Three strengths, moved up by so many points of error."""
    points = ((0.1, 16.0, 50.0), (0.2, 18.0, 40.0), (0.4, 21.0, 35.0))
    return [row(reading, eta, seed, clean, robust + moved) for eta, clean, robust in points for seed in range(seeds)]


def test_the_page_answers_the_question() -> None:
    rows = curve("euclidean", 0) + curve("wasserstein", 3) + curve("unit-mass", -3) + curve("disk", 0)
    text = readings_section(rows)
    assert "**Shown to be better: unit-mass images in L under " in text
    (counts,) = re.findall(r"of (\d+) comparisons, (\d+) are shown, (\d+) contradicted, and (\d+) not shown \((\d+) of", text)
    n, left = len(MEASURES), len(MEASURES) * (len(JUDGED) - 3)
    assert tuple(map(int, counts)) == (n * len(JUDGED), n, n, n + left, left)
    table = text[text.index("| reading | FGSM") :].splitlines()
    by_title = {line.split(" | ")[0].strip("| "): line for line in table[2 : 2 + len(JUDGED)]}
    assert by_title["unit-mass images in L"].count(": **shown**") == n
    assert by_title["as published"].count(": **contradicted**") == n
    assert "**" not in by_title["the co-authors' operator"]
    assert "no network with this measure" in by_title["color edges"]
    assert "-3.0 ± 0." in by_title["unit-mass images in L"]
    worse = readings_section(curve("euclidean", 0) + curve("wasserstein", 3))
    assert worse.split("\n\n")[1].startswith("**No reading is shown to be better.**")
    alone = readings_section(curve("euclidean", 0, seeds=1) + curve("wasserstein", -3, seeds=1))
    assert alone.split("\n\n")[1].startswith("**Not known yet**: of ")


def test_diverged_networks_are_named_and_left_out() -> None:
    lost = {key: value for key, value in row("normalized-pixels", 1.0, 2, 0, 0).items() if key not in ("errors", "flips")}
    text = readings_section([*curve("euclidean", 0), lost | {"diverged": True}])
    assert "Diverged: normalized-pixels 1 (seed 2)." in text


def test_without_rows_the_page_has_the_plan() -> None:
    text = readings_section([])
    assert "python -m experiments.paper readings" in text
    assert "102 networks" in text
    assert all(f"| {reading.title} | {reading.said} |" in text for reading in READINGS)


def test_titles_are_those_of_the_measures() -> None:
    assert list(readings_page.TITLES) == list(MEASURES)
    assert readings_page.TITLES["fgsm_8_normalized_predicted"] == "FGSM 8/255, own protocol"
    assert readings_page.TITLES["pgd20_margin_2_pixel"] == "pixel 2/255"
