"""The suite of a publication: AutoAttack at two sizes on a part of the images, flips within every reach, and a memory."""

import copy

import pytest
import torch
from robustness.small_models import digits, trained

from wassersmooth.robustness.dossier import evaluate
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.translations import label_changes, label_flips

pytestmark = pytest.mark.usefixtures("few_probes")


def case(count=20):
    _, _, images, labels = digits()
    return copy.deepcopy(trained()), images[:count], labels[:count]


def measured(memory=None, suite="publication", autoattack_images=8):
    generator = torch.Generator().manual_seed(0)
    return evaluate(*case(), suite, generator=generator, autoattack_images=autoattack_images, memory=memory)


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


def test_the_report_has_the_flips_of_every_reach(short_autoattack):
    report = measured()
    assert {flips.reach for flips in report.translations} == {4}  # half of 8 pixels
    assert [(flips.axis, flips.reach) for flips in report.shorter] == [("horizontal", 2), ("vertical", 2)]
    model, images, _ = case()
    for flips in report.shorter:
        assert flips.mean == pytest.approx(label_flips(model, images, flips.axis, 2).double().mean().item())
        assert flips.low <= flips.mean <= flips.high
    assert len(report.to_dict()["shorter"]) == 2


def test_what_is_in_the_memory_is_not_measured_again(short_autoattack, monkeypatch):
    memory = {}
    paper = measured(memory, "paper")
    asked = []
    original = Measurement.wrong

    def watched(self, name, *rest):
        asked.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(Measurement, "wrong", watched)
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
