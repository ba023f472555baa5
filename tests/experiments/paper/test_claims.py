"""The paper's claims against rows whose numbers are known: every verdict can be reached, and for the right reason."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.comparison import Difference
from experiments.paper.claims import CLAIMS, JUDGED, PARTS, SETTINGS, Trial, trials
from experiments.paper.equal_clean import (
    CONTRADICTED,
    NEVER,
    NOT_SHOWN,
    ONE_SEED,
    SHOWN,
    Comparison,
    in_words,
    joint,
    verdicts,
)
from experiments.paper.results import BETWEEN, REGULARIZERS, Results
from tests.experiments.paper.fake_publication import fake_row, fake_rows
from wassersmooth.study.errors import StudyError

WITHIN = "within_one_point"
# Clean and robust error of four strengths of each penalty; Wasserstein's curve is Euclidean's, moved down by 5.
EUCLIDEAN = {0.1: (16.0, 60.0), 0.2: (17.0, 50.0), 0.4: (18.0, 42.0), 0.8: (22.0, 30.0)}
BETTER = {0.15: (16.0, 55.0), 0.3: (17.0, 45.0), 0.6: (18.0, 37.0), 1.2: (22.0, 25.0)}
WORSE = {eta: (clean, robust + 10) for eta, (clean, robust) in BETTER.items()}
PLAIN = (16.3, 95.0)
MEASURE = "fgsm_8_pixel"


def judged(rows: list[dict[str, Any]], measure: str = MEASURE, protocol: Any = ()) -> Trial:
    return next(trial for trial in trials(Results.of(rows), protocol) if trial.measure == measure)


def curves(wasserstein: dict[float, tuple[float, float]], seeds: int = 3, apart: float = 0.1) -> list[dict[str, Any]]:
    """Rows of all strengths; the published ones, of ``fake_publication.POINTS``, belong to the first selection."""
    found = [row for row in (fake_row("none", seed, errors=errors_at(PLAIN, apart * seed)) for seed in range(seeds))]
    for kind, points in (("euclidean", EUCLIDEAN), ("wasserstein", wasserstein)):
        for eta, values in points.items():
            selection = WITHIN if eta in (0.2, 0.3) else BETWEEN
            found += [fake_row(kind, seed, selection, eta=eta, errors=errors_at(values, apart * seed)) for seed in range(seeds)]
    for row in found:  # of so many images that seeds alone matter
        row["intervals"] = {name: [value - 0.05, value + 0.05] for name, value in row["errors"].items()}
    return found


def errors_at(values: tuple[float, float], apart: float) -> dict[str, float]:
    clean, robust = values
    return {"clean": clean + apart, MEASURE: robust + apart, "autoattack_2_pixel": robust + apart}


@pytest.mark.parametrize(("wasserstein", "verdict"), [(BETTER, SHOWN), (WORSE, CONTRADICTED)])
def test_the_order_is_judged_at_equal_clean_error(wasserstein: dict[float, tuple[float, float]], verdict: str) -> None:
    trial = judged(curves(wasserstein))
    found = trial.comparisons["order"]
    assert trial.verdicts["order"] == trial.verdict == verdict
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(-5 if wasserstein is BETTER else 5, abs=0.3)
    assert (found.low, found.high) == pytest.approx((16.1, 16.4 + 2), abs=0.15)  # 2 points above no regularizer
    assert trial.verdicts["strong"] == verdict
    assert trial.comparisons["strong"].low > 22


def test_where_networks_were_selected_decides_nothing() -> None:
    """Two strengths that do not meet: the selected Wasserstein network has a higher error, at a lower clean error."""
    rows = [row for row in curves(BETTER) if row["eta"] in (0.0, 0.2, 0.15)]
    rows = [row | {"selection": WITHIN} for row in rows]
    trial = judged(rows)
    assert trial.means["wasserstein"] > trial.means["euclidean"]
    assert trial.verdict == trial.verdicts["order"] == NOT_SHOWN
    assert trial.comparisons["order"].missing == "1 and 1 strengths, none of which meet there; a curve takes 3"


def test_without_curves_networks_of_equal_clean_error_are_compared_as_they_are() -> None:
    rows = [row for row in curves(BETTER) if row["eta"] in (0.0, 0.2, 0.3)]
    found = judged(rows).comparisons["order"]
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(-5)
    assert judged(rows).verdict == SHOWN


def test_a_difference_at_high_clean_error_counts_for_no_row() -> None:
    strong = {**BETTER, 1.2: (22.0, 90.0)}
    rows = [row for row in curves(strong) if row["eta"] in (0.0, 0.2, 0.8, 1.2)]
    rows += [row for row in curves({0.3: (19.0, 45.0)}) if row["eta"] == 0.3]
    trial = judged(rows)
    assert trial.verdicts["strong"] == CONTRADICTED
    assert trial.verdict == NOT_SHOWN


def test_a_penalty_above_none_at_one_strength_contradicts_nothing() -> None:
    rows = curves(BETTER)
    for row in rows:
        row["errors"][MEASURE] += 50 if row["regularizer"] == "none" else 0
        row["errors"][MEASURE] = min(row["errors"][MEASURE], 20.0) if row["regularizer"] == "none" else row["errors"][MEASURE]
    trial = judged(rows)
    assert trial.comparisons["euclidean"].difference is not None
    assert trial.comparisons["euclidean"].difference.mean > 20
    assert trial.verdicts["euclidean"] == trial.verdicts["wasserstein"] == NOT_SHOWN
    assert trial.verdict == NOT_SHOWN


def test_natural_images_are_compared_at_equal_error_under_attack() -> None:
    trial = judged(curves(BETTER), "clean")
    found = trial.comparisons["order"]
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(-0.95, abs=0.2)  # less clean error for the same protection
    assert trial.verdicts["order"] == SHOWN
    assert judged(curves(WORSE), "clean").verdicts["order"] == CONTRADICTED
    assert "strong" not in trial.comparisons


def test_holm_is_over_all_comparisons_and_leaves_out_what_cannot_be_compared() -> None:
    """2.6 standard errors are beyond chance alone, and not among ten."""
    one = Comparison(Difference(-2.6, 1.0))
    assert verdicts({"alone": one}) == {"alone": SHOWN}
    assert set(verdicts(dict.fromkeys(range(10), one)).values()) == {NOT_SHOWN}
    others = {name: Comparison(Difference(-2.6, 1.0), missing=ONE_SEED) for name in range(9)}
    assert verdicts({"alone": one, **others}) == {"alone": SHOWN, **dict.fromkeys(range(9), NOT_SHOWN)}
    assert verdicts({"alone": Comparison(Difference(2.6, 1.0))}) == {"alone": CONTRADICTED}


def test_a_row_is_shown_where_all_of_its_parts_are() -> None:
    assert joint([SHOWN, SHOWN]) == SHOWN
    assert joint([SHOWN, NOT_SHOWN]) == joint([]) == NOT_SHOWN
    assert joint([SHOWN, NOT_SHOWN, CONTRADICTED]) == CONTRADICTED


def test_one_seed_shows_nothing() -> None:
    trial = judged(curves(BETTER, seeds=1))
    assert trial.comparisons["order"].missing == ONE_SEED
    assert trial.verdicts == dict.fromkeys(PARTS, NOT_SHOWN)
    assert in_words(trial.comparisons["order"]).endswith("(one seed)")


def test_a_strength_of_one_seed_is_compared_beside_others_of_several() -> None:
    alone = (0.2, 0.3)  # of the published networks, one seed has the measures of the protocol
    rows = [row for row in curves(BETTER) if row["eta"] not in alone or not row["seed"]]
    trial = judged(rows)
    assert trial.verdicts["order"] == SHOWN
    assert trial.comparisons["euclidean"].missing == ONE_SEED  # which is a network of one seed against none
    whole = judged(curves(BETTER)).comparisons["order"].difference
    found = trial.comparisons["order"].difference
    assert found is not None
    assert whole is not None
    assert found.error > whole.error


def test_measures_of_the_protocol_are_added_to_their_networks() -> None:
    name = "fgsm_8_normalized_predicted"
    rows = [row | {"model_sha256": f"{row['regularizer']} {row['eta']} {row['seed']}"} for row in curves(BETTER)]
    assert judged(rows, name).comparisons["order"].missing == NEVER
    added = [
        {"model_sha256": row["model_sha256"], "measure": name, "error": row["errors"][MEASURE]}
        | {"interval": row["intervals"][MEASURE], "images": 9}
        for row in rows
    ]
    assert judged(rows, name, added).verdict == SHOWN
    few = [row for row in added if row["model_sha256"].endswith(" 0")]
    assert judged(rows, name, few).comparisons["order"].missing == ONE_SEED


def test_a_curve_has_one_radius() -> None:
    rows = curves(BETTER)
    other = [row | {"radius": 4, "errors": errors_at((17.0, 5.0), 0.0)} for row in rows if row["eta"] == 0.6]
    assert judged([*rows, *other]).comparisons == judged(rows).comparisons
    moved = [row | {"eta": 0.45, "radius": 2} for row in other]
    assert judged([*rows, *moved]).comparisons["order"] != judged(rows).comparisons["order"]


def test_every_claim_in_every_setting() -> None:
    found = trials(Results.of(fake_rows()))
    settings = [(trial.claim.name, trial.setting) for trial in found]
    assert len(found) == len(set(settings)) == 1 + 3 * len(SETTINGS) + 2
    assert {claim.name for claim in CLAIMS} == {name for name, _ in settings}
    assert ("horizontal", "reach 16") in settings
    assert all(set(JUDGED) <= trial.verdicts.keys() for trial in found)


def test_the_share_of_the_paper_s_fall() -> None:
    trial = judged(curves(BETTER))
    assert trial.share == pytest.approx((95.0 - 45.0) / (82.22 - 30.20))


@pytest.mark.parametrize("name", ["dataset", "model", "recipe", "images", "test_sha256"])
def test_rows_of_two_experiments_are_not_averaged(name: str) -> None:
    rows = fake_rows()
    changed: dict[str, Any] = {"recipe": {"another": 1}, "images": rows[0]["images"] | {"clean": 7}}
    rows[-1] |= {name: changed.get(name, "another"), "run": "odd-seed2"}
    with pytest.raises(StudyError, match=f"odd-seed2 and .* differ in {name}; .* measure them alike"):
        Results.of(rows)


def test_a_measure_that_only_one_row_has_is_no_other_experiment() -> None:
    rows = fake_rows()
    rows[-1]["images"] |= {"fgsm_8_normalized_predicted": 10_000}
    Results.of(rows)


def test_rows_of_two_points_are_not_averaged() -> None:
    with pytest.raises(StudyError, match="euclidean has rows of 2 different points"):
        Results.of([*fake_rows(), fake_row("euclidean", 7, eta=0.5)])
    Results.of([*fake_rows(), fake_row("euclidean", 7, BETWEEN, eta=0.5), fake_row("euclidean", 7, BETWEEN, eta=0.6)])
    with pytest.raises(StudyError, match="take it out of the file"):
        Results.of([fake_row("none", selection="prettiest")])
    with pytest.raises(StudyError, match="there are no rows"):
        Results.of([])


def test_the_unregularized_network_belongs_to_every_selection() -> None:
    rows = fake_rows() + [row for row in fake_rows(3, "most_robust") if row["regularizer"] != "none"]
    results = Results.of(rows)
    assert results.selections == ["within_one_point", "most_robust"]
    assert results.error("none", "most_robust", "clean") == results.error("none", WITHIN, "clean")
    assert {row["regularizer"] for row in results.rows} == set(REGULARIZERS)
