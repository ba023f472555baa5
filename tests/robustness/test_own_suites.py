"""Suites given as values, sequences of attacks and mappings of callables: their numbers, names, memory, and bad input."""

import copy
import json
import re

import pytest
import torch

from tests.robustness.small_models import digits, trained
from wassersmooth.normalized import Normalized
from wassersmooth.robustness import suites
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD, AutoAttack
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.translations import label_changes, label_flips

pytestmark = pytest.mark.usefixtures("few_probes")


def case(count=20):
    _, _, images, labels = digits()
    return copy.deepcopy(trained()), images[:count], labels[:count]


def with_autoattack():
    """The paper's rows, and AutoAttack at two sizes."""
    return suites.perturbations("paper", (8, 8), True) | {f"autoattack_{n}_pixel": AutoAttack(n / 255) for n in (8, 2)}


def measured(memory=None, suite=None, autoattack_images=8):
    generator, suite = torch.Generator().manual_seed(0), with_autoattack() if suite is None else suite
    return evaluate(*case(), suite, generator=generator, autoattack_images=autoattack_images, memory=memory)


def noisy(model, images, labels, generator):
    return (images + 0.1 * torch.randn(images.shape, generator=generator)).clamp(0, 1)


@pytest.mark.slow
def test_a_mapping_with_the_attacks_of_the_standard_suite_gives_its_report():
    named, value = measured(suite="standard"), measured(suite=suites.perturbations("standard", (8, 8), True))
    assert value.suite == "custom"
    assert named.to_dict() | {"suite": "custom"} == value.to_dict()


def test_a_sequence_is_named_by_the_repr_of_its_attacks():
    attacks = [FGSM(8 / 255), PGD(0.5, 0.1, 3, norm="l2")]
    report = measured(suite=attacks)
    assert list(report.errors) == ["clean", *map(repr, attacks)]
    assert report.errors["clean"] == measured(suite="quick").errors["clean"]
    assert [(entry.epsilon, entry.units, entry.norm) for entry in report.entries[1:]] == [
        (8 / 255, "pixel", "linf"),
        (0.5, "pixel", "l2"),
    ]
    assert measured(suite=tuple(attacks)) == report
    assert report.flips
    assert report.probes
    assert json.loads(report.to_json())["errors"] == report.errors
    assert f"| {attacks[0]!r} | " in report.to_markdown()
    assert "custom: clean" in repr(report)


def test_without_attacks_there_are_clean_error_flips_and_the_probes():
    report = measured(suite=[])
    assert list(report.errors) == ["clean"]
    assert report.flips
    assert report.probes


def test_any_callable_under_any_name():
    model, images, labels = case()
    report = evaluate(model, images, labels, {"a | b": noisy, "gone": lambda *given: torch.zeros_like(given[1])}, seed=0)
    assert list(report.errors) == ["clean", "a | b", "gone"]
    black = int(model(torch.zeros_like(images[:1])).argmax(1))
    assert report.errors["gone"] == pytest.approx(100 * (labels != black).double().mean().item())
    assert r"| a \| b | " in report.to_markdown()
    assert report.entries[1].description == "noisy"
    assert (report.entries[1].epsilon, report.entries[1].units) == (None, "")
    assert "0x" not in report.to_markdown()


def test_a_callable_may_do_what_it_likes_with_what_it_is_given():
    """Write into the images and labels, and leave the model in training mode: the other measures do not see it."""

    def spoil(model, images, labels, generator):
        model.train()
        labels.zero_()
        return images.zero_()

    report = measured(suite={"spoil": spoil, "fgsm": FGSM(8 / 255)})
    alone = measured(suite={"fgsm": FGSM(8 / 255)})
    assert report.errors["fgsm"] == alone.errors["fgsm"]
    assert report.flips == alone.flips
    assert report.masking == alone.masking


def test_another_attack_under_a_name_of_the_library_does_not_mislead_the_masking_checks():
    """Nothing fools a model less than nothing: taken for FGSM and PGD, it would be accused of masked gradients."""
    honest = measured(suite=[])
    names = ("fgsm_8_pixel", "ifgsm20_8_pixel", "pgd20_margin_8_pixel")
    idle = measured(suite=dict.fromkeys(names, FGSM(0.0)))
    assert idle.errors["fgsm_8_pixel"] == idle.errors["clean"]
    assert idle.masking == honest.masking
    assert idle.probes == honest.probes


