"""The frontier: runs become rows, rows become fronts, answers and a page. All numbers here are made up."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
import re
import shutil
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from study.fake_runs import write_config, write_metrics, write_provenance

from wassersmooth.cli import main
from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.suites import FRONTIER
from wassersmooth.study import kinds
from wassersmooth.study.errors import StudyError
from wassersmooth.study.frontier import comparison, gathering, plots, questions
from wassersmooth.study.frontier.aims import Aim, aims
from wassersmooth.study.frontier.comparison import Difference, at_equal_clean, at_equal_strength
from wassersmooth.study.frontier.families import clear_of, standings
from wassersmooth.study.frontier.gathering import Frontier, gather, marked, row_of, united
from wassersmooth.study.frontier.noise import Noise
from wassersmooth.study.frontier.page import page_text, write_page
from wassersmooth.study.frontier.points import STRONGEST, THREATS, WEAKER, Point, base_variant, chosen, fronts, points_of
from wassersmooth.study.frontier.prices import add_prices, relative
from wassersmooth.study.measured_rows import MeasuredRows
from wassersmooth.study.regularizers import KINDS, Regularizer
from wassersmooth.study.runs import Run
from wassersmooth.study.screen import Screen

ROOT = Path(__file__).parent.parent.parent
SILENT = Screen(quiet=True)
IMAGES = 200_000  # so many that gaps of a point are no chance


def made_up(text: str, better: float = 0.0, clean: float = 0.0) -> dict[str, float]:
    """Errors on one curve for everybody, clean error rising with eta; ``better`` lowers the robust ones."""
    cost = 16 + clean + 6 * math.log1p(2 * Regularizer.parse(text).eta)
    robust = {
        "pgd20_margin_8_pixel": 130 - 2.2 * cost,
        "multitargeted20_8_pixel": 130 - 2.2 * cost,
        "pgd20_margin_2_pixel": 60 - cost,
        "pgd20_l2_0.5_pixel": 80 - 1.5 * cost,
    }
    robust |= {"wasserstein20_0.5_unit_r2": 55 - cost, "elastic_1.5": 45 - 0.5 * cost}
    return {"clean": cost} | {name: value - better + 2.2 * clean for name, value in robust.items()}


def fake_run(folder: Path, text: str, seed: int = 0, better: float = 0.0, clean: float = 0.0, **settings: Any) -> Path:
    """An evaluated run of the frontier's suite, a little apart from seed to seed."""
    point, dice = Regularizer.parse(text), random.Random(f"{text} {seed} {settings}")
    place = folder / f"{point.slug}-seed{seed}"
    place.mkdir(parents=True)
    given = {"eta": point.eta, "radius": point.radius, "mass": point.mass, "seed": seed, "epochs": 24}
    given |= {"epsilon": point.epsilon} if point.epsilon else {}
    write_config(place, {"regularizer": point.kind, **given, **settings})
    write_metrics(place, dice, penalized=True, epochs=24)
    write_provenance(place, dice, seed)
    errors = {name: value + dice.uniform(-0.1, 0.1) for name, value in made_up(text, better, clean).items()}
    write_evaluation(place, errors, 4 - better)
    held_out = {"errors": {name: value + 1 for name, value in errors.items()}, "flips": {"horizontal": 3.0, "vertical": 4.0}}
    (place / "validation.json").write_text(json.dumps(held_out))
    return place


def write_evaluation(place: Path, errors: dict[str, float], flips: float, images: int = IMAGES, **changes: Any) -> None:
    intervals = {name: list(wilson(round(error * images / 100), images)) for name, error in errors.items()}
    intervals |= {f"flips_{axis}": [flips - 0.2, flips + 0.2] for axis in ("horizontal", "vertical")}
    record: dict[str, Any] = {"suite": "frontier", "errors": errors, "intervals": intervals, "verdict": "no sign of masking"}
    record |= {"entries": [{"name": name, "images": images} for name in errors], "model_sha256": place.name}
    record |= {"flips": {"horizontal": flips, "vertical": flips}}
    (place / "evaluation.json").write_text(json.dumps(record | changes))


def study(folder: Path, **settings: Any) -> Path:
    """Every family that the questions ask for; the transport families are better by two points than the rest."""
    for text in ("none", "euclidean:eta=0.2", "euclidean:eta=0.5", "euclidean:eta=1", "pgd7:eta=0.01", "pgd7:eta=0.03"):
        fake_run(folder, text, **settings)
    for eta in (0.2, 0.5, 1):
        fake_run(folder, f"wasserstein:eta={eta},radius=2", better=2, **settings)
        fake_run(folder, f"wasserstein:eta={eta},radius=2", seed=1, better=2, **settings)
        fake_run(folder, f"uniform:eta={eta},radius=2", **settings)
        fake_run(folder, f"wasserstein:eta={eta},radius=8", better=2, **settings)
        fake_run(folder, f"wasserstein:eta={eta},radius=2,mass=0.25", better=5, **settings)
        fake_run(folder, f"tikhonov:eta={eta},radius=2", better=-1, **settings)
        fake_run(folder, f"tikhonov-curvature:eta={eta},radius=2", better=2, **settings)
    fake_run(folder, "wasserstein+l2-adversarial:eta=0.2,radius=2,epsilon=0.25", better=6, **settings)
    return folder


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frontier")
    for name, changes in VARIANTS.items():
        place = folder / name
        for text in ("none", "euclidean:eta=0.5", "wasserstein:eta=0.5,radius=2"):
            better, clean, settings = changes
            fake_run(place, text, better=better, clean=clean, **settings)
    gather([study(folder / "base"), *(folder / name for name in VARIANTS)], folder / "frontier.json", SILENT)
    return folder / "frontier.json"


# (points by which robust errors are better at the same clean error, points of clean error lost, settings)
VARIANTS: dict[str, tuple[float, float, dict[str, Any]]] = {
    "long": (-5, 0, {"epochs": 100}),
    "early": (0, 0, {"epochs": 100, "patience": 100, "patience_on": "robust"}),
    "relu": (-3, 0.5, {"activation": "relu"}),
    "augmented": (0, -7, {"augment": True}),
}


def sentences(gathered: Path, name: str) -> list[str]:
    found = questions.answers(points_of(Frontier.at(gathered).rows))
    return list(next(answer for answer in found if answer.name == name).sentences)


