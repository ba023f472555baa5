"""evaluate(): rows, numbers, reproducibility, the state of the model, and one clear error for each kind of bad input."""

import copy
import gc
import json
import weakref
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from tests.robustness.small_models import Around, RandomOutput, digits, trained
from tests.robustness.test_attack_side_effects import assert_same, noisy_model, snapshot
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.normalized import Normalized
from wassersmooth.robustness import evaluation, measurement, suites
from wassersmooth.robustness.attacks import FGSM, IFGSM, WassersteinPGD
from wassersmooth.robustness.corruptions import PARAMETERS, Corruption
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.translations import label_flips

BOTH_UNITS = ["clean"] + [f"{a}_{u}" for u in ("pixel", "normalized") for a in ("fgsm_8", "fgsm_25", "ifgsm20_8")]
PAPER = BOTH_UNITS + [f"{a}_normalized_predicted" for a in ("fgsm_8", "fgsm_25", "ifgsm20_8")]


pytestmark = pytest.mark.usefixtures("few_probes")


def case(device="cpu", count=120):
    _, _, images, labels = digits()
    return copy.deepcopy(trained()).to(device), images[:count].to(device), labels[:count].to(device)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_paper_suite(device):
    model, images, labels = case(device)
    report = evaluate(model, images, labels, "paper", generator=seeded(0))
    assert list(report.errors) == PAPER
    for name, attack in (
        ("fgsm_8_pixel", FGSM(8 / 255)),
        ("fgsm_25_pixel", FGSM(25 / 255)),
        ("ifgsm20_8_pixel", IFGSM(8 / 255, 2 / 255, 20)),
        ("fgsm_25_normalized", FGSM(25 / 255, "normalized")),
        ("ifgsm20_8_normalized", IFGSM(8 / 255, 2 / 255, 20, "normalized")),
        ("fgsm_25_normalized_predicted", FGSM(25 / 255, "normalized", against="predictions")),
        ("ifgsm20_8_normalized_predicted", IFGSM(8 / 255, 2 / 255, 20, "normalized", against="predictions")),
    ):
        wrong = int((model(attack(model, images, labels)).argmax(1) != labels).sum())
        assert report.errors[name] == pytest.approx(100 * wrong / 120)
        assert report.intervals[name] == wilson(wrong, 120)
    for axis in ("horizontal", "vertical"):
        flips = label_flips(model, images, axis, reach=4).double().mean().item()
        assert report.flips[axis] == pytest.approx(flips)
        low, high = report.intervals[f"flips_{axis}"]
        assert low < flips < high


def test_without_a_visible_normalization_there_are_pixel_rows_only():
    model, images, labels = case()
    hidden = nn.Sequential(Hidden(model))
    report = evaluate(hidden, images, labels, "paper", generator=seeded(0))
    assert list(report.errors) == [name for name in PAPER if "normalized" not in name]
    assert report.std is None


def test_an_ensemble_of_several_units_has_pixel_rows_only():
    class Ensemble(nn.ModuleList):
        def forward(self, x):
            return self[0](x) + self[1](x)

    model, images, labels = case(count=20)
    mixed, alike = (Ensemble([model, Normalized(model.model, 0.5, std)]) for std in (0.2, 0.38))
    report = evaluate(mixed, images, labels, "paper", generator=seeded(0))
    assert list(report.errors) == [name for name in PAPER if "normalized" not in name]
    assert report.std is None
    assert list(evaluate(alike, images, labels, "paper", generator=seeded(0)).errors) == PAPER


def test_settings_of_numpy_are_settings():
    model, images, labels = case(count=20)
    report = evaluate(model, images, labels, "quick", seed=np.int64(3), autoattack_images=np.int64(5))
    assert type(report.seed) is int
    assert report == evaluate(model, images, labels, "quick", seed=3)
    assert '"seed": 3' in report.to_json()


class Hidden(nn.Module):
    """A normalization that nobody can see."""

    def __init__(self, model):
        super().__init__()
        self.inside, self.mean, self.std = model.model, float(model.mean), float(model.std)

    def forward(self, x):
        return self.inside((x - self.mean) / self.std)


