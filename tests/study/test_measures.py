"""Titles of measures: what each place prints for a key."""

import pytest

from wassersmooth.robustness import suites
from wassersmooth.study import measures

COLUMNS = {
    "clean": "clean",
    "fgsm_8_pixel": "FGSM\n8 px",
    "ifgsm20_8_normalized": "I-FGSM\n8 norm",
    "pgd20_margin_2_pixel": "PGD\n2 px",
    "multitargeted20_8_pixel": "MT PGD\n8 px",
    "autoattack_8_pixel": "AutoA.\n8 px",
    "pgd20_l2_0.5_pixel": "L2 PGD\n0.5 px",
    "wasserstein20_0.5_unit_r2": "W PGD\n0.5",
    "wasserstein20_0.02_shift_r2": "W PGD\n0.02 shift",
}
FULL = {
    "pgd20_margin_8_pixel": "PGD-20, margin loss, ε = 8/255, pixel units",
    "pgd20_l2_0.5_pixel": "PGD-20, L2 norm ε = 0.5, pixel units",
    "noise_25_pixel": "random ± noise ε = 25/255, pixel units",
    "gaussian_noise_0.1": "Gaussian noise, standard deviation 0.1",
    "wasserstein20_0.5_unit_r2": "Wasserstein PGD-20 ε = 0.5, unit scale, radius 2",
    "wasserstein20_0.02_shift_r2": "Wasserstein PGD-20, 0.02 pixels of displacement",
    "ifgsm20_8_normalized_predicted": "I-FGSM-20 8 normalized predicted",
    "rotation_10": "rotation, degrees up to 10",
    "multitargeted20_8_pixel": "PGD-20 towards several classes, ε = 8/255, pixel units",
    "something_new": "something new",
}
THREATS = {
    "multitargeted20_8_pixel": "pixel 8/255, several targets",
    "pgd20_margin_2_pixel": "pixel 2/255",
    "pgd20_l2_0.5_pixel": "L2 0.5",
    "wasserstein20_0.5_unit_r2": "Wasserstein 0.5",
    "elastic_1.5": "elastic 1.5 px",
    "flips": "flips",
    "autoattack_2_pixel": "AutoAttack 2/255",
}


@pytest.mark.parametrize(("key", "title"), COLUMNS.items())
def test_columns_of_the_screen(key: str, title: str) -> None:
    assert measures.column_title(key) == title


@pytest.mark.parametrize(("key", "title"), FULL.items())
def test_rows_of_all_measures(key: str, title: str) -> None:
    assert measures.full_title(key).replace("\u00a0", " ") == title


@pytest.mark.parametrize(("key", "title"), THREATS.items())
def test_threats(key: str, title: str) -> None:
    assert measures.threat_title(key) == title


def test_rows_of_the_paper_and_sentences() -> None:
    assert measures.table_title("clean") == "Natural"
    assert measures.table_title("fgsm_25").replace("\u00a0", " ") == "FGSM ε = 25/255"
    assert measures.short_title("ifgsm20_8", ", epsilon ") == "I-FGSM-20, epsilon 8/255"
    assert measures.spoken("ifgsm20_8_normalized") == "I-FGSM-20 at 8/255 in normalized units"
    assert measures.spoken("pgd20_margin_8_pixel") == "20 margin-loss PGD steps at 8/255 in pixel units"
    assert (measures.attack_title("ifgsm10"), measures.attack_title("other")) == ("I-FGSM-10", "OTHER")


def test_every_row_of_the_full_suite_is_in_the_table() -> None:
    keys = suites.perturbations("full", (8, 8), normalized=True)
    assert len(keys) > 20
    assert {key for key in keys if measures.column_title(key) == key and not key.startswith("corruption_")} <= {"clean"}