def test_a_run_becomes_a_row(tmp_path: Path) -> None:
    fake_run(tmp_path / "study", "wasserstein+l2-adversarial:eta=0.2,radius=2,mass=0.25,epsilon=0.5", seed=3)
    (row,) = gather([tmp_path / "study"], tmp_path / "results" / "frontier.json", SILENT)
    assert row["family"] == "wasserstein+l2-adversarial:radius=2,mass=0.25"
    assert row["regularizer"] == "wasserstein+l2-adversarial:eta=0.2,radius=2,mass=0.25,epsilon=0.5"
    expected = {"eta": 0.2, "radius": 2, "mass": 0.25, "epsilon": 0.5, "activation": "softplus", "augment": False, "epochs": 24}
    expected |= {"seed": 3, "verdict": "no sign of masking", "training_seconds": 10.0, "hardware": "cpu (made up)"}
    assert {key: row[key] for key in expected} == expected
    assert set(row["errors"]) == {"clean", *FRONTIER}
    assert row["flips"] == {"horizontal": 4.0, "vertical": 4.0}
    assert len(row["commit"]) == 40


def test_every_row_of_the_suite_is_a_threat_of_the_page() -> None:
    assert set(FRONTIER) <= set(THREATS)
    assert set(KINDS) == set(kinds.TITLES) == set(kinds.COLORS)
    assert sorted(KINDS) == sorted(["none", *(kind for way in plots.WAYS for kind in way.kinds)])


