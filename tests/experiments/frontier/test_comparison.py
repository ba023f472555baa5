"""How two sides of a frontier compare: estimates are right on average, and errors are what many studies would spread."""

from __future__ import annotations

import base64
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from experiments import comparison
from experiments.comparison import Difference, EqualClean, at_equal_clean, at_equal_strength
from experiments.frontier.gathering import Frontier, gather
from experiments.frontier.points import STRONGEST, front
from experiments.points import THREATS, Point, points_of
from experiments.uncertainty import Uncertainty
from tests.experiments.frontier.fake_frontier import IMAGES, SILENT, fake_run, made_up, write_evaluation

USUAL = {"activation": "softplus", "augment": False, "epochs": 24, "patience": None, "patience_on": "clean"}
KNOWN_NOISE = Uncertainty({"clean": 0.4**2 / (20 * 80), STRONGEST: 0.8**2 / (75 * 25)}, {}, {"clean": 20, STRONGEST: 20})


CLEANS = ((17, 20, 25, 30), (18, 19, 21, 27, 33))
CURVES = [
    [(10, 50), (12, 41), (17, 30), (26, 27), (30, 20)],
    [(10, 20), (12, 24), (17, 22), (26, 27), (30, 40)],
    [(10, 20), (11, 20), (20, 10), (21, 30)],
    [(10, 50), (20, 30)],
    [(10, 50)],
]


def curves(*several: list[tuple[float, float]]) -> comparison.Curves:
    """A study for each."""
    return comparison.Curves.through(*(np.array([[spot[k] for spot in one] for one in several], dtype=float) for k in (0, 1)))


def heights(curve: list[tuple[float, float]], places: list[float]) -> list[float]:
    found: list[float] = comparison._heights(curves(curve), np.array([places]))[0].tolist()
    return found


@pytest.mark.parametrize("curve", CURVES)
def test_curves_are_cubics_that_are_monotone_between_points(curve: list[tuple[float, float]]) -> None:
    cleans, robusts = (list(part) for part in zip(*curve, strict=True))
    x = [10 + (cleans[-1] - 10) * k / 200 for k in range(201)]
    found, again = (heights(curve, places) for places in (x, cleans))
    assert again == pytest.approx(robusts)
    assert min(robusts) - 1e-9 <= min(found) <= max(found) <= max(robusts) + 1e-9
    if len(curve) > 2:
        interpolate = pytest.importorskip("scipy.interpolate")
        assert found == pytest.approx(interpolate.PchipInterpolator(cleans, robusts)(x).tolist(), abs=1e-6)


def on_a_curve(cleans: Sequence[float], chance: random.Random, kind: str = "euclidean", **settings: Any) -> list[Point]:
    """One run each on the convex curve that every way of training has, moved by chance."""
    points = []
    for clean in cleans:
        errors = {"clean": chance.gauss(clean, 0.4), STRONGEST: chance.gauss(60 + 40 * math.exp(-(clean - 16) / 6), 0.8)}
        row = {"errors": errors, "flips": {}, "intervals": {}, "regularizer": f"{kind}:{clean:g}", "family": kind}
        row |= {"eta": clean, "epsilon": 0.0}
        points.append(Point(({**row, **USUAL, **settings, "kind": kind},)))
    return points


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
    quiet = Uncertainty(dict.fromkeys(KNOWN_NOISE.seeds, 0.0), {}, KNOWN_NOISE.freedom)
    one, other, dense = (on_a_curve(cleans, chance) for cleans in ((20.0,), (23.0,), (24, 28, 33)))
    assert at_equal_clean(one, other, STRONGEST, quiet) is None
    assert at_equal_clean(one, dense, STRONGEST, quiet) is None
    assert at_equal_clean(on_a_curve((28,), chance), dense, STRONGEST, quiet) is not None


def test_nothing_is_compared_beyond_the_end_of_a_side() -> None:
    sides = [[(clean, 100 - 2 * clean) for clean in cleans] for cleans in ((17.0, 20.0, 25.0, 30.0), (18.0, 19.0, 21.0))]
    met = comparison._meeting(*map(curves, sides), False)
    assert met.gaps == pytest.approx(0, abs=1e-6)
    assert (met.places[0], met.places[-1], len(met.places)) == (18.0, pytest.approx(21.0), comparison.PLACES)
    below = comparison._meeting(*map(curves, sides), False, 19.5)
    assert (below.places[0], below.places[-1], len(below.places)) == (18.0, pytest.approx(19.5), comparison.PLACES)
    assert not comparison._meeting(*map(curves, sides), False, 17.5).places
    none = comparison._meeting(curves(sides[0]), curves([(31.0, 2.0), (33.0, 1.0)]), False)
    assert np.isnan(none.gaps).all()
    assert not none.places