def test_standard_suite(device):
    model, images, labels = case(device, 60)
    report = evaluate(model, images, labels, generator=seeded(0))
    added = set(report.errors) - set(BOTH_UNITS)
    assert report.errors["multitargeted20_8_pixel"] >= report.errors["pgd20_margin_8_pixel"]
    assert {"pgd20_margin_8_pixel", "pgd20_l2_0.5_pixel", "wasserstein20_0.5_unit_r2", "noise_8_pixel"} <= added
    assert {"elastic_1.5", "rotation_10", "scaling_1.1", "gaussian_noise_0.1", "wasserstein_noise_0.1"} <= added
    assert set(BOTH_UNITS) <= set(report.errors)
    assert not any("predicted" in name for name in added)
    margin = [report.errors[f"pgd20_margin_{n}_pixel"] for n in (1, 2, 4, 8, 16)]
    assert margin == sorted(margin)
    assert report.errors["clean"] <= margin[0]


def test_transport_in_pixels_of_displacement():
    """From few errors to most: each image is moved further only until it falls."""
    model, images, labels = case(count=60)
    report = evaluate(model, images, labels, generator=seeded(0))
    metric = Wasserstein(PixelGraph.grid(8, 8, radius=2), scale="pixels")
    attacks = {f"wasserstein20_{e:g}_shift_r2": WassersteinPGD(metric, e, 20, "margin", units="shift") for e in suites.SHIFTS}
    fallen = model(images).argmax(1) != labels
    for name, attack in attacks.items():
        fallen = fallen | (model(attack(model, images, labels)).argmax(1) != labels)
        assert torch.equal(report.fooled[name], fallen)
    errors = [report.errors[name] for name in attacks]
    assert errors[0] < report.errors["clean"] + 5
    assert errors[-1] > 90
    points = [point for point in report.curve if point.units == "pixels of displacement, radius 2"]
    assert [point.error for point in points] == pytest.approx(errors)
    assert points[2].words == "0.02 pixels of displacement, radius 2"


def test_transport_along_other_graphs_is_another_ball():
    plain = PixelGraph.grid(8, 8, radius=2)
    metrics = [
        Wasserstein(plain),
        Wasserstein(plain, scale="pixels"),
        Wasserstein(plain, mass=0.1),
        Wasserstein(plain, uniform=True),
    ]
    metrics += [Wasserstein(PixelGraph.grid(8, 8, 2, "disk")), Wasserstein(PixelGraph.grid(8, 8, 3))]
    attacks = [WassersteinPGD(metric, 0.5, 2) for metric in metrics]
    attacks.append(WassersteinPGD(metrics[1], 0.5, 2, units="shift"))
    assert len({suites.ball_of(attack) for attack in attacks}) == len(attacks)
    assert suites.ball_of(attacks[0]) == (0.5, "unit scale, radius 2", "wasserstein")


def test_descriptions_tell_edges_and_channels_apart():
    path, star = (torch.stack([start, torch.arange(1, 4)], 1) for start in (torch.arange(3), torch.zeros(3, dtype=torch.int64)))
    between = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for metrics in (
        [Wasserstein(PixelGraph.from_edges(4, edges)) for edges in (path, star)],
        [Wasserstein(PixelGraph.grid(4, 4, 1), channels=weight * between) for weight in (1.0, 2.0)],
    ):
        one, other = (WassersteinPGD(metric, 0.3, 2) for metric in metrics)
        assert repr(one) == repr(other)
        assert suites.description_of(one) != suites.description_of(other)


@pytest.mark.parametrize("kind", ["weights", "reference"])
def test_metrics_with_other_tensors_are_other_balls(kind):
    grid = partial(PixelGraph.grid, 8, 8, radius=1)
    if kind == "weights":
        metrics = [Wasserstein(grid(weight=torch.tensor([first, 1.0, 1.0, 1.0]))) for first in (1.0, 50.0)]
    else:
        metrics = [Wasserstein(grid(), reference=torch.full((1, 8, 8), value)) for value in (0.2, 0.9)]
    assert repr(metrics[0]) == repr(metrics[1])
    small, large, other = (
        WassersteinPGD(metrics[0], 0.3, 2),
        WassersteinPGD(metrics[1], 0.6, 2),
        WassersteinPGD(metrics[0], 0.6, 2),
    )
    assert suites.ball_of(large)[1] != suites.ball_of(other)[1]
    measured = partial(evaluate, *case(count=60), seed=0)
    memory = {}
    alone = measured(suite={"large": large}, memory=memory)
    assert torch.equal(measured(suite={"small": small, "large": large}).fooled["large"], alone.fooled["large"])
    assert measured(suite={"large": other}, memory=memory).errors == measured(suite={"large": other}).errors