def test_more_seeds_are_added_and_a_second_look_replaces(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    fake_run(tmp_path / "a", "euclidean:eta=0.2")
    fake_run(tmp_path / "b", "euclidean:eta=0.2", seed=1)
    gather([tmp_path / "a"], results, SILENT)
    assert len(gather([tmp_path / "b"], results, SILENT)) == 2
    first = results.read_bytes()
    assert len(gather([tmp_path / "b", tmp_path / "a"], results, SILENT)) == 2
    assert results.read_bytes() == first
    (point,) = points_of(Frontier.at(results).rows)
    assert point.seeds == 2


def test_another_suite_adds_its_measures_and_more_images_win(tmp_path: Path) -> None:
    results, place = tmp_path / "frontier.json", fake_run(tmp_path / "a", "euclidean:eta=0.2")
    (before,) = gather([place], results, SILENT)
    few = {"clean": 1.0, "pgd20_margin_8_pixel": 2.0, "autoattack_8_pixel": 93.0}
    write_evaluation(place, few, 4, images=100, verdict="masked: made up")
    (row,) = gather([place], results, SILENT)
    assert row["errors"] == before["errors"] | {"autoattack_8_pixel": 93.0}
    assert (row["images"]["autoattack_8_pixel"], row["images"]["clean"]) == (100, IMAGES)
    assert row["verdict"] == "masked: made up"
    assert united(row, before)["verdict"] == "masked: made up"
    assert united(row, before | {"model_sha256": "other weights"})["errors"] == before["errors"]


def test_what_another_process_adds_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process that comes while the first is at work waits for it, and sees what it has stored."""
    results = tmp_path / "frontier.json"
    fake_run(tmp_path / "first", "none")
    more = fake_run(tmp_path / "again", "none")
    add_autoattack(more, 99.0)
    fake_run(tmp_path / "second", "none", seed=1)
    gather([tmp_path / "first"], results, SILENT)
    others: list[threading.Thread] = []

    def slow(run: Run) -> dict[str, Any]:
        if not others:
            others.append(threading.Thread(target=gather, args=([tmp_path / "again"], results, SILENT)))
            others[0].start()
            others[0].join(timeout=0.5)  # it would be done by now if nobody held it up
        return row_of(run)

    monkeypatch.setattr(gathering, "row_of", slow)
    gather([tmp_path / "second"], results, SILENT)
    others[0].join()
    found = {row["seed"]: row["errors"] for row in Frontier.at(results).rows}
    assert sorted(found) == [0, 1]
    assert found[0]["autoattack_8_pixel"] == 99.0


def test_runs_that_are_not_ready_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path / "study", "none")
    (fake_run(tmp_path / "study", "euclidean:eta=0.2") / "provenance.json").unlink()
    (fake_run(tmp_path / "study", "euclidean:eta=0.3") / "evaluation.json").unlink()
    write_evaluation(fake_run(tmp_path / "study", "euclidean:eta=0.4"), {"clean": 3.0, "fgsm_8_pixel": 4.0}, 1)
    assert len(gather([tmp_path / "study"], tmp_path / "frontier.json", Screen())) == 1
    said = capsys.readouterr().out
    assert said.count("left out") == 3
    with pytest.raises(StudyError, match="measure first: wassersmooth evaluate FOLDER --suite frontier"):
        gather([tmp_path / "study" / "euclidean-eta0.3-seed0"], tmp_path / "other.json", SILENT)


def test_one_frontier_is_one_harness(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "none")
    fake_run(tmp_path / "b", "none", learning_rate=0.7)
    gather([tmp_path / "a"], tmp_path / "frontier.json", SILENT)
    with pytest.raises(StudyError, match=r"learning_rate = 0\.7; .* one harness; choose another --results"):
        gather([tmp_path / "b"], tmp_path / "frontier.json", SILENT)
    fake_run(tmp_path / "c", "none", seed=1, epochs=100, milestones=[50, 75])
    gather([tmp_path / "c"], tmp_path / "frontier.json", SILENT)
    fake_run(tmp_path / "d", "none", seed=2, epochs=100, milestones=[12, 18])
    with pytest.raises(StudyError, match=r"milestones of 100 epochs = \[12, 18\]; .* runs with \[50, 75\]"):
        gather([tmp_path / "d"], tmp_path / "frontier.json", SILENT)


def test_the_front_is_what_nobody_beats(gathered: Path) -> None:
    rows = Frontier.at(gathered).rows
    points = points_of(rows)
    for threat, found in fronts(points).items():
        assert found
        for point in found:
            rivals = [p for p in points if p.variant == point.variant and p is not point]
            best, here = (point.mean("clean"), point.mean(threat)), point.mean(threat)
            assert here is not None
            assert not any((p.mean("clean"), p.mean(threat)) <= best and (p.mean(threat) or 0) <= here for p in rivals)
    on_front = [row for row in rows if "pgd20_margin_8_pixel" in row["front"] and row["epochs"] == 24]
    assert {row["family"] for row in on_front if not row["augment"] and row["activation"] == "softplus"} >= {"none"}
    assert marked(rows) == rows


def test_a_gap_that_was_planted_is_found_at_equal_clean_error(gathered: Path) -> None:
    points = points_of(Frontier.at(gathered).rows)
    base = base_variant(points)
    sides = [[p for p in points if p.family == f and p.variant == base] for f in ("wasserstein:radius=8", "euclidean")]
    met = at_equal_clean(*sides, "pgd20_margin_8_pixel", Noise.of(points))
    assert met is not None
    assert met.difference.mean == pytest.approx(-2, abs=0.5)
    assert 0 < met.difference.error < 0.5
    assert at_equal_clean(sides[0], [p for p in points if p.variant.augment], "elastic_1.5", Noise.of(points)) is None


@pytest.mark.parametrize("curve", [[(10, 50), (12, 41), (17, 30), (26, 27), (30, 20)], [(10, 50), (20, 30)], [(10, 50)]])
def test_fronts_are_monotone_cubics(curve: list[tuple[float, float]]) -> None:
    cleans, robusts = (list(part) for part in zip(*curve, strict=True))
    x = [10 + (cleans[-1] - 10) * k / 200 for k in range(201)]
    found = comparison._on_front(curve, x)
    assert comparison._on_front(curve, cleans) == pytest.approx(robusts)
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(found))
    if len(curve) > 2:
        interpolate = pytest.importorskip("scipy.interpolate")
        assert found == pytest.approx(interpolate.PchipInterpolator(cleans, robusts)(x).tolist(), abs=1e-9)


def on_a_curve(cleans: Sequence[float], chance: random.Random, kind: str = "euclidean", **settings: Any) -> list[Point]:
    """One run each on the convex curve that every way of training has, moved by chance."""
    points = []
    for clean in cleans:
        errors = {"clean": chance.gauss(clean, 0.4), STRONGEST: chance.gauss(60 + 40 * math.exp(-(clean - 16) / 6), 0.8)}
        row = {"errors": errors, "flips": {}, "intervals": {}, "regularizer": f"{kind}:{clean:g}", "family": kind}
        points.append(Point(({**row, **USUAL, **settings, "kind": kind},)))
    return points


USUAL = {"activation": "softplus", "augment": False, "epochs": 24, "patience": None, "patience_on": "clean"}
KNOWN_NOISE = Noise({"clean": 0.4**2 / (20 * 80), STRONGEST: 0.8**2 / (75 * 25)}, {}, {"clean": 20, STRONGEST: 20})


def test_a_variant_that_changes_nothing_is_not_said_to() -> None:
    """It has two points, and the base many: a chord between the two would lie above the curve of the others."""
    gaps = []
    for trial in range(60):
        chance = random.Random(trial)
        base, few = on_a_curve((17, 18, 20, 24, 30, 37), chance), on_a_curve((20, 36), chance)
        met = at_equal_clean(few, base, STRONGEST, KNOWN_NOISE, at_first=True)
        assert met is not None
        gaps.append(met.difference)
    assert statistics.fmean(gap.mean for gap in gaps) == pytest.approx(0, abs=0.3)
    assert sum(gap.clear for gap in gaps) <= 8
    better = at_equal_clean(few, on_a_curve((17, 18, 20, 24, 30, 37), random.Random(0)), STRONGEST, KNOWN_NOISE)
    assert better is not None, "and the other way round the base has points between"


def test_points_that_are_only_nearly_equal_are_not_compared() -> None:
    chance = random.Random(0)
    quiet = Noise(dict.fromkeys(KNOWN_NOISE.seeds, 0.0), {}, KNOWN_NOISE.freedom)
    one, other, dense = (on_a_curve(cleans, chance) for cleans in ((20.0,), (23.0,), (24, 28, 33)))
    assert at_equal_clean(one, other, STRONGEST, quiet) is None
    assert at_equal_clean(one, dense, STRONGEST, quiet) is None
    assert at_equal_clean(on_a_curve((28,), chance), dense, STRONGEST, quiet) is not None


def test_nothing_is_compared_beyond_the_end_of_a_front() -> None:
    """A stronger one was no better there: its end has a lower clean error than the others have."""
    falling = [(clean, 100 - 2 * clean) for clean in (17.0, 20.0, 25.0, 30.0)]
    ending = [(17.0, 70.0), (19.0, 62.0), (21.0, 58.0), (26.0, 59.0), (31.0, 64.0)]
    met = comparison._meeting(falling, ending, False)
    assert met is not None
    assert (met[1][0], met[1][-1], len(met[1])) == (17.0, 21.0, comparison.PLACES)
    rising = [[(clean, 1.5 * clean + gap) for clean in (start, 20.0, 25.0)] for start, gap in ((17.0, 0.0), (18.0, 2.0))]
    assert comparison._meeting(*rising, False) is None  # both fronts are one point, at unequal clean errors


def test_places_do_not_depend_on_the_strengths_that_were_tried() -> None:
    """One side is two points better at low clean errors and two worse at high ones: on the whole it is no better."""
    base = [(float(clean), 100.0 - 2 * clean) for clean in range(16, 33, 2)]
    for cleans in ((16, 17, 18, 19, 32), (16, 24, 32), (16, 29, 30, 31, 32)):
        turned = [(float(c), 100.0 - 2 * c + (c - 24) / 4) for c in cleans]
        met = comparison._meeting(turned, base, False)
        assert met is not None
        assert met[0] == pytest.approx(0, abs=1e-9)
    two = comparison._meeting([(18.0, 60.0), (30.0, 40.0)], base, False)
    assert two is not None
    assert two[1] == [18.0, 30.0]  # no chord


def test_a_sentence_is_wrong_once_in_twenty_times_over_all_its_threats() -> None:
    chance, said = random.Random(0), 0
    for _ in range(400):
        found = {name: Difference(chance.gauss(0, 1), 1.0) for name in THREATS}
        said += bool(comparison.all_clear(found))
    assert said <= 32  # 20 are expected, of 400
    mixed = {"a": Difference(9, 1), "b": Difference(2.3, 1), "c": Difference(0, 1), "d": Difference(2.2, 1, freedom=3)}
    assert set(comparison.all_clear(mixed)) == {"a"}
    assert set(comparison.all_clear({"a": Difference(9, 1), "b": Difference(2.3, 1)})) == {"a", "b"}
    assert not Difference(0, 0).clear
    assert Difference(1, 0).clear


def test_a_collapsed_seed_does_not_hide_the_others() -> None:
    """FGSM training may fail altogether with one seed: that is its own spread, and nobody else's."""
    chance = random.Random(0)
    rows = [[{STRONGEST: chance.gauss(70, 0.8)} for _ in range(2)] for _ in range(40)] + [
        [{STRONGEST: 68.0}, {STRONGEST: 97.0}]
    ]
    points = [Point(tuple({"errors": errors, "flips": {}, "intervals": {}} for errors in seeds)) for seeds in rows]
    noise = Noise.of(points)
    assert noise.freedom[STRONGEST] == 40
    assert noise.spread(points[0], STRONGEST) == pytest.approx(0.8 / math.sqrt(2), rel=0.4)
    assert noise.spread(points[-1], STRONGEST) == pytest.approx(29 / 2, rel=0.01)


def test_a_row_that_is_trained_anew_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = fake_run(tmp_path / "a", "none")
    found = json.loads((place / "evaluation.json").read_text())
    found["errors"]["autoattack_8_pixel"] = 99.0
    (place / "evaluation.json").write_text(json.dumps(found | {"model_sha256": "first"}))
    gather([tmp_path / "a"], tmp_path / "frontier.json", Screen())
    again = fake_run(tmp_path / "b", "none", parallel=1)
    (again / "evaluation.json").write_text(
        json.dumps(json.loads((again / "evaluation.json").read_text()) | {"model_sha256": "x"})
    )
    (again / "validation.json").unlink()
    assert "trained anew" not in capsys.readouterr().out
    gather([tmp_path / "b"], tmp_path / "frontier.json", Screen())
    assert "trained anew, so its row is replaced, and autoattack_8_pixel, validation with it" in capsys.readouterr().out


def wobbling(count: int, seeds: int, gap: float, chance: random.Random) -> list[Point]:
    """Points along a straight line of slope -2, with a standard deviation of one in both errors of every run."""
    points = []
    for i in range(count):
        clean = 17 + 8 * i / (count - 1)
        true = {"clean": clean, "elastic_1.5": 60 - 2 * (clean - 20) + gap}
        runs = [{name: chance.gauss(value, 1) for name, value in true.items()} for _ in range(seeds)]
        points.append(Point(tuple({"errors": errors, "flips": {}, "intervals": {}} for errors in runs)))
    return points


@pytest.mark.parametrize("gap", [0, -5])
def test_the_standard_error_at_equal_clean_error_is_the_spread_of_many_studies(gap: float) -> None:
    scales = {"clean": 1 / (20 * 80), "elastic_1.5": 1 / (60 * 40)}
    noise = Noise(scales, {}, dict.fromkeys(scales, 30))
    met = []
    for trial in range(80):
        chance = random.Random(trial)
        found = at_equal_clean(wobbling(4, 3, gap, chance), wobbling(6, 3, 0, chance), "elastic_1.5", noise)
        assert found is not None
        met.append(found.difference)
    assert statistics.fmean(d.mean for d in met) == pytest.approx(gap, abs=0.5)
    assert statistics.median(d.error for d in met) == pytest.approx(statistics.stdev(d.mean for d in met), rel=0.35)
    clear = sum(d.clear for d in met) / len(met)
    assert clear < 0.15 if gap == 0 else clear > 0.9


def test_few_seeds_ask_for_larger_differences() -> None:
    scales = {"clean": 0.01, "elastic_1.5": 0.01}
    assert Noise(scales, {}, {"clean": 30, "elastic_1.5": 3}).degrees("clean", "elastic_1.5") == 3
    assert Noise(scales, {}, {"clean": 0, "elastic_1.5": 7}).degrees("clean", "elastic_1.5") == 7
    assert [Difference(t, 1, freedom=3).clear for t in (3.18, 3.19)] == [False, True]  # the quantile is 3.182
    assert [Difference(t, 1).clear for t in (1.95, 1.97)] == [False, True]
    average = Difference.average([Difference(1, 3, 2), Difference(2, 4, 3)])
    assert (average.mean, average.error, average.freedom) == (1.5, 2.5, 2)


def test_chance_is_told_from_seeds_and_less_of_it_near_the_ends(tmp_path: Path) -> None:
    """Errors of 50 and 100 % that spread like binomial ones: one scale fits both."""
    for seed, wobble in enumerate((-1, 0, 1)):
        for text, robust in (("euclidean:eta=1", 50 + wobble), ("euclidean:eta=2", 100.0), ("euclidean:eta=3", 50 - wobble)):
            place = fake_run(tmp_path, text, seed)
            write_evaluation(place, made_up(text) | {"pgd20_margin_8_pixel": robust, "autoattack_8_pixel": 50.0}, 4)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    weak, strong, third = points_of(Frontier.at(tmp_path / "frontier.json").rows)
    name = "pgd20_margin_8_pixel"
    noise = Noise.of([weak, strong, third])
    assert noise.seeds[name] * 50 * 50 == pytest.approx(1.0)
    assert noise.images[name] == pytest.approx(1 / IMAGES, rel=0.01)
    assert noise.freedom[name] == 4  # an error of 100 % cannot spread, and tells nothing
    assert noise.spread(weak, name) == pytest.approx(math.sqrt(1 / 3 + 50 * 50 / IMAGES), rel=0.01)
    assert noise.spread(strong, name) == 0
    alone = Noise.of([type(weak)(weak.rows[:1])])
    assert alone.from_images == set(alone.images)
    assert not alone.seeds
    for other in (strong, type(strong)(strong.rows[:1])):  # more seeds do not make more images
        gap = at_equal_strength([(weak, other)], "autoattack_8_pixel", alone)
        assert gap is not None
        assert gap.error == pytest.approx(math.sqrt(2 * 50 * 50 / IMAGES), rel=0.15)  # by draws


def on_images(wrong: dict[str, npt.NDArray[np.bool_]], regularizer: str = "euclidean:eta=1", **changes: Any) -> Point:
    """A network that is wrong on these images."""
    packed = {name: base64.b64encode(np.packbits(bits).tobytes()).decode() for name, bits in wrong.items()}
    row = {"errors": {name: 100 * bits.mean() for name, bits in wrong.items()}, "flips": {}, "intervals": {}, "wrong": packed}
    row |= {"images": {name: len(bits) for name, bits in wrong.items()}, "test_sha256": "the same", "regularizer": regularizer}
    return Point(({**row, **USUAL, "family": regularizer, "kind": "euclidean", **changes},))


def test_networks_are_compared_on_the_same_images() -> None:
    """Two that are wrong on nearly the same images differ by chance in the few others alone."""
    dice = np.random.default_rng(0)
    hard = dice.random(2003) < 0.4  # not a multiple of eight
    other = hard ^ (dice.random(2003) < 0.01)
    first, second = (on_images({STRONGEST: bits}) for bits in (hard, other))
    noise = Noise.of([first, second])
    assert noise.paired
    gap = at_equal_strength([(first, second)], STRONGEST, noise)
    assert gap is not None
    apart = (hard ^ other).mean()  # the variance of a paired difference of 0 and 1
    assert gap.error == pytest.approx(100 * math.sqrt(apart / 2003), rel=0.15)
    assert gap.error < 0.25 * math.sqrt(2 * 40 * 60 / 2003)
    elsewhere = on_images({STRONGEST: other}, test_sha256="another set")
    assert not Noise.of([first, elsewhere]).paired
    few = on_images({STRONGEST: hard[:1001]})  # an expensive attack is made on the first images
    spread = (noise.moved(p, STRONGEST, np.random.default_rng(0)) - (p.mean(STRONGEST) or 0) for p in (first, few))
    assert np.corrcoef(*spread)[0, 1] == pytest.approx(math.sqrt(0.5), abs=0.1)


def test_rows_say_which_images_are_wrong(tmp_path: Path) -> None:
    place = fake_run(tmp_path / "a", "none")
    record = json.loads((place / "evaluation.json").read_text()) | {"model_sha256": "m", "test_sha256": "t"}
    (place / "evaluation.json").write_text(json.dumps(record))
    memory = MeasuredRows(place / "measured.jsonl", {"model_sha256": "m", "test_sha256": "t", "device": "cuda"})
    memory["clean the images as they are, seed 1, 3 of 9 images"] = torch.tensor([True, False, True])
    memory["clean the images as they are, seed 1, 9 of 9 images"] = torch.arange(9) < 4
    memory["flips_horizontal reach 2, seed 1, 3 of 9 images"] = torch.ones(3, 4, dtype=torch.bool)
    other = MeasuredRows(place / "measured.jsonl", {"model_sha256": "m", "test_sha256": "other", "device": "cuda"})
    other["clean the images as they are, seed 1, 24 of 24 images"] = torch.zeros(24, dtype=torch.bool)
    before = (place / "measured.jsonl").read_bytes()
    row = row_of(Run.at(place))
    assert row["test_sha256"] == "t"
    assert list(row["wrong"]) == ["clean"]
    assert np.unpackbits(np.frombuffer(base64.b64decode(row["wrong"]["clean"]), np.uint8)).tolist() == [1] * 4 + [0] * 12
    assert (place / "measured.jsonl").read_bytes() == before
    (place / "measured.jsonl").write_bytes(b"\x80 broken")
    assert row_of(Run.at(place))["wrong"] == {}


def test_one_point_of_each_kind_is_chosen(gathered: Path) -> None:
    points = points_of(Frontier.at(gathered).rows)
    found = chosen(points)
    for picked in found.values():
        kinds = [p.rows[0]["kind"] for p in picked]
        assert len(kinds) == len(set(kinds)) == 8
        assert {p.variant.epochs for p in picked} == {24}
    stored = json.loads(gathered.read_text())["chosen"]
    assert stored == {name: [p.regularizer for p in picked] for name, picked in found.items()}
    best = next(p for p in found["balanced"] if p.rows[0]["kind"] == "wasserstein")
    assert best.family == "wasserstein:radius=2,mass=0.25"


def test_the_choice_sees_validation_images_alone(tmp_path: Path) -> None:
    """The strengths are rated one way on the test images and the other way on the validation images."""
    places = [fake_run(tmp_path, text) for text in ("none", "euclidean:eta=0.1", "euclidean:eta=0.2", "euclidean:eta=3")]
    path = gather([tmp_path], tmp_path / "frontier.json", SILENT) and tmp_path / "frontier.json"
    assert [p.regularizer for p in chosen(points_of(Frontier.at(path).rows))["most_robust"]] == ["euclidean:eta=3", "none"]
    weak = places[1] / "validation.json"
    record = json.loads(weak.read_text())
    record["errors"] |= {name: 1.0 for name in THREATS if name in record["errors"]}
    weak.write_text(json.dumps(record))
    gather([tmp_path], path, SILENT)
    found = chosen(points_of(Frontier.at(path).rows))
    assert [p.regularizer for p in found["most_robust"]] == ["euclidean:eta=0.1", "none"]
    assert [p.regularizer for p in found["balanced"]] == ["euclidean:eta=0.1", "none"]
    assert found["balanced"][0].mean("pgd20_margin_8_pixel") > 50, "the points themselves keep their test errors"
    weak.unlink()  # what was measured of the same weights is kept
    gather([tmp_path], path, SILENT)
    assert [p.regularizer for p in chosen(points_of(Frontier.at(path).rows))["most_robust"]] == ["euclidean:eta=0.1", "none"]


def test_without_validation_errors_nothing_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("none", "euclidean:eta=0.1"):
        (fake_run(tmp_path, text) / "validation.json").unlink()
    path = tmp_path / "frontier.json"
    assert main(["frontier", str(tmp_path), "--results", str(path)]) == 0
    assert capsys.readouterr().out.count("evaluate FOLDER --split validation") == 2
    assert json.loads(path.read_text())["chosen"] == {"balanced": [], "most_robust": []}
    assert "2 of 2 points were not measured on validation images, and cannot be picked." in path.with_suffix(".md").read_text()
    assert (
        "Nothing yet: it takes validation errors, of none too; wassersmooth evaluate FOLDER"
        in path.with_suffix(".md").read_text()
    )


def test_further_seeds_without_validation_errors_leave_the_choice_as_it_was(tmp_path: Path) -> None:
    texts = ("none", "euclidean:eta=0.1", "euclidean:eta=3")
    for text in texts:
        fake_run(tmp_path / "a", text)
        (fake_run(tmp_path / "b", text, seed=1) / "validation.json").unlink()
    path = tmp_path / "frontier.json"
    gather([tmp_path / "a"], path, SILENT)
    before = json.loads(path.read_text())["chosen"]
    gather([tmp_path / "b"], path, SILENT)
    assert json.loads(path.read_text())["chosen"] == before
    assert before["most_robust"] == ["euclidean:eta=3", "none"]
    for place in tmp_path.glob("a/none*"):
        (place / "validation.json").unlink()
    gather([tmp_path / "a"], tmp_path / "other.json", SILENT)
    assert json.loads((tmp_path / "other.json").read_text())["chosen"] == {"balanced": [], "most_robust": []}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "image",
            [r"^With radius 2, the dependence on the image helps with pixel 8/255.*: at equal clean error .*1 to 2 seeds"],
        ),
        ("mass", [r"^A mass term of 0\.25 at radius 2 helps with .*several targets -[23]\.\d ± 0\.\d"]),
        ("radius", ["^Radius 8 in place of 2 changes nothing beyond chance: at equal clean error"]),
        ("laplacian", [r"^With radius 2, the Laplacian term hurts with .*several targets \+[23]\.\d"]),
        (
            "activation",
            ["^relu in place of softplus hurts with clean, .*: at equal strength .3 regularizers", "at equal clean"],
        ),
        (
            "epochs",
            [
                "^Training for 100 epochs in place of 24 hurts with pixel.*at equal strength",
                "in place of 24 hurts .*at equal clean",
                "^Over 100 epochs, the best epoch by robust validation error in place of the last helps with .*strength",
                "",
            ],
        ),
        (
            "augmentation",
            ["^Augmentation by crops and flips helps with clean.*clean -7", "no clean error that both sides reach"],
        ),
    ],
)
def test_each_question_has_its_sentences(gathered: Path, name: str, expected: list[str]) -> None:
    found = sentences(gathered, name)
    assert len(found) == len(expected)
    for sentence, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, sentence), sentence
        assert sentence.endswith(".")