def test_places_do_not_depend_on_the_strengths_that_were_tried() -> None:
    """One side is two points better at low clean errors and two worse at high ones: on the whole it is no better."""
    base = [(float(clean), 100.0 - 2 * clean) for clean in range(16, 33, 2)]
    for cleans in ((16, 17, 18, 19, 32), (16, 24, 32), (16, 29, 30, 31, 32)):
        turned = [(float(c), 100.0 - 2 * c + (c - 24) / 4) for c in cleans]
        met = comparison._meeting(curves(turned), curves(base), False)
        assert met.gaps == pytest.approx(0, abs=1e-6)
    two = comparison._meeting(curves([(18.0, 60.0), (30.0, 40.0)]), curves(base), False)
    assert two.places == pytest.approx([18.0, 30.0])  # no chord


def test_studies_are_computed_as_each_of_them_alone() -> None:
    dice = np.random.default_rng(0)
    sides = [[[(c + dice.normal(), 100 - 2 * c + dice.normal()) for c in cleans] for _ in range(20)] for cleans in CLEANS]
    for at_first in (False, True):
        together = comparison._meeting(*(curves(*side) for side in sides), at_first).gaps
        for k, gap in enumerate(together):
            alone = comparison._meeting(*(curves(side[k]) for side in sides), at_first).gaps[0]
            assert gap == pytest.approx(alone, nan_ok=True)


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
    assert not Difference(1, 0).clear, "without any spread, chance cannot be told"
    assert Difference(1, 0.01).clear


def test_a_collapsed_seed_does_not_hide_the_others() -> None:
    """FGSM training may fail altogether with one seed: that is its own spread, and nobody else's."""
    chance = random.Random(0)
    rows = [[{STRONGEST: chance.gauss(70, 0.8)} for _ in range(2)] for _ in range(40)] + [
        [{STRONGEST: 68.0}, {STRONGEST: 97.0}]
    ]
    points = [Point(tuple({"errors": errors, "flips": {}, "intervals": {}} for errors in seeds)) for seeds in rows]
    noise = Uncertainty.of(points)
    assert noise.freedom[STRONGEST] == 40
    assert noise.spread(points[0], STRONGEST) == pytest.approx(0.8 / math.sqrt(2), rel=0.4)
    assert noise.spread(points[-1], STRONGEST) == pytest.approx(29 / 2, rel=0.01)
    assert noise.degrees(points[:3], STRONGEST) == 40
    assert noise.degrees(points[-3:], STRONGEST) == 1, "its own spread is that of two seeds"
    collapsed = comparison.at_equal_strength([(points[-1], points[0])], STRONGEST, noise)
    assert collapsed is not None
    assert collapsed.freedom == 1


def test_autoattack_on_few_seeds_has_the_luck_of_the_attack_of_its_size() -> None:
    chance = random.Random(0)

    def rows(with_autoattack: int) -> list[dict[str, object]]:
        found = [{STRONGEST: chance.gauss(66, 1.5)} for _ in range(2)]
        errors = [{**one, "autoattack_8_pixel": one[STRONGEST]} if k < with_autoattack else one for k, one in enumerate(found)]
        return [{"errors": one, "flips": {}, "intervals": {}} for one in errors]

    lent = Uncertainty.of([Point(tuple(rows(1))) for _ in range(30)])
    assert lent.seeds["autoattack_8_pixel"] == lent.seeds[STRONGEST] > 0
    assert lent.freedom["autoattack_8_pixel"] == 30
    assert "autoattack_8_pixel" not in lent.from_images
    seeded = [Point(tuple(rows(2))) for _ in range(30)]
    for row in (row for point in seeded for row in point.rows):
        row["errors"]["autoattack_8_pixel"] = chance.gauss(66, 6)
    own = Uncertainty.of(seeded)
    assert own.seeds["autoattack_8_pixel"] > 8 * own.seeds[STRONGEST], "with seeds enough it has its own"
    assert own.lent == ()