def test_attacks_that_the_checks_need_are_not_run_twice(monkeypatch):
    report = measured(suite={"ifgsm20_8_pixel": IFGSM(8 / 255, 2 / 255, 20)})
    assert "ifgsm20_8_pixel" not in {probe.name for probe in report.probes}
    assert "ifgsm20_8_pixel" in {probe.name for probe in measured(suite=[]).probes}


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        (FGSM(8 / 255), r"got FGSM\(.*\); put it into a list: \[FGSM\("),
        (None, "suite must be one of 'quick', .* a sequence of attacks, or a mapping .*; got None"),
        ({FGSM(8 / 255)}, r"got \{FGSM\(.*\}; list\(\.\.\.\) makes a sequence"),
        (iter([FGSM(8 / 255)]), r"list\(\.\.\.\) makes a sequence"),
        (b"quick", "must hold attacks"),
        ([FGSM(8 / 255), "quick"], "must hold attacks, .*; got 'quick' in it; give other callables as a mapping"),
        ([noisy], "must hold attacks"),
        ([FGSM], "must hold attacks"),
        ([FGSM(8 / 255), FGSM(8 / 255)], "each attack of a suite must be in it once"),
        ({"fgsm": FGSM}, "the suite's 'fgsm' must be a function .*; got the class FGSM itself"),
        ({"fgsm": 8 / 255}, r"the suite's 'fgsm' must be a function .* such as FGSM\(8/255\); got float"),
        ({"clean": noisy}, "'clean' is measured in every suite; .* choose another name"),
        ({"flips_vertical": noisy}, "'flips_vertical' is measured in every suite"),
        ({3: noisy}, "a name in a suite must be a line of text; got 3"),
        ({"": noisy}, "a line of text; got ''"),
        ({"a\nb": noisy}, "a line of text; got"),
    ],
)
def test_what_is_not_a_suite_is_refused_in_one_line(suite, message):
    with pytest.raises(ValueError, match=message) as complaint:
        evaluate(*case(), suite)
    assert "\n" not in str(complaint.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda images: None, "got NoneType"),
        (lambda images: images[:5], r"got \(5, 1, 8, 8\) of torch.float32 on cpu"),
        (lambda images: images.double(), r"got \(20, 1, 8, 8\) of torch.float64 on cpu"),
        (lambda images: images.to("meta"), r"got \(20, 1, 8, 8\) of torch.float32 on meta"),
    ],
)
def test_what_is_not_images_is_refused_in_one_line(returned, message):
    expected = re.escape("the suite's 'own' must return images like those it receives, (20, 1, 8, 8) of torch.float32 on cpu; ")
    with pytest.raises(ValueError, match=f"{expected}{message}; return one perturbed image for each"):
        measured(suite={"own": lambda model, images, labels, generator: returned(images)})


def test_an_attack_in_normalized_units_needs_a_normalization():
    model, images, labels = case()
    attack = FGSM(8 / 255, "normalized")
    assert isinstance(model, Normalized)
    assert evaluate(model, images, labels, [attack], seed=0).entries[1].units == "normalized"
    with pytest.raises(ValueError, match="Normalized"):
        evaluate(model.model, images, labels, [attack], seed=0)


@pytest.mark.slow
def test_autoattack_at_two_sizes_on_a_part_of_the_images(short_autoattack):
    report = measured()
    entries = {entry.name: entry for entry in report.entries}
    assert list(entries)[-2:] == ["autoattack_8_pixel", "autoattack_2_pixel"]
    assert [entries[name].images for name in ("clean", "autoattack_8_pixel", "autoattack_2_pixel")] == [20, 8, 8]
    assert entries["autoattack_2_pixel"].error <= entries["autoattack_8_pixel"].error
    assert entries["autoattack_2_pixel"].epsilon == 2 / 255


def test_flips_within_a_shorter_reach_are_the_inner_changes_of_the_longest():
    model, images, _ = case()
    changes = label_changes(model, images, "vertical", reach=4)
    for reach in (1, 2, 4):
        assert torch.equal(changes[:, 4 - reach : 4 + reach].sum(1), label_flips(model, images, "vertical", reach))


def test_the_report_has_the_flips_of_every_reach():
    report = measured(suite="paper")
    assert {flips.reach for flips in report.translations} == {4}  # half of 8 pixels
    assert [(flips.axis, flips.reach) for flips in report.shorter] == [("horizontal", 2), ("vertical", 2)]
    model, images, _ = case()
    for flips in report.shorter:
        assert flips.mean == pytest.approx(label_flips(model, images, flips.axis, 2).double().mean().item())
        assert flips.low <= flips.mean <= flips.high
    assert len(report.to_dict()["shorter"]) == 2


@pytest.mark.slow
def test_what_is_in_the_memory_is_not_measured_again(short_autoattack, monkeypatch):
    memory = {}
    paper = measured(memory, "paper")
    asked = []
    original = Measurement.perturbed

    def watched(self, name, *rest):
        asked.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(Measurement, "perturbed", watched)
    report = measured(memory)
    rows = {entry.name for entry in report.entries}
    assert [name for name in asked if name in rows] == ["autoattack_8_pixel", "autoattack_2_pixel"]
    assert all(report.errors[name] == error for name, error in paper.errors.items())
    assert report.to_dict() == measured().to_dict()  # with and without a memory: the same
    asked.clear()
    measured(memory, autoattack_images=9)  # another number of images is another measure
    assert [name for name in asked if name in rows] == ["autoattack_8_pixel", "autoattack_2_pixel"]


def test_no_images_for_autoattack_is_refused():
    with pytest.raises(ValueError, match="autoattack_images must be an integer of at least 1; got 0"):
        measured(autoattack_images=0)