def test_questions_without_rows_say_which_ones_are_missing(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "none")
    gather([tmp_path / "a"], tmp_path / "frontier.json", SILENT)
    found = questions.answers(points_of(Frontier.at(tmp_path / "frontier.json").rows))
    assert len(found) == 7
    assert all(not answer.curves and answer.sentences[0].startswith("Not answered yet: it takes rows") for answer in found)
    assert write_page(tmp_path / "frontier.json").read_text().count("Not answered yet") == 7


def aim(path: Path, hope: str) -> Aim:
    frontier = Frontier.at(path)
    return next(aim for aim in aims(points_of(frontier.rows), "cifar10", frontier.prices) if aim.hope.startswith(hope))


def add_autoattack(place: Path, error: float) -> None:
    record = json.loads((place / "evaluation.json").read_text())
    record["errors"]["autoattack_8_pixel"] = error
    record["intervals"]["autoattack_8_pixel"] = list(wilson(round(10 * error), 1000))
    (place / "evaluation.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (52.0, "reached"),
        (56.0, "reached"),  # 4.3 is beyond chance, and a point is no matter
        (59.5, "within chance"),
        (60.5, "within chance"),
        (64.5, "within chance"),
        (68.0, "not reached"),
    ],
)
def test_a_penalty_is_held_against_pgd_training(tmp_path: Path, error: float, verdict: str) -> None:
    add_autoattack(fake_run(tmp_path, "pgd7:eta=1"), 60.0)
    add_autoattack(fake_run(tmp_path, "pgd7:eta=0.5"), 50.0)  # less robust on validation images, so not the rival
    add_autoattack(fake_run(tmp_path, "dual-length:eta=1"), error)
    add_autoattack(fake_run(tmp_path, "dual-length:eta=3"), 1.0)  # costs more clean error than the rival
    combined = fake_run(tmp_path, "wasserstein+l2-adversarial:eta=1,radius=2,epsilon=0.25", better=9)
    add_autoattack(combined, 1.0)  # makes adversarial examples
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = aim(tmp_path / "frontier.json", "AutoAttack 8/255")
    assert found.verdict == verdict, found.sentence
    assert re.fullmatch(
        rf"`dual-length:eta=1` {error} % \(clean .*\) against `pgd7:eta=1` 60.0 % .*: \{error - 60:+.1f} ± .*",
        found.sentence,
    )