def test_clean_error_is_that_of_the_runs_with_the_measure() -> None:
    """The networks that were attacked lie on one curve; the second seeds cost more clean error, and were not attacked."""

    def point(clean: float, robust: float, second: float) -> Point:
        made = {"flips": {}, "intervals": {}, "eta": clean, "epsilon": 0.0}
        return Point(({"errors": {"clean": clean, "elastic_1.5": robust}, **made}, {"errors": {"clean": second}, **made}))

    sides = [[point(c, 100 - 2 * c, c + more) for c in (15.0, 20.0, 25.0, 30.0)] for more in (6.0, 0.0)]
    noise = Uncertainty({"clean": 1e-4, "elastic_1.5": 1e-4}, {}, {"clean": 9, "elastic_1.5": 9})
    found = at_equal_clean(*sides, "elastic_1.5", noise)
    assert found is not None
    assert found.difference.mean == pytest.approx(0, abs=0.3)
    assert sides[0][0].with_measure("elastic_1.5").mean("clean") == 15
    assert sides[0][0].with_measure("flips").mean("clean") == 18, "all runs where none has it"
    dearer, cheaper = point(20, 70, 40), point(25, 65, 25)
    assert front([dearer, cheaper], "elastic_1.5") == [dearer, cheaper], "neither of the two that were attacked is beaten"


def wobbling(count: int, seeds: int, gap: float, chance: random.Random) -> list[Point]:
    """Points along a straight line of slope -2, with a standard deviation of one in both errors of every run."""
    points = []
    for i in range(count):
        clean = 17 + 8 * i / (count - 1)
        true = {"clean": clean, "elastic_1.5": 60 - 2 * (clean - 20) + gap}
        runs = [{name: chance.gauss(value, 1) for name, value in true.items()} for _ in range(seeds)]
        strength = {"eta": i, "epsilon": 0.0}
        points.append(Point(tuple({"errors": errors, "flips": {}, "intervals": {}, **strength} for errors in runs)))
    return points


@pytest.mark.slow
@pytest.mark.parametrize("luck", [-0.8, 0.0, 0.8])
def test_a_seed_with_a_bad_day_has_it_in_clean_and_robust_error(luck: float) -> None:
    """Along a falling curve, a run that is worse in both is off the curve, and one that is worse in one moves along it."""

    def studied(chance: random.Random) -> list[Point]:
        points = []
        for i, clean in enumerate((17.0, 20.0, 23.0, 26.0)):
            runs = []
            for _ in range(3):
                both = chance.gauss(0, 1)
                off = luck * both + math.sqrt(1 - luck**2) * chance.gauss(0, 1)
                runs.append({"clean": clean + both, "elastic_1.5": 60 - 1.5 * (clean - 20) + off})
            points.append(Point(tuple({"errors": e, "flips": {}, "intervals": {}, "eta": i, "epsilon": 0.0} for e in runs)))
        return points

    found, correlations = [], []
    for trial in range(60):
        chance = random.Random(trial)
        sides = studied(chance), studied(chance)
        noise = Uncertainty.of([point for side in sides for point in side])
        correlations.append(noise.with_clean["elastic_1.5"])
        met = at_equal_clean(*sides, "elastic_1.5", noise)
        assert met is not None
        found.append(met.difference)
    assert statistics.fmean(correlations) == pytest.approx(luck, abs=0.1)
    collapsed = [{"clean": clean, "elastic_1.5": robust} for clean, robust in ((20.0, 95.0), (60.0, 40.0), (22.0, 94.0))]
    outlier = Point(tuple({"errors": e, "flips": {}, "intervals": {}, "eta": 9, "epsilon": 0.0} for e in collapsed))
    beside = Uncertainty.of([*sides[0], *sides[1], outlier]).with_clean["elastic_1.5"]
    assert beside == pytest.approx(correlations[-1]), "a seed that collapsed says nothing of the others"
    assert statistics.median(d.error for d in found) == pytest.approx(statistics.stdev(d.mean for d in found), rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0, -5])
def test_the_standard_error_at_equal_clean_error_is_the_spread_of_many_studies(gap: float) -> None:
    scales = {"clean": 1 / (20 * 80), "elastic_1.5": 1 / (60 * 40)}
    noise = Uncertainty(scales, {}, dict.fromkeys(scales, 30))
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
    assert Uncertainty(scales, {}, {"clean": 30, "elastic_1.5": 3}).degrees([], "clean", "elastic_1.5") == 3
    assert Uncertainty(scales, {}, {"clean": 0, "elastic_1.5": 7}).degrees([], "clean", "elastic_1.5") == 7
    assert [Difference(t, 1, freedom=3).clear for t in (3.18, 3.19)] == [False, True]  # the quantile is 3.182
    assert [Difference(t, 1).clear for t in (1.95, 1.97)] == [False, True]