@pytest.mark.parametrize("suite", ["standard", "full"])
def test_images_of_one_pixel_have_all_rows_but_those_that_move_mass(suite, short_autoattack):
    torch.manual_seed(0)
    model, images, labels = nn.Sequential(nn.Flatten(), nn.Linear(3, 4)), torch.rand(20, 3, 1, 1), torch.randint(4, (20,))
    wider = ["clean", *suites.perturbations(suite, (1, 2), False)]
    report = evaluate(model, images, labels, suite, seed=0, autoattack_images=4)
    assert list(report.errors) == [name for name in wider if "wasserstein" not in name]
    assert len(report.errors) < len(wider)
    assert report.flips == {}


@pytest.mark.slow
def test_full_suite(short_autoattack):
    model, images, labels = case(count=12)
    report = evaluate(model, images, labels, "full", generator=seeded(0))
    assert report.errors["autoattack_8_pixel"] >= report.errors["ifgsm20_8_pixel"]
    corruptions = [name for name in report.errors if name.startswith("corruption_")]
    assert len(corruptions) == 30
    assert "version='standard'" in next(e.description for e in report.entries if e.name == "autoattack_8_pixel")


def test_a_random_model_gets_the_random_autoattack():
    assert "version='rand'" in repr(suites.perturbations("full", (8, 8), True, random=True)["autoattack_8_pixel"])


def test_json_and_markdown_say_the_same():
    model, images, labels = case()
    report = evaluate(model, images, labels, "paper", generator=seeded(3))
    data = json.loads(report.to_json())
    assert "\n" not in report.to_json(None)
    with pytest.raises(ValueError, match=r"indent must be one of None, 0, .*; got 'wide'"):
        report.to_json("wide")
    assert data["errors"] == report.errors
    assert data["intervals"]["clean"] == list(report.intervals["clean"])
    assert data["verdict"] == report.verdict
    assert data["std"] == pytest.approx([0.38])
    assert {"name", "error", "low", "high", "images", "epsilon", "units", "norm", "description"} <= set(data["entries"][1])
    assert data["entries"][1]["epsilon"] == 8 / 255
    page = report.to_markdown()
    for entry in report.entries:
        assert f"| {entry.name} | {entry.error:.1f} | {entry.low:.1f} to {entry.high:.1f} | 120 |" in page
    assert report.verdict in page
    assert "horizontal, reach 4" in page
    assert report.verdict in repr(report)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda model: model, RandomOutput], ids=["fixed", "random"])
def test_reproducible_from_the_seed(wrap):
    """Also for a model that draws random numbers, and whatever the global random state is."""
    model, images, labels = case(count=40)
    reports = []
    for seed, global_seed in ((5, 1), (5, 2), (6, 1)):
        torch.manual_seed(global_seed)
        reports.append(evaluate(wrap(model), images, labels, "quick", generator=seeded(seed)))
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def test_without_a_generator_the_global_seed_decides():
    model, images, labels = case(count=20)
    reports = []
    for global_seed in (9, 9, 8):
        torch.manual_seed(global_seed)
        reports.append(evaluate(model, images, labels, "quick"))
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def test_the_order_of_the_images_does_not_decide_who_is_chosen_first():
    """Images sorted by class: the 200 of the quick suite still come from all classes."""
    _, _, images, labels = digits()
    order = labels.argsort()
    report = evaluate(trained(), images[order], labels[order], "quick", generator=seeded(0))
    assert report.entries[0].images == 200
    chosen = measurement.Measurement(trained(), images[order], labels[order], report.seed).labels[:200]
    assert len(chosen.unique()) == 10


def test_the_model_comes_back_as_it_was():
    model, (_, images, labels) = noisy_model(), case(count=20)
    before = snapshot(model)
    report = evaluate(model, images, labels, "quick")
    assert_same(before, snapshot(model))
    model.eval()
    wrong = (model(images).argmax(1) != labels).float().mean().item()
    assert report.errors["clean"] == pytest.approx(100 * wrong)  # measured in eval mode


def test_the_model_comes_back_as_it_was_after_an_exception():
    model, (_, images, labels) = noisy_model(), case(count=20)
    before = snapshot(model)

    def interrupt(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, images, labels, "quick", progress=interrupt)
    assert_same(before, snapshot(model))


def at_most(count):
    """For a device that holds so many images."""

    def look(x):
        if len(x) > count:
            raise torch.OutOfMemoryError("too many")
        return x

    return look