def test_a_penalty_that_costs_more_is_not_held_against_pgd_training(tmp_path: Path) -> None:
    add_autoattack(fake_run(tmp_path, "pgd7:eta=0.03"), 60.0)
    add_autoattack(fake_run(tmp_path, "dual-length:eta=1"), 40.0)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = aim(tmp_path / "frontier.json", "AutoAttack 8/255")
    assert found.verdict == "not measured"
    assert found.sentence.startswith("No penalty within 1 point of the clean error of `pgd7:eta=0.03` 60.0 %")


def write_bench(path: Path, hardware: str = "a device", **steps: float) -> Path:
    report = {"hardware": hardware, "torch": "2.13", "settings": {"batch": 128}, "step": {"plain": 2.0} | steps}
    path.write_text(json.dumps(report | {"parts": {"step": {"command": f"bench {path.name}", "commit": "c" * 40}}}))
    return path


@pytest.mark.parametrize(("milliseconds", "verdict"), [(5.0, "reached"), (7.0, "not reached"), (None, "not measured")])
def test_times_are_those_of_a_step_alone(tmp_path: Path, milliseconds: float | None, verdict: str) -> None:
    results = tmp_path / "frontier.json"
    for text in ("euclidean:eta=0.5", "euclidean:eta=1", "wasserstein:eta=0.5,radius=2", "wasserstein:eta=1,radius=2"):
        fake_run(tmp_path / "a", text)
    gather([tmp_path / "a"], results, SILENT)
    given = {} if milliseconds is None else {"euclidean": milliseconds}
    steps = {"pgd7": 12.0, "tikhonov:eta=0.1,radius=8": 11.0, "double_backward_r4": 99.0, "algorithm1_r8": 99.0}
    add_prices(write_bench(tmp_path / "bench.json", **given, **steps), results)
    found = aim(results, "Time")
    assert found.verdict == verdict
    if milliseconds is not None:  # of second order: told, not judged
        assert found.sentence.endswith(f"(a device): Euclidean {milliseconds / 12:.2f}, Tikhonov 0.92.")
        assert "in plain steps, which take 2.00 ms" in page_text(Frontier.at(results), results)