def test_an_average_over_families_knows_what_moves_them_together() -> None:
    dice = np.random.default_rng(0)
    shared, *own = dice.normal(size=(3, 4000))
    met = [EqualClean(k, 9, Difference(1 + k, 2**0.5, 5 + k), shared + noise) for k, noise in enumerate(own)]
    average = EqualClean.average(met)
    assert (average.low, average.high, average.difference.mean, average.difference.freedom) == (0, 9, 1.5, 5)
    assert average.difference.error == pytest.approx(math.sqrt(1.5), rel=0.05)  # and not 1, as of independent ones
    gap = met[1].less(met[0])
    assert gap is not None
    assert gap.mean == 1
    assert gap.error == pytest.approx(math.sqrt(2), rel=0.05)
    met[0].draws[:] += 50  # as far as they are apart
    met[0].draws[:100] = np.nan  # where the first did not meet, the other tells
    assert EqualClean.average(met).difference.error == pytest.approx(math.sqrt(1.5), rel=0.05)
    met[0].draws[2:] = met[1].draws[:2] = np.nan
    assert met[0].less(met[1]) is None
    assert not Difference(5, math.nan).clear


def test_chance_is_told_from_seeds_and_less_of_it_near_the_ends(tmp_path: Path) -> None:
    """Errors of 50 and 100 % that spread like binomial ones: one scale fits both."""
    for seed, wobble in enumerate((-1, 0, 1)):
        for text, robust in (("euclidean:eta=1", 50 + wobble), ("euclidean:eta=2", 100.0), ("euclidean:eta=3", 50 - wobble)):
            place = fake_run(tmp_path, text, seed)
            write_evaluation(place, made_up(text) | {"pgd20_margin_8_pixel": robust, "autoattack_8_pixel": 50.0}, 4)
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    weak, strong, third = points_of(Frontier.at(tmp_path / "frontier.json").rows)
    name = "pgd20_margin_8_pixel"
    noise = Uncertainty.of([weak, strong, third])
    assert noise.seeds[name] * 50 * 50 == pytest.approx(1.0)
    assert noise.images[name] == pytest.approx(1 / IMAGES, rel=0.01)
    assert noise.freedom[name] == 4  # an error of 100 % cannot spread, and tells nothing
    assert noise.spread(weak, name) == pytest.approx(math.sqrt(1 / 3 + 50 * 50 / IMAGES), rel=0.01)
    assert noise.spread(strong, name) == 0
    alone = Uncertainty.of([type(weak)(weak.rows[:1])])
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
    noise = Uncertainty.of([first, second])
    assert noise.paired
    gap = at_equal_strength([(first, second)], STRONGEST, noise)
    assert gap is not None
    apart = (hard ^ other).mean()  # the variance of a paired difference of 0 and 1
    assert gap.error == pytest.approx(100 * math.sqrt(apart / 2003), rel=0.15)
    assert gap.error < 0.25 * math.sqrt(2 * 40 * 60 / 2003)
    assert noise.moved(first, STRONGEST).mean() == pytest.approx(100 * hard.mean(), abs=0.3)
    elsewhere = on_images({STRONGEST: other}, test_sha256="another set")
    assert not Uncertainty.of([first, elsewhere]).paired
    few = on_images({STRONGEST: hard[:1001]})  # an expensive attack is made on the first images
    spread = (noise.moved(p, STRONGEST) - (p.mean(STRONGEST) or 0) for p in (first, few))
    assert np.corrcoef(*spread)[0, 1] == pytest.approx(math.sqrt(0.5), abs=0.1)


def test_two_points_that_meet_by_coincidence_are_not_compared() -> None:
    """The same clean error to the last digit, and in no other study: chance cannot be told, so nothing is."""
    one, other = (on_a_curve((20,), random.Random(seed)) for seed in (1, 2))
    other[0].rows[0]["errors"]["clean"] = one[0].rows[0]["errors"]["clean"]
    other[0].rows[0]["seed"] = 1  # another network
    assert at_equal_clean(one, other, STRONGEST, KNOWN_NOISE) is None


def test_points_that_are_on_no_front_are_compared_too() -> None:
    """Errors that only rise with clean error have a front of one point, at unequal clean errors."""
    sides = []
    for shift, gap in ((0, 0.0), (1, 2.0)):
        side = on_a_curve([clean + shift for clean in (17, 20, 25, 30)], random.Random(1))
        for point in side:
            point.rows[0]["errors"][STRONGEST] = 1.5 * point.rows[0]["errors"]["clean"] + gap
        sides.append(side)
    met = at_equal_clean(*sides, STRONGEST, KNOWN_NOISE)
    assert met is not None
    assert met.difference.mean == pytest.approx(-2, abs=0.3)
    assert met.high - met.low > 10
    assert heights([(3.0, 1.0), (1.0, 5.0), (3.0, 2.0)], [1.0, 3.0, 3.0 + 2e-9]) == pytest.approx([5.0, 1.0, 2.0])