def test_progress():
    model, images, labels = case(count=20)
    calls = []
    evaluate(model, images, labels, "quick", progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert done == tuple(range(len(calls)))
    assert set(totals) == {len(calls) - 1}
    assert names[0] == "clean"
    assert names[-1] == "done"


def test_progress_goes_on_between_the_batches_of_a_measure():
    model, images, labels = case(count=20)
    calls = []
    evaluate(model, images, labels, "quick", progress=lambda *call: calls.append(call))
    expected = [call for call in calls if call[2] not in ("masking", "done")]
    calls.clear()

    small = Around(model, at_most(12))
    evaluate(small, images, labels, "quick", progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {expected[0][1]}
    for number, total, name in expected:
        assert calls.count((number, total, name)) == 1
        assert [calls.count((number, total, f"{name}, {seen} of 20 images")) for seen in (8, 16)] == [1, 1]
    assert names.count("masking") == names.count("done") == 1


@pytest.mark.slow
def test_batches_that_do_not_fit_are_halved():
    model, images, labels = case(count=30)
    expected = evaluate(model, images, labels, "quick", generator=seeded(0)).errors
    assert evaluate(Around(model, at_most(7)), images, labels, "quick", generator=seeded(0)).errors == expected
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(Never(), images, labels, "quick")


class Never(nn.Module):
    def forward(self, x):
        raise torch.OutOfMemoryError("not even one")


def bad(change):
    model, images, labels = case(count=10)
    parts = {"model": model, "images": images, "labels": labels}
    return parts | change(parts)


class NotANumber(nn.Module):
    def forward(self, x):
        return torch.full((len(x), 10), float("nan")) + 0 * x.sum()


class Answers(nn.Module):
    def forward(self, x):
        return x.flatten(1).argmax(1)


BAD = {
    "nan logits": (lambda p: {"model": NotANumber()}, r"the model's outputs must be finite; got nan \(100 of 100 values\)"),
    "label too large": (lambda p: {"labels": p["labels"] + 9}, "labels must be class indices from 0 to 9.*got .* to 18"),
    "negative label": (lambda p: {"labels": p["labels"] - 5}, "labels must be class indices from 0 to 9.*got -[45] to"),
    "float labels": (lambda p: {"labels": p["labels"].float()}, r"shape \(10,\), one class index per image \(int64\); got"),
    "int32 labels": (lambda p: {"labels": p["labels"].int()}, r"convert with \.long\(\)"),
    "too few labels": (lambda p: {"labels": p["labels"][:5]}, r"got \(5,\) of torch.int64"),
    "a class in each row": (
        lambda p: {"labels": nn.functional.one_hot(p["labels"], 10)},
        r"got \(10, 10\) of torch.int64; pick one class of each row, \.argmax\(1\)",
    ),
    "labels from 1": (lambda p: {"labels": p["labels"] + 1}, "got .* to 10; count classes from 0, or give the model more"),
    "a class": (lambda p: {"model": nn.Linear}, r"got the class Linear itself; make one: Linear\(\.\.\.\)"),
    "answers": (lambda p: {"model": Answers()}, r"got \(10,\); return the scores themselves, without argmax"),
    "labels as a list": (lambda p: {"labels": p["labels"].tolist()}, "labels must be an integer tensor.*got list"),
    "another device": (
        lambda p: {"model": copy.deepcopy(p["model"]).to("meta")},
        "the model is on meta and the images are on cpu",
    ),
    "labels elsewhere": (
        lambda p: {"labels": p["labels"].to("meta")},
        "labels must be on the device of the images, cpu; got meta",
    ),
    "empty batch": (lambda p: {"images": p["images"][:0], "labels": p["labels"][:0]}, "must hold at least one image"),
    "no batch": (lambda p: {"images": p["images"][0]}, "\\[None\\] for a single image"),
    "8-bit images": (lambda p: {"images": (255 * p["images"]).byte()}, "divide 8-bit images by 255"),
    "images beyond 1": (lambda p: {"images": 2 * p["images"]}, r"must be in \[0, 1\]; got a maximum of 2"),
    "normalized images": (lambda p: {"images": p["images"] - 0.5}, r"wassersmooth\.Normalized"),
    "one output": (
        lambda p: {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 1))},
        r"shape \(10, classes >= 2\).*got \(10, 1\)",
    ),
    "no scores": (lambda p: {"model": nn.Identity()}, r"one row per image; got \(10, 1, 8, 8\)"),
}