def test_prices_of_one_machine_are_joined(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    fake_run(tmp_path / "a", "none")
    gather([tmp_path / "a"], results, SILENT)
    add_prices(write_bench(tmp_path / "first.json", wasserstein_r2=4.0, wasserstein_r8=6.0, pgd7=12.0), results)
    add_prices(write_bench(tmp_path / "second.json", **{"wasserstein+l2-adversarial:eta=1,radius=2,epsilon=1": 8.0}), results)
    gather([tmp_path / "a"], results, SILENT)  # more rows leave them alone
    found = Frontier.at(results).prices
    assert found is not None
    assert {kind: step["ms"] for kind, step in found["steps"].items()} == {
        "none": 2.0,
        "wasserstein": 5.0,
        "pgd7": 12.0,
        "wasserstein+l2-adversarial": 8.0,
    }
    assert found["steps"]["pgd7"]["command"] == "bench first.json"
    assert (relative(found, "pgd7"), relative(found, "uniform"), relative(None, "pgd7")) == (6.0, None, None)
    add_prices(write_bench(tmp_path / "third.json", "another device", pgd7=1.0), results)
    found = Frontier.at(results).prices
    assert found is not None
    assert set(found["steps"]) == {"none", "pgd7"}  # times of two machines do not compare


def test_prices_need_a_bench_and_a_frontier(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    with pytest.raises(StudyError, match=r"frontier\.json does not exist; gather runs first"):
        add_prices(write_bench(tmp_path / "bench.json"), results)
    fake_run(tmp_path / "a", "none")
    gather([tmp_path / "a"], results, SILENT)
    with pytest.raises(StudyError, match=r"--prices needs a file that wassersmooth bench --only step has written; got .*rows"):
        add_prices(Path(shutil.copy(results, tmp_path / "rows.json")), results)


@pytest.mark.parametrize(("flips", "verdict"), [(4.0, "reached"), (6.45, "within chance"), (9.0, "not reached")])
def test_flips_are_held_against_the_papers(tmp_path: Path, flips: float, verdict: str) -> None:
    """The point is picked on validation images; on test images it is what it is."""
    for text, seed in itertools.product(("euclidean:eta=0.5", "euclidean:eta=1", "pgd7:eta=0.01"), range(2)):
        write_evaluation(fake_run(tmp_path, text, seed), made_up(text), flips)  # made up: 3 and 4 on validation images
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = aim(tmp_path / "frontier.json", "Flips")
    assert found.verdict == verdict
    shown = f"{flips:.1f}"
    assert re.match(rf"`euclidean:eta=0.5`: {shown} / {shown} flips ± 0.1, with clean error 20\.", found.sentence), (
        found.sentence
    )
    assert not [
        a for a in aims(points_of(Frontier.at(tmp_path / "frontier.json").rows), "digits") if a.hope.startswith("Flips")
    ]


@pytest.mark.parametrize(
    ("horizontal", "vertical", "verdict"),
    [
        ((6.0, 0.01), (7.4, 0.6), "within chance"),  # the larger gap is the clear one, and the other may be chance
        ((6.7, 0.01), (8.4, 0.8), "not reached"),  # the smaller one is clear
        ((6.0, 0.01), (7.4, 0.01), "reached"),
    ],
)
def test_both_axes_have_to_be_steady(
    tmp_path: Path, horizontal: tuple[float, float], vertical: tuple[float, float], verdict: str
) -> None:
    axes = {"horizontal": horizontal, "vertical": vertical}
    intervals = {f"flips_{axis}": [mean - 1.96 * error, mean + 1.96 * error] for axis, (mean, error) in axes.items()}
    for seed in range(4):
        place = fake_run(tmp_path, "euclidean:eta=0.5", seed)
        record = json.loads((place / "evaluation.json").read_text())
        record |= {"flips": {axis: mean for axis, (mean, _) in axes.items()}, "intervals": record["intervals"] | intervals}
        (place / "evaluation.json").write_text(json.dumps(record))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    assert aim(tmp_path / "frontier.json", "Flips").verdict == verdict


def test_flips_of_a_point_that_is_not_steady_on_validation_images_do_not_count(tmp_path: Path) -> None:
    restless = {"errors": {"clean": 1.0}, "flips": {"horizontal": 3.0, "vertical": 8.5}}
    (fake_run(tmp_path, "euclidean:eta=0.5") / "validation.json").write_text(json.dumps(restless))
    fake_run(tmp_path, "euclidean:eta=1")
    calmer = fake_run(tmp_path, "euclidean:eta=2") / "validation.json"  # at a higher clean error, which is not asked for
    calmer.write_text(json.dumps(json.loads(calmer.read_text()) | {"flips": {"horizontal": 1.0, "vertical": 1.0}}))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    assert aim(tmp_path / "frontier.json", "Flips").sentence.startswith("`euclidean:eta=1`")
    assert aim(tmp_path / "frontier.json", "Wasserstein 0.5").verdict == "not measured"


@pytest.mark.parametrize(("rival", "verdict"), [(0.0, "reached"), (5.0, "within chance"), (9.0, "not reached")])
def test_the_best_penalty_is_held_against_its_closest_rival(tmp_path: Path, rival: float, verdict: str) -> None:
    for eta in (0.2, 0.5, 1):
        fake_run(tmp_path, f"euclidean:eta={eta}", better=2)
        fake_run(tmp_path, f"wasserstein:eta={eta},radius=2", better=5)
        fake_run(tmp_path, f"pgd7:eta={eta}", better=rival)
        fake_run(tmp_path, f"adversarial:eta={eta}", better=-3)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = aim(tmp_path / "frontier.json", "Elastic 1.5 px")
    assert found.verdict == verdict, found.sentence
    best = (
        "Wasserstein, radius 2 is the best penalty on validation images. On test images, against 2 other ways of training, it"
    )
    assert found.sentence.startswith(f"{best} is nearest to PGD-7 training: ")


def test_a_gentle_and_poor_rival_does_not_hide_a_close_one(tmp_path: Path) -> None:
    """A front of both rivals would start at the poor one, and fall steeply to the close one where the penalty has points."""
    for eta in (0.05, 0.2, 0.5, 1):
        fake_run(tmp_path, f"euclidean:eta={eta}")
        fake_run(tmp_path, f"pgd7:eta={0.2 + eta}", better=1)
    for text in ("none", "euclidean-noise:eta=0.005", "euclidean-noise:eta=0.02", "euclidean-noise:eta=0.1"):
        poor = made_up(text) | {"wasserstein20_0.5_unit_r2": 90.0}
        place = fake_run(tmp_path, text)
        write_evaluation(place, poor, flips=4.0)
        (place / "validation.json").write_text(json.dumps({"errors": poor, "flips": {}}))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = aim(tmp_path / "frontier.json", "Wasserstein 0.5")
    assert "nearest to PGD-7 training" in found.sentence
    assert found.verdict == "not reached", found.sentence


def test_a_penalty_that_is_lucky_on_the_test_images_alone_is_not_picked(tmp_path: Path) -> None:
    for eta in (0.2, 0.5, 1):
        fake_run(tmp_path, f"wasserstein:eta={eta},radius=2", better=5)
        fake_run(tmp_path, f"pgd7:eta={eta}")
        lucky = fake_run(tmp_path, f"euclidean:eta={eta}", better=12) / "validation.json"
        seen = {"errors": made_up(f"euclidean:eta={eta}", better=-3)}
        lucky.write_text(json.dumps(json.loads(lucky.read_text()) | seen))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = aim(tmp_path / "frontier.json", "Elastic 1.5 px")
    assert found.sentence.startswith("Wasserstein, radius 2 is the best penalty on validation images.")
    assert found.verdict == "reached", found.sentence


def test_every_family_stands_against_the_euclidean_penalty(tmp_path: Path) -> None:
    for eta in (0.2, 0.5, 1):
        fake_run(tmp_path, f"euclidean:eta={eta}")
        fake_run(tmp_path, f"wasserstein:eta={eta},radius=2", better=-9)
        fake_run(tmp_path, f"dual-norm:eta={eta}", better=9)
        fake_run(tmp_path, f"uniform:eta={eta},radius=2", better=0.2)
    fake_run(tmp_path, "euclidean-noise:eta=50")  # no clean error in common
    fake_run(tmp_path, "none")
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    points = points_of(Frontier.at(tmp_path / "frontier.json").rows)
    found = {standing.family: standing for standing in standings(points)}
    assert list(found) == ["wasserstein:radius=2", "uniform:radius=2", "dual-norm"]  # as on all pages
    for family, gap in {"dual-norm": -9, "uniform:radius=2": -0.2, "wasserstein:radius=2": 9}.items():
        assert found[family].found["elastic_1.5"].difference.mean == pytest.approx(gap, abs=0.5)
        assert (found[family].points, "pgd20_margin_8_pixel" in found[family].found) == (3, False)  # the weaker attack
    assert clear_of(list(found.values()), {"flips"}) == {
        (family, threat) for family in ("dual-norm", "wasserstein:radius=2") for threat in FRONTIER if threat != WEAKER
    }
    text = page_text(Frontier.at(tmp_path / "frontier.json"), tmp_path / "frontier.json")
    assert "## Every family against Euclidean" in text
    assert re.search(r"\| dual norm \| 3 \| \*\*-\d+\.\d ± \d\.\d\*\* \|", text)
    assert standings([point for point in points if point.kind != "euclidean"]) == []


def test_the_page_and_its_plots(gathered: Path) -> None:
    page = write_page(gathered)
    text = page.read_text()
    assert text == page_text(Frontier.at(gathered), gathered)
    pictures = [line.partition("](")[2].removesuffix(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == 1 + len(FRONTIER) + 1 + 7 + 4  # overview, threats with flips, questions, further variants
    for picture in pictures:
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")
    before = {path: path.read_bytes() for path in page.parent.rglob("*.png")}
    write_page(gathered)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert text.count("\n### ") == 7 + 5  # questions, and a table for each variant
    assert "| `wasserstein:eta=0.5,radius=2` | 2 |" in text
    assert "± 0.1" in text


def test_networks_that_learned_nothing_are_listed_and_nothing_else(tmp_path: Path) -> None:
    """They answer every image alike, so that no translation flips their label: the best of all, if one looks at that alone."""
    places = [study(tmp_path / "base"), tmp_path / "relu"]
    write_evaluation(places[0] / "euclidean-eta1-seed0", dict.fromkeys(["clean", *FRONTIER], 90.0), flips=0.0)
    held_out = {"errors": dict.fromkeys(["clean", *FRONTIER], 90.0), "flips": {"horizontal": 0.0, "vertical": 0.0}}
    (places[0] / "euclidean-eta1-seed0" / "validation.json").write_text(json.dumps(held_out))
    write_evaluation(fake_run(places[1], "none", activation="relu"), dict.fromkeys(["clean", *FRONTIER], 90.0), flips=0.0)
    results = tmp_path / "frontier.json"
    gather(places, results, SILENT)
    frontier = Frontier.at(results)
    useless = [row for row in frontier.rows if row["errors"]["clean"] == 90]
    assert [row["front"] for row in useless] == [[], []]
    assert not any("euclidean:eta=1" in picked for picked in json.loads(results.read_text())["chosen"].values())
    page = write_page(results).read_text()
    assert "2 points hardly learned anything" in page
    assert [line for line in page.splitlines() if line.startswith("| `euclidean:eta=1` | 1 | 90.0 |")]
    assert "### relu, 24 epochs" in page
    assert all((tmp_path / target).exists() for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page))
    assert not list((tmp_path / "frontier").glob("relu*"))


def test_rendering_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="does not exist; gather runs first"):
        write_page(tmp_path / "frontier.json")
    (tmp_path / "frontier.json").write_text('{"rows": []}')
    with pytest.raises(StudyError, match="holds no rows of a frontier"):
        write_page(tmp_path / "frontier.json")


def test_the_committed_page_is_what_its_rows_say() -> None:
    results = ROOT / "results" / "frontier.json"
    if not results.exists():
        pytest.skip("results/frontier.json is still to be measured on a GPU")
    text = results.with_suffix(".md").read_text()
    assert text == page_text(Frontier.at(results), results)
    for line in text.splitlines():
        if line.startswith("!["):
            assert (results.parent / line.partition("](")[2].removesuffix(")")).exists()