def test_points_weaker_than_the_one_with_the_least_clean_error_are_left_out() -> None:
    """A little of a regularizer lowers clean error: the curve would go up and down between points of nearly one clean error."""
    quiet = Uncertainty(dict.fromkeys(KNOWN_NOISE.seeds, 0.0), {}, KNOWN_NOISE.freedom)
    base = on_a_curve((15, 16, 17, 19, 24, 30), random.Random(0))
    family = on_a_curve((15.5, 18.0, 22.0), random.Random(1))
    before = at_equal_clean(family, base, STRONGEST, quiet)
    weak = on_a_curve((16.5,), random.Random(2), eta=0.0)
    weak[0].rows[0]["errors"][STRONGEST] += 30
    again = at_equal_clean([*weak, *family], base, STRONGEST, quiet)
    assert before is not None
    assert again is not None
    assert (again.low, again.high, again.difference) == (before.low, before.high, before.difference)
    strong = on_a_curve((16.5,), random.Random(2), eta=99.0)
    after = at_equal_clean([*family, *strong], base, STRONGEST, quiet)
    assert after is not None
    assert after.difference != before.difference  # it comes behind the others
    weak[0].rows[0]["errors"][STRONGEST] = 1.0  # weaker in name, and more robust
    better = at_equal_clean([*weak, *family], base, STRONGEST, quiet)
    assert better is not None
    assert better.difference != before.difference


def test_what_seeds_and_images_share_counts_once() -> None:
    """Seeds that differ in nothing but which images they are wrong on: the images tell all of it."""
    dice = np.random.default_rng(0)
    points = []
    for number in range(40):
        hard = dice.random(2000)
        seeds = [on_images({STRONGEST: dice.random(2000) < hard, "clean": dice.random(2000) < 0.2}) for _ in range(2)]
        rows = tuple({**seed.rows[0], "regularizer": f"{number}", "seed": k} for k, seed in enumerate(seeds))
        points.append(Point(rows))
    noise = Uncertainty.of(points)
    assert noise.both[STRONGEST] == pytest.approx(noise.seeds[STRONGEST], rel=0.4)  # by 40 degrees of freedom
    exact = statistics.fmean(100 * math.sqrt(np.var(table_of(point).mean(0), ddof=1) / 2000) for point in points)
    found = statistics.fmean(float(np.std(noise.moved(point, STRONGEST))) for point in points)
    assert found == pytest.approx(exact, rel=0.1)  # counted twice it would be 1.22 times as much


def table_of(point: Point) -> npt.NDArray[np.bool_]:
    rows = [np.frombuffer(base64.b64decode(row["wrong"][STRONGEST]), np.uint8) for row in point.rows]
    return np.stack([np.unpackbits(row)[:2000].astype(bool) for row in rows])


def test_what_the_bend_of_a_curve_makes_of_chance_is_taken_off() -> None:
    """One point against its own curve, which is steep: moved to the left it is far below, and to the right hardly above."""
    gaps = []
    noise = Uncertainty({"clean": 1.2**2 / (20 * 80), STRONGEST: 1e-4}, {}, {"clean": 20, STRONGEST: 20})
    for trial in range(150):
        sides = []
        for number, cleans in enumerate(((20,), (15, 20, 25, 30))):
            side = on_a_curve(cleans, random.Random(f"{trial} {number}"))
            for point, clean in zip(side, cleans, strict=True):
                luck = random.Random(f"{trial} {number} {clean}")
                spread = 1.2 * math.sqrt(clean * (100 - clean) / (20 * 80))
                errors = {"clean": luck.gauss(clean, spread), STRONGEST: 60 + 40 * math.exp(-(clean - 16) / 3)}
                point.rows[0]["errors"] |= errors
            sides.append(side)
        if (met := at_equal_clean(*sides, STRONGEST, noise)) is not None:
            gaps.append((met.difference.mean, (met.difference.mean + float(np.nanmean(met.draws))) / 2))
    corrected, raw = (statistics.fmean(part) for part in zip(*gaps, strict=True))
    assert len(gaps) > 140
    assert abs(corrected) < 1
    assert abs(raw) > 1.5  # what it would be without
