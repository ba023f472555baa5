"""What penalties were hoped to reach, how families stand against each other, and what they cost."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from experiments.frontier.commands import PROGRAM
from experiments.frontier.families import clear_of, standings
from experiments.frontier.gathering import Frontier, gather
from experiments.frontier.goals import Goal, goals
from experiments.frontier.page import page_text
from experiments.frontier.points import WEAKER
from experiments.frontier.step_costs import add_step_costs, relative_cost
from experiments.frontier.suite import NAMES
from experiments.points import points_of
from tests.experiments.frontier.fake_frontier import SILENT, add_autoattack, fake_run, made_up, write_evaluation
from wassersmooth import cli
from wassersmooth.study.errors import StudyError


def goal(path: Path, title: str) -> Goal:
    frontier = Frontier.at(path)
    return next(goal for goal in goals(points_of(frontier.rows), "cifar10", frontier.costs) if goal.title.startswith(title))


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
    found = goal(tmp_path / "frontier.json", "AutoAttack 8/255")
    assert found.verdict == verdict, found.sentence
    assert re.fullmatch(
        rf"`dual-length:eta=1` {error} % \(clean .*\) against `pgd7:eta=1` 60.0 % .*: \{error - 60:+.1f} ± .*",
        found.sentence,
    )


def test_a_penalty_that_costs_more_is_not_held_against_pgd_training(tmp_path: Path) -> None:
    add_autoattack(fake_run(tmp_path, "pgd7:eta=0.03"), 60.0)
    add_autoattack(fake_run(tmp_path, "dual-length:eta=1"), 40.0)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = goal(tmp_path / "frontier.json", "AutoAttack 8/255")
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
    add_step_costs(write_bench(tmp_path / "bench.json", **given, **steps), results)
    found = goal(results, "Time")
    assert found.verdict == verdict
    if milliseconds is not None:  # of second order: told, not judged
        assert found.sentence.endswith(f"(a device): Euclidean {milliseconds / 12:.2f}, Tikhonov 0.92.")
        assert "in plain steps of 2.00 ms" in page_text(Frontier.at(results), results)


def test_prices_of_one_machine_are_joined(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    fake_run(tmp_path / "a", "none")
    gather([tmp_path / "a"], results, SILENT)
    add_step_costs(write_bench(tmp_path / "first.json", wasserstein_r2=4.0, wasserstein_r8=6.0, pgd7=12.0), results)
    add_step_costs(
        write_bench(tmp_path / "second.json", **{"wasserstein+l2-adversarial:eta=1,radius=2,epsilon=1": 8.0}), results
    )
    gather([tmp_path / "a"], results, SILENT)  # more rows leave them alone
    found = Frontier.at(results).costs
    assert found is not None
    assert {kind: step["ms"] for kind, step in found["steps"].items()} == {
        "none": 2.0,
        "wasserstein": 5.0,
        "pgd7": 12.0,
        "wasserstein+l2-adversarial": 8.0,
    }
    assert found["steps"]["pgd7"]["command"] == "bench first.json"
    assert (relative_cost(found, "pgd7"), relative_cost(found, "uniform"), relative_cost(None, "pgd7")) == (6.0, None, None)
    add_step_costs(write_bench(tmp_path / "third.json", "another device", pgd7=1.0), results)
    found = Frontier.at(results).costs
    assert found is not None
    assert set(found["steps"]) == {"none", "pgd7"}  # times of two machines do not compare


def test_prices_are_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path / "a", "none")
    results = tmp_path / "frontier.json"
    gather([tmp_path / "a"], results, SILENT)
    before = results.read_bytes()
    assert cli.main(["render", "--results", str(results), "--prices", str(tmp_path / "nope.json")], PROGRAM) == 2
    assert "nope.json, which does not exist" in capsys.readouterr().err
    assert results.read_bytes() == before
    assert not results.with_suffix(".md").exists()


def test_prices_need_a_bench_and_a_frontier(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    with pytest.raises(StudyError, match=r"frontier\.json does not exist; gather runs first"):
        add_step_costs(write_bench(tmp_path / "bench.json"), results)
    fake_run(tmp_path / "a", "none")
    gather([tmp_path / "a"], results, SILENT)
    with pytest.raises(StudyError, match=r"--prices needs a file that wassersmooth bench --only step has written; got .*rows"):
        add_step_costs(Path(shutil.copy(results, tmp_path / "rows.json")), results)
    for part in ("settings", "parts"):
        cut = write_bench(tmp_path / "cut.json")
        cut.write_text(json.dumps({key: value for key, value in json.loads(cut.read_text()).items() if key != part}))
        with pytest.raises(StudyError, match=r"--prices needs a whole file .*without settings or parts; measure again"):
            add_step_costs(cut, results)
    with pytest.raises(
        StudyError, match=r"--prices needs a file that wassersmooth bench has written; got .*none\.json, which does not exist"
    ):
        add_step_costs(tmp_path / "none.json", results)
    path = write_bench(tmp_path / "bench.json")
    report = json.loads(path.read_text())
    for changes, message in (
        ({"unsteady": ["plain", "pgd7"]}, "needs steady times; got .* with plain, pgd7 unsteady; measure it again"),
        ({"settings": {"quick": True}}, "a --quick bench of a smaller one"),
    ):
        path.write_text(json.dumps(report | changes))
        with pytest.raises(StudyError, match=message):
            add_step_costs(path, results)


@pytest.mark.parametrize(("flips", "verdict"), [(4.0, "reached"), (6.45, "within chance"), (9.0, "not reached")])
def test_flips_are_held_against_the_papers(tmp_path: Path, flips: float, verdict: str) -> None:
    """The point is picked on validation images; on test images it is what it is."""
    for text, seed in itertools.product(("euclidean:eta=0.5", "euclidean:eta=1", "pgd7:eta=0.01"), range(2)):
        write_evaluation(fake_run(tmp_path, text, seed), made_up(text), flips)  # made up: 3 and 4 on validation images
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = goal(tmp_path / "frontier.json", "Flips")
    assert found.verdict == verdict
    shown = f"{flips:.1f}"
    assert re.match(rf"`euclidean:eta=0.5`: {shown} / {shown} flips ± 0.1, with clean error 20\.", found.sentence), (
        found.sentence
    )
    assert not [
        a for a in goals(points_of(Frontier.at(tmp_path / "frontier.json").rows), "digits") if a.title.startswith("Flips")
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
    assert goal(tmp_path / "frontier.json", "Flips").verdict == verdict


def test_flips_of_one_seed_decide_nothing(tmp_path: Path) -> None:
    """They differ more from seed to seed than from image to image."""
    write_evaluation(fake_run(tmp_path, "euclidean:eta=0.5"), made_up("euclidean:eta=0.5"), flips=1.0)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    assert goal(tmp_path / "frontier.json", "Flips").verdict == "within chance"


def test_flips_of_a_point_that_is_not_steady_on_validation_images_do_not_count(tmp_path: Path) -> None:
    restless = {"errors": {"clean": 1.0}, "flips": {"horizontal": 3.0, "vertical": 8.5}}
    (fake_run(tmp_path, "euclidean:eta=0.5") / "validation.json").write_text(json.dumps(restless))
    fake_run(tmp_path, "euclidean:eta=1")
    calmer = fake_run(tmp_path, "euclidean:eta=2") / "validation.json"  # at a higher clean error, which is not asked for
    calmer.write_text(json.dumps(json.loads(calmer.read_text()) | {"flips": {"horizontal": 1.0, "vertical": 1.0}}))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    assert goal(tmp_path / "frontier.json", "Flips").sentence.startswith("`euclidean:eta=1`")
    assert goal(tmp_path / "frontier.json", "Wasserstein 0.5").verdict == "not measured"


def test_a_point_that_is_hardly_steady_is_not_picked_where_another_clearly_is(tmp_path: Path) -> None:
    for (text, flips), seed in itertools.product({"euclidean:eta=0.5": 6.45, "euclidean:eta=1": 5.0}.items(), range(3)):
        place = fake_run(tmp_path, text, seed)
        write_evaluation(place, made_up(text), flips + 0.03 * (seed - 1))
        seen = json.loads((place / "validation.json").read_text())
        (place / "validation.json").write_text(json.dumps(seen | {"flips": dict.fromkeys(("horizontal", "vertical"), flips)}))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = goal(tmp_path / "frontier.json", "Flips")
    assert found.sentence.startswith("`euclidean:eta=1`: 5.0 / 5.0"), found.sentence
    assert found.verdict == "reached"


@pytest.mark.parametrize(("rival", "verdict"), [(0.0, "reached"), (5.0, "within chance"), (9.0, "not reached")])
def test_the_best_penalty_is_held_against_its_closest_rival(tmp_path: Path, rival: float, verdict: str) -> None:
    for eta in (0.2, 0.5, 1):
        fake_run(tmp_path, f"euclidean:eta={eta}", better=2)
        fake_run(tmp_path, f"wasserstein:eta={eta},radius=2", better=5)
        fake_run(tmp_path, f"pgd7:eta={eta}", better=rival)
        fake_run(tmp_path, f"adversarial:eta={eta}", better=-3)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = goal(tmp_path / "frontier.json", "Elastic 1.5 px")
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
    found = goal(tmp_path / "frontier.json", "Wasserstein 0.5")
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
    found = goal(tmp_path / "frontier.json", "Elastic 1.5 px")
    assert found.sentence.startswith("Wasserstein, radius 2 is the best penalty on validation images.")
    assert found.verdict == "reached", found.sentence


def test_every_family_stands_against_the_euclidean_penalty(tmp_path: Path) -> None:
    for eta in (0.2, 0.5, 1):
        fake_run(tmp_path, f"euclidean:eta={eta}")
        fake_run(tmp_path, f"wasserstein:eta={eta},radius=2", better=-9)
        fake_run(tmp_path, f"dual-norm:eta={eta}", better=9)
        fake_run(tmp_path, f"uniform:eta={eta},radius=2", better=0.2)
    fake_run(tmp_path, "euclidean-noise:eta=50")  # no clean error in common
    for eta in (0.4, 50):
        fake_run(tmp_path, f"l2-adversarial:eta={eta}")  # only one has
    fake_run(tmp_path, "none")
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    points = points_of(Frontier.at(tmp_path / "frontier.json").rows)
    found = {standing.family: standing for standing in standings(points)}
    assert list(found) == ["wasserstein:radius=2", "uniform:radius=2", "dual-norm", "l2-adversarial"]  # as on all pages
    assert found["l2-adversarial"].points == 1
    for family, gap in {"dual-norm": -9, "uniform:radius=2": -0.2, "wasserstein:radius=2": 9}.items():
        assert found[family].found["elastic_1.5"].difference.mean == pytest.approx(gap, abs=0.5)
        assert (found[family].points, "pgd20_margin_8_pixel" in found[family].found) == (3, False)  # the weaker attack
    assert clear_of(list(found.values()), {"flips"}) == {
        (family, threat) for family in ("dual-norm", "wasserstein:radius=2") for threat in NAMES if threat != WEAKER
    }
    text = page_text(Frontier.at(tmp_path / "frontier.json"), tmp_path / "frontier.json")
    assert "## Every family against Euclidean" in text
    assert re.search(r"\| dual norm \| 3 \| \*\*-\d+\.\d ± \d\.\d\*\* \|", text)
    assert standings([point for point in points if point.kind != "euclidean"]) == []
