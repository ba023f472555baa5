"""The paper's claims against rows whose numbers are known: every verdict can be reached, and the reasons are right."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.paper.claims import (
    CLAIMS,
    FAILS,
    HOLDS,
    MASKED,
    NOT_SHOWN,
    ONE_SEED,
    ONLY_NORMALIZED,
    ONLY_PIXEL,
    UNKNOWN,
    Outcome,
    outcomes,
)
from experiments.paper.results import REGULARIZERS, Results
from tests.experiments.paper.fake_publication import fake_row, fake_rows
from wassersmooth.study.errors import StudyError

WITHIN = "within_one_point"


def judged(rows: list[dict[str, Any]], name: str) -> Outcome:
    return next(outcome for outcome in outcomes(Results.of(rows), WITHIN) if outcome.claim.name == name)


def with_errors(name: str, *values: float) -> list[dict[str, Any]]:
    """Three seeds, 0.1 apart, around a number for each regularizer."""
    return [
        fake_row(kind, seed, errors={name: value + 0.1 * seed})
        for kind, value in zip(REGULARIZERS, values, strict=True)
        for seed in range(3)
    ]


def test_the_paper_s_own_numbers_hold_in_normalized_units_only() -> None:
    found = {outcome.claim.name: outcome.verdict for outcome in outcomes(Results.of(fake_rows()), WITHIN)}
    assert found == {
        "clean": HOLDS,
        "fgsm_8": ONLY_NORMALIZED,
        "fgsm_25": ONLY_NORMALIZED,
        "ifgsm20_8": ONLY_NORMALIZED,
        "horizontal": HOLDS,
        "vertical": HOLDS,
    }
    assert [claim.name for claim in CLAIMS] == list(found)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((82.0, 31.0, 30.0), HOLDS),
        ((82.0, 30.0, 31.0), ONLY_NORMALIZED),  # the wrong way round in pixels
        ((82.0, 31.0, 30.95), f"holds in normalized units, in pixel units {NOT_SHOWN}"),
        ((30.0, 31.0, 29.0), ONLY_NORMALIZED),  # Euclidean does not help
        ((82.0, 80.0, 70.0), ONLY_NORMALIZED),  # the right order, and a quarter of the fall
    ],
)
def test_a_row_holds_where_order_and_size_do(values: tuple[float, float, float], verdict: str) -> None:
    assert judged(with_errors("fgsm_8_pixel", *values), "fgsm_8").verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((82.0, 30.0, 31.0), ONLY_PIXEL),
        ((82.0, 31.0, 30.95), f"holds in pixel units, in normalized units {NOT_SHOWN}"),
    ],
)
def test_what_holds_in_pixel_units_alone_is_said_to(values: tuple[float, float, float], verdict: str) -> None:
    rows, others = with_errors("fgsm_8_pixel", 82.0, 31.0, 30.0), with_errors("fgsm_8_normalized", *values)
    for row, other in zip(rows, others, strict=True):
        row["errors"]["fgsm_8_normalized"] = other["errors"]["fgsm_8_normalized"]
    assert judged(rows, "fgsm_8").verdict == verdict


@pytest.mark.parametrize(("wasserstein", "share"), [(30.0, 100), (56.0, 50), (81.9, 0)])
def test_the_evidence_says_how_much_of_the_fall_there_is(wasserstein: float, share: int) -> None:
    pixel = judged(with_errors("fgsm_8_pixel", 82.0, 31.0, wasserstein), "fgsm_8").trials[0]
    assert f"the fall to Wasserstein is {share} % of the paper's" in pixel.evidence


def test_where_there_is_no_fall_the_evidence_says_so_in_words() -> None:
    pixel = judged(with_errors("fgsm_8_pixel", 82.0, 31.0, 90.0), "fgsm_8").trials[0]
    assert pixel.evidence.endswith("; Wasserstein 8.0 above none, beyond chance")
    assert pixel.part == "no fall"
    assert pixel.worse
    assert not pixel.better


@pytest.mark.parametrize("wasserstein", [30.0, 30.95, 31.0])
def test_worse_is_beyond_chance_as_well(wasserstein: float) -> None:
    assert not judged(with_errors("fgsm_8_pixel", 82.0, 30.95, wasserstein), "fgsm_8").trials[0].worse


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((16.3, 15.6, 15.7), NOT_SHOWN),  # the order of the penalties is within chance
        ((16.3, 15.6, 16.0), FAILS),  # Wasserstein above Euclidean
        ((16.3, 15.95, 15.9), NOT_SHOWN),  # nearly half of the paper's fall
        ((16.3, 16.25, 16.1), FAILS),  # a fifth of the paper's fall
        ((15.0, 15.6, 14.0), FAILS),  # Euclidean above none
    ],
)
def test_a_row_fails_where_its_opposite_is_beyond_chance(values: tuple[float, float, float], verdict: str) -> None:
    assert judged(with_errors("clean", *values), "clean").verdict == verdict


def test_a_row_that_holds_in_no_units() -> None:
    outcome = judged(with_errors("fgsm_8_normalized", 82.0, 31.0, 31.0), "fgsm_8")
    assert outcome.verdict == NOT_SHOWN
    pixel, normalized = outcome.trials
    assert (pixel.protects, pixel.better, pixel.setting) == (True, True, "pixel")
    assert (normalized.protects, normalized.better) == (True, False)
    assert normalized.share == pytest.approx(51 / 52.02)
    assert "Wasserstein 0.0 below Euclidean, within chance" in normalized.evidence
    assert "(paper 82.2 / 31.1 / 30.2)" in normalized.evidence


def test_one_seed_decides_nothing() -> None:
    far = [fake_row(k, errors={"clean": v}) for k, v in zip(REGULARIZERS, (18.0, 16.0, 14.0), strict=True)]
    assert judged(far, "clean").verdict == ONE_SEED
    far += [fake_row(k, 1, errors={"clean": v + 0.1}) for k, v in zip(REGULARIZERS, (18.0, 16.0, 14.0), strict=True)]
    assert judged(far, "clean").verdict == HOLDS
    alone = [row for row in fake_rows() if row["regularizer"] != "euclidean" or row["seed"] == 0]
    assert {outcome.verdict for outcome in outcomes(Results.of(alone), WITHIN)} == {ONE_SEED}


def test_masked_gradients_are_said_beside_a_row_about_attacks_that_holds() -> None:
    rows = with_errors("fgsm_8_pixel", 82.0, 31.0, 30.0)
    rows[-1]["verdict"] = "masked: made up"
    assert judged(rows, "fgsm_8").verdict == HOLDS + MASKED
    assert judged(rows, "fgsm_25").verdict == ONLY_NORMALIZED + MASKED
    assert judged(rows, "clean").verdict == HOLDS
    assert judged(rows, "vertical").verdict == HOLDS


@pytest.mark.parametrize("name", ["dataset", "model", "recipe", "images", "test_sha256"])
def test_rows_of_two_experiments_are_not_averaged(name: str) -> None:
    rows = fake_rows()
    rows[-1] |= {name: {"another": 1} if name in ("recipe", "images") else "another", "run": "odd-seed2"}
    with pytest.raises(StudyError, match=f"odd-seed2 and .* differ in {name}; .* measure them alike"):
        Results.of(rows)


def test_the_paper_s_number_inside_an_interval_is_said() -> None:
    trial = judged(with_errors("clean", 16.2, 15.5, 10.0), "clean").trials[0]
    assert trial.inside == ["none", "euclidean"]


def test_flips_are_asked_where_the_unregularized_network_is_nearest_to_the_paper() -> None:
    results = Results.of(fake_rows())
    assert results.nearest_reach(WITHIN) == 12
    assert [trial.setting for trial in judged(fake_rows(), "vertical").trials] == ["reach 12", "reach 16"]


def test_what_was_not_measured_has_no_verdict() -> None:
    assert judged([row for row in fake_rows() if row["regularizer"] != "euclidean"], "fgsm_8").verdict == UNKNOWN
    without = [row | {"flips_by_reach": {}} for row in fake_rows()]
    assert judged(without, "horizontal").verdict == UNKNOWN


def test_rows_of_two_points_are_not_averaged() -> None:
    with pytest.raises(StudyError, match="euclidean has rows of 2 different points"):
        Results.of([*fake_rows(), fake_row("euclidean", 7, eta=0.5)])
    with pytest.raises(StudyError, match="take it out of the file"):
        Results.of([fake_row("none", selection="prettiest")])
    with pytest.raises(StudyError, match="there are no rows"):
        Results.of([])


def test_the_unregularized_network_belongs_to_every_selection() -> None:
    rows = fake_rows() + [row for row in fake_rows(3, "most_robust") if row["regularizer"] != "none"]
    results = Results.of(rows)
    assert results.selections == ["within_one_point", "most_robust"]
    assert results.error("none", "most_robust", "clean") == results.error("none", WITHIN, "clean")