@pytest.mark.parametrize("call", ["attack", "evaluate"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_meets_one_clear_error(kind, call):
    change, message = BAD[kind]
    parts = bad(change)
    ask = FGSM(8 / 255) if call == "attack" else evaluate
    with pytest.raises(ValueError, match=message):
        ask(**parts)


def test_an_unknown_suite_is_refused():
    with pytest.raises(ValueError, match=r"suite must be one of 'quick', 'paper', .*'full'; got 'best'"):
        evaluate(**bad(lambda p: {}), suite="best")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FGSM(-0.1), "epsilon must be a finite number of at least 0"),
        (lambda: FGSM(float("nan")), "epsilon must be a finite number"),
        (lambda: FGSM(0.1, units="levels"), "units must be one of 'pixel', 'normalized'; got 'levels'"),
        (lambda: IFGSM(0.1, 0.1, 0), "iterations must be an integer of at least 1"),
        (lambda: IFGSM(0.1, "0.1", 1), "step must be a finite number"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_normalized_wrapper_is_the_only_thing_asked_of_a_model():
    """No parameters, no buffers of its own, any nn.Module."""

    class Fixed(nn.Module):
        def forward(self, x):
            total = x.flatten(1).sum(1)
            return torch.stack((total, 5 - total), 1)

    images = torch.rand(10, 1, 4, 4)
    report = evaluate(Normalized(Fixed(), 0.5, 0.5), images, torch.zeros(10, dtype=torch.int64), "paper")
    assert set(report.errors) == set(PAPER)


def test_a_model_for_other_images_is_named_before_any_work():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    with pytest.raises(
        ValueError, match=r"cannot process images of 1 x 9 x 9 \(mat1 and mat2 .*; convert them to the channels"
    ):
        evaluate(model, torch.rand(4, 1, 9, 9), torch.zeros(4, dtype=torch.long), suite="quick")
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 36, 3))
    with pytest.raises(
        ValueError, match=r"images of 8 x 8 x 3 .* made for \(channels come first: .permute\(0, 3, 1, 2\)\), or"
    ):
        evaluate(convolution, torch.rand(4, 8, 8, 3), torch.zeros(4, dtype=torch.long), suite="quick")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_told_what_to_do(precision):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).to(precision)
    with pytest.raises(ValueError, match=rf"buffers in {precision} .* use model.float\(\), or a cast inside its forward"):
        evaluate(model, torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), suite="quick")


@pytest.mark.parametrize(("count", "verdict"), [(19, "too few images to tell masked gradients"), (20, "no sign of masking")])
def test_a_handful_of_images_gives_no_verdict(count, verdict):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    labels = torch.zeros(count, dtype=torch.long)
    assert evaluate(model, torch.rand(count, 1, 4, 4), labels, suite="quick", seed=0).verdict == verdict


def test_what_is_rarely_given_is_given_by_name():
    _, images, labels = bad(lambda p: {}).values()
    with pytest.raises(TypeError, match="positional"):
        evaluate(trained(), images, labels, "quick", None, None, 10)


def test_options_are_told_to_type_checkers_from_one_list():
    """The dictionaries that options are looked up in have the same names."""
    assert tuple(PARAMETERS) == get_args(Corruption)
    assert tuple(suites.LIMITS) == suites.SUITES == get_args(suites.SuiteName)


def test_progress_has_to_be_a_function():
    model, images, labels = case(count=5)
    with pytest.raises(ValueError, match=r"progress must be a function of \(done, total, name\), such as print; got bool"):
        evaluate(model, images, labels, "quick", progress=True)


def test_a_progress_that_draws_changes_nothing():
    inner, images, labels = case(count=200)  # more than a batch
    model = Around(inner, lambda x: x + 0.3 * torch.randn_like(x))
    quiet = evaluate(model, images, labels, "quick", seed=1)
    assert evaluate(model, images, labels, "quick", seed=1, progress=lambda *call: torch.rand(3)) == quiet


def test_nothing_of_an_evaluation_stays(monkeypatch):
    kept = []

    class Watched(evaluation.Measurement):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(evaluation, "Measurement", Watched)
    model, images, labels = case(count=20)
    gc.collect()
    gc.disable()
    try:
        evaluate(model, images, labels, "quick")
        assert kept[0]() is None  # at once, on a device that others wait for
    finally:
        gc.enable()


def test_running_out_of_memory_elsewhere_is_not_taken_for_a_batch_that_does_not_fit():
    model, images, labels = case(count=300)
    calls = []

    def full(done, total, name):
        calls.append(name)
        if "images" in name:
            raise torch.OutOfMemoryError("somebody else")

    with pytest.raises(torch.OutOfMemoryError, match="somebody else"):
        evaluate(model, images, labels, "standard", progress=full)
    assert calls == ["clean", "clean, 128 of 300 images"]
