"""FGSM, I-FGSM, PGD, multi-targeted PGD and Square: their constraints, their success, and agreement with foolbox."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import foolbox
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.robustness.attack_table import ALL, L2, LINF, METRIC, NORMALIZED
from tests.robustness.small_models import AutocastInside, digits, trained
from wassersmooth.normalized import Normalized
from wassersmooth.robustness.attacks import (
    FGSM,
    IFGSM,
    PGD,
    Attack,
    AutoAttack,
    MultiTargetedPGD,
    Square,
    WassersteinFGSM,
    WassersteinPGD,
)
from wassersmooth.robustness.model_queries import input_gradient, loss_per_image, scores
from wassersmooth.robustness.suites import description_of, perturbations


def case(device="cpu", dtype=torch.float32, count=40, eta_sq=0.0):
    _, _, images, labels = digits()
    model = copy.deepcopy(trained(eta_sq)).to(device=device, dtype=dtype)
    return model, images[:count].to(device, dtype), labels[:count].to(device)


def errors(model, images, labels):
    return (model(images).argmax(1) != labels).float().mean().item()


@pytest.mark.parametrize("attack", LINF, ids=repr)
def test_stays_in_the_box_and_the_ball(attack, device, seeded):
    model, images, labels = case(device)
    attacked = attack(model, images, labels, seeded(0))
    assert attacked.shape == images.shape
    assert attacked.dtype == images.dtype
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert (attacked - images).abs().max() <= attack.epsilon + 1e-7
    assert (attacked - images).abs().max() >= 0.99 * attack.epsilon  # and uses all of epsilon


@pytest.mark.parametrize("attack", L2, ids=repr)
def test_stays_in_the_l2_ball(attack, device, seeded):
    model, images, labels = case(device)
    attacked = attack(model, images, labels, seeded(0))
    length = (attacked - images).flatten(1).norm(dim=1)
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert length.max() <= attack.epsilon * (1 + 1e-5)
    assert length.max() >= 0.9 * attack.epsilon


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_raises_the_error(attack, device, seeded):
    model, images, labels = case(device)
    attacked = attack(model, images, labels, seeded(0))
    assert errors(model, attacked, labels) > errors(model, images, labels) + 0.05
    if not isinstance(attack, Square):  # which lowers the margin
        assert F.cross_entropy(model(attacked), labels) > F.cross_entropy(model(images), labels)


@pytest.mark.parametrize("attack", [a for a in ALL if not isinstance(a, MultiTargetedPGD)], ids=repr)
def test_targeted_attacks_reach_their_target(attack, device, seeded):
    model, images, labels = case(device)
    wanted = (labels + 1) % 10
    attacked = replace(attack, targeted=True)(model, images, wanted, seeded(0))
    assert F.cross_entropy(model(attacked), wanted) < 0.9 * F.cross_entropy(model(images), wanted)
    assert (model(attacked).argmax(1) == wanted).sum() >= (model(images).argmax(1) == wanted).sum()
    assert "targeted=True" in repr(replace(attack, targeted=True))


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_epsilon_zero_changes_nothing(attack, seeded):
    model, images, labels = case()
    assert torch.equal(replace(attack, epsilon=0.0)(model, images, labels, seeded(0)), images)


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_the_seed_determines_the_attack(attack, device, seeded):
    model, images, labels = case(device)
    first, again, other = (attack(model, images, labels, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    random = isinstance(attack, Square | MultiTargetedPGD) or getattr(attack, "random_start", False)
    assert torch.equal(first, other) != random


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_attacks_are_values(attack):
    assert copy.deepcopy(attack) == attack == pickle.loads(pickle.dumps(attack))
    assert hash(attack) == hash(copy.deepcopy(attack))
    with pytest.raises(FrozenInstanceError):
        attack.epsilon = 1.0


def test_repr_is_what_a_user_writes():
    assert repr(FGSM(8 / 255)) == "FGSM(epsilon=8/255, units='pixel')"
    assert repr(IFGSM(8 / 255, 2 / 255, 20, "normalized")) == (
        "IFGSM(epsilon=8/255, step=2/255, iterations=20, units='normalized')"
    )
    assert repr(PGD(25 / 255, 6.25 / 255, 20)).startswith("PGD(epsilon=25/255, step=6.25/255, iterations=20, norm='linf'")
    assert repr(PGD(0.5, 0.1, 20, norm="l2")).startswith("PGD(epsilon=0.5, step=0.1, ")
    assert repr(FGSM(1.0)) == "FGSM(epsilon=1, units='pixel')"
    assert repr(FGSM(0.0)) == "FGSM(epsilon=0, units='pixel')"


@pytest.mark.parametrize("units", ["pixel", "normalized"])
def test_fgsm_is_ifgsm_with_one_step(units):
    model, images, labels = case()
    one_step = IFGSM(8 / 255, 8 / 255, 1, units)(model, images, labels)
    assert torch.equal(FGSM(8 / 255, units)(model, images, labels), one_step)


FOOLBOX = {
    "fgsm": (FGSM(20 / 255), foolbox.attacks.LinfFastGradientAttack(random_start=False)),
    "ifgsm": (
        IFGSM(20 / 255, 4 / 255, 8),
        foolbox.attacks.LinfBasicIterativeAttack(abs_stepsize=4 / 255, steps=8, random_start=False),
    ),
    "pgd": (
        PGD(20 / 255, 4 / 255, 8, random_start=False),
        foolbox.attacks.LinfProjectedGradientDescentAttack(abs_stepsize=4 / 255, steps=8, random_start=False),
    ),
    "l2": (
        PGD(0.8, 0.2, 8, norm="l2", random_start=False),
        foolbox.attacks.L2ProjectedGradientDescentAttack(abs_stepsize=0.2, steps=8, random_start=False),
    ),
}


# foolbox's FGSM has no targeted form
@pytest.mark.parametrize(("name", "targeted"), [(n, t) for n in FOOLBOX for t in (False, True) if (n, t) != ("fgsm", True)])
def test_agrees_with_foolbox(name, targeted, device):
    ours, theirs = FOOLBOX[name]
    model, images, labels = case(device, torch.float64)
    goal = (labels + 1) % 10 if targeted else labels
    criterion = foolbox.criteria.TargetedMisclassification(goal) if targeted else foolbox.criteria.Misclassification(goal)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=device)
    expected, _, _ = theirs(wrapped, images, criterion, epsilons=ours.epsilon)
    torch.testing.assert_close(replace(ours, targeted=targeted)(model, images, goal), expected, rtol=0, atol=1e-9)


def test_normalized_units_are_measured_behind_the_normalization():
    """The paper's protocol, by hand: normalize, attack the inner model with epsilon in normalized units, never clip."""
    mean, std = [0.2, 0.4, 0.5], [0.1, 0.25, 0.5]
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Flatten(), nn.Linear(3 * 25, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model = Normalized(inside, mean, std)
    images, labels = torch.rand(6, 3, 5, 5, dtype=torch.float64), torch.arange(6) % 4
    z0 = (images - model.mean) / model.std
    z = z0.clone()
    for _ in range(4):
        z.requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(inside(z), labels, reduction="sum"), z)
        z = (z + 0.1 * g.sign()).clamp(z0 - 0.25, z0 + 0.25).detach()
    attacked = IFGSM(0.25, 0.1, 4, "normalized")(model, images, labels)
    torch.testing.assert_close(attacked, z * model.std + model.mean, rtol=0, atol=1e-7)
    change = (attacked - images).abs().amax((0, 2, 3))
    torch.testing.assert_close(change, 0.25 * torch.tensor(std, dtype=torch.float64), rtol=1e-6, atol=0)
    assert attacked.max() > 1  # not clipped


@pytest.mark.parametrize("attack", NORMALIZED, ids=repr)
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager"), nn.Sequential])
def test_the_normalization_is_found_inside_wrappers(attack, wrap):
    model, images, labels = case("cuda" if torch.cuda.is_available() else "cpu")  # DataParallel moves the model to CUDA
    expected = attack(model, images, labels)
    torch.testing.assert_close(attack(wrap(model), images, labels), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attack", NORMALIZED, ids=repr)
def test_normalized_units_need_a_normalization_in_the_model(attack):
    model, images, labels = case()
    with pytest.raises(ValueError, match=r"wassersmooth\.Normalized\(model, mean, std\), or use units='pixel'"):
        attack(model.model, images, labels)


class Ensemble(nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x):
        return torch.stack([model(x) for model in self.models]).mean(0)


@pytest.mark.parametrize("attack", NORMALIZED, ids=repr)
def test_normalizations_that_differ_have_no_common_units(attack):
    model, images, labels = case()
    alike = Ensemble(model, Normalized(model.model, 0.5, 0.38))
    attack(alike, images, labels)
    with pytest.raises(ValueError, match=r"one std for the whole model; got several .*, 0\.38 and 0\.5; use units='pixel'"):
        attack(Ensemble(model, Normalized(model.model, 0.3, 0.5)), images, labels)


# Half precision ------------------------------------------------------------------------------------------------------

CONFIDENT = 3.0  # factor of the scores, with which gradients of the cross-entropy underflow in float16 but not in float32


@pytest.mark.parametrize("kind", ["autocast", "autocast, float32 outputs", "autocast inside", "half"])
def test_float16_does_not_weaken_an_attack(kind):
    model, images, labels = case(count=100)
    confident = nn.Sequential(model, Scale(CONFIDENT))
    attack = IFGSM(40 / 255, 10 / 255, 5)
    expected = errors(confident, attack(confident, images, labels), labels)
    if kind == "half":
        half = nn.Sequential(Cast(torch.float16), copy.deepcopy(confident).half())
        attacked = attack(half, images, labels)
    elif kind == "autocast inside":
        attacked = attack(AutocastInside(confident), images, labels)
    else:
        half = nn.Sequential(confident, Cast(torch.float32)) if "outputs" in kind else confident
        with torch.autocast("cpu", dtype=torch.float16):
            attacked = attack(half, images, labels)
    assert attacked.dtype == images.dtype
    assert abs(errors(confident, attacked, labels) - expected) <= 0.03


@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, "bfloat16 inside"])
def test_without_float16_the_gradient_keeps_its_scale(dtype, loss):
    model, images, labels = case(count=20)
    if dtype == "bfloat16 inside":
        model = AutocastInside(model, torch.bfloat16)
    model.train()  # batch-norm couples the images: another scale for each of them would be another gradient
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        if dtype == torch.float64:
            model, images = model.double(), images.double()
        x = images.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss_per_image(model(x), labels, loss).sum(), x)
        assert torch.equal(input_gradient(model, images, labels, loss), expected)


def test_a_saturated_softmax_has_no_gradient_in_float16_either():
    model, images, labels = case(count=100)
    saturated = nn.Sequential(model, Scale(1e3))
    right = saturated(images).argmax(1) == labels
    with torch.autocast("cpu", dtype=torch.float16):
        g = input_gradient(saturated, images[right], labels[right], "cross_entropy")
        largest = input_gradient(saturated, images[right], labels[right], "margin").flatten(1).abs().amax(1)
    assert (g == 0).flatten(1).all(1).float().mean() > 0.8
    assert (largest > 0).all()


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


# Unusual models and arguments ----------------------------------------------------------------------------------------


class Gray(nn.Module):
    """The sum over colors first: its gradient is one tensor expanded to all of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x):
        return self.linear(x.sum(1, keepdim=True).flatten(1))


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("attack", [a for a in ALL if a not in NORMALIZED], ids=repr)
def test_a_gradient_that_shares_memory(attack, targeted, seeded):
    if targeted and isinstance(attack, MultiTargetedPGD):
        pytest.skip("it chooses its targets itself")
    torch.manual_seed(0)
    model, images, labels = Gray(), 0.2 + 0.6 * torch.rand(3, 3, 8, 8), torch.arange(3)
    attacked = replace(attack, targeted=targeted)(model, images, labels, torch.Generator().manual_seed(0))
    before, after = (F.cross_entropy(model(x), labels) for x in (images, attacked))
    assert (after < before) if targeted else (after > before)


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_pixels_a_rounding_step_above_1_are_clamped(attack):
    """Antialiased resizing of a white image gives 1 + 2.4e-7."""
    model, images, labels = case(count=10)
    images[:, :, :2] = 1.0
    above = images + 2.4e-7 * (images == 1)
    assert above.max() > 1
    expected, actual = (attack(model, x, labels, torch.Generator().manual_seed(0)) for x in (images, above))
    assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]; got a maximum of 1\.002"):
        attack(model, images + 2e-3 * (images == 1), labels)
    with pytest.raises(ValueError, match="got a minimum of -1e-07"):
        attack(model, images - 1e-7, labels)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numpy_numbers_are_accepted(kind):
    model, images, labels = case(count=4)
    for make in (
        lambda number, whole: FGSM(number(8 / 255)),
        lambda number, whole: IFGSM(number(8 / 255), number(2 / 255), whole(3)),
        lambda number, whole: PGD(number(8 / 255), number(2 / 255), whole(3), restarts=whole(2)),
        lambda number, whole: Square(number(8 / 255), whole(3), number(0.5)),
        lambda number, whole: AutoAttack(number(8 / 255)),
        lambda number, whole: WassersteinFGSM(METRIC, number(0.5)),
        lambda number, whole: WassersteinPGD(METRIC, number(0.5), whole(3)),
    ):
        attack = make(kind, np.int64)
        assert repr(attack) == repr(make(lambda number: float(kind(number)), int))
        assert type(attack.epsilon) is float
        assert isinstance(attack, AutoAttack) or attack(model, images, labels).shape == images.shape
    for make in (lambda: FGSM(kind(-1)), lambda: FGSM(kind("nan")), lambda: FGSM(np.bool_(True))):
        with pytest.raises(ValueError, match="epsilon must be a finite number of at least 0"):
            make()
    with pytest.raises(ValueError, match="iterations must be an integer of at least 1"):
        IFGSM(0.1, 0.1, kind(3))


def test_restarts_only_help():
    model, images, labels = case(count=200)
    found = []
    for restarts in (1, 8):
        attack = PGD(25 / 255, 10 / 255, 2, restarts=restarts)
        found.append(errors(model, attack(model, images, labels, torch.Generator().manual_seed(0)), labels))
    assert found[1] > found[0]


def test_restarts_prefer_success_to_loss():
    """Bright images are classified right with a large loss, dark ones wrong with a small one."""

    class Undecided(nn.Module):
        def forward(self, x):
            scores = torch.zeros(len(x), 10)
            bright = x.detach().mean((1, 2, 3)) > 0.5
            scores[bright, 0] = 0.1  # class 0 by a little, loss about 2.2
            scores[~bright, 0], scores[~bright, 1] = 5.0, 5.1  # class 1 by a little, loss about 0.75
            return scores

    images, labels = torch.full((50, 1, 4, 4), 0.5), torch.zeros(50, dtype=torch.int64)
    attack = PGD(0.1, 0.1, 1, restarts=20)
    attacked = attack(Undecided(), images, labels, torch.Generator().manual_seed(0))
    assert (Undecided()(attacked).argmax(1) == 1).all()
    first = replace(attack, restarts=1)(Undecided(), images, labels, torch.Generator().manual_seed(0))
    assert (Undecided()(first).argmax(1) == 0).any()


def test_the_random_start_fills_the_ball():
    """Without a gradient the attack ends where it started: uniform in [-eps, eps], and in the L2 ball."""
    blind = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    nn.init.zeros_(blind[1].weight)
    images, labels = torch.full((4000, 1, 8, 8), 0.5), torch.zeros(4000, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    change = (PGD(0.1, 0.1, 1)(blind, images, labels, generator) - images) / 0.1
    assert change.abs().max() <= 1 + 1e-5
    assert abs(change.std().item() - 3**-0.5) < 0.01
    length = (PGD(0.1, 0.1, 1, norm="l2")(blind, images, labels, generator) - images).flatten(1).norm(dim=1) / 0.1
    assert length.max() <= 1 + 1e-5
    assert abs((length**64).mean().item() - 0.5) < 0.03  # the share of the ball's volume within that length is uniform


def test_margin_loss_survives_a_saturated_softmax():
    model, images, labels = case(count=100)
    saturated = nn.Sequential(model, Scale(1e4))
    settings = {"epsilon": 40 / 255, "step": 10 / 255, "iterations": 5, "random_start": False}
    by_entropy = PGD(**settings)(saturated, images, labels)
    by_margin = PGD(**settings, loss="margin")(saturated, images, labels)
    assert errors(saturated, by_margin, labels) > errors(saturated, by_entropy, labels) + 0.3


def test_a_nan_gradient_does_not_change_the_image():
    class Root(nn.Module):
        def forward(self, x):
            return torch.stack((x.flatten(1).sum(1).abs().sqrt(), x.flatten(1).sum(1)), 1)

    images = torch.zeros(2, 1, 3, 3)
    images[1] = 0.5
    for attack in (FGSM(0.1), PGD(0.1, 0.1, 2, norm="l2", random_start=False)):
        attacked = attack(Root(), images, torch.ones(2, dtype=torch.int64))
        assert torch.equal(attacked[0], images[0])
        assert not torch.equal(attacked[1], images[1])


def test_square_uses_no_gradient_and_stops_at_fooled_images():
    class NoGradient(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.queries = model, 0

        def forward(self, x):
            self.queries += len(x)
            return self.model(x.detach())

    model, images, labels = case()
    counted = NoGradient(model)
    attacked = Square(64 / 255, queries=50)(counted, images, labels, torch.Generator().manual_seed(0))
    assert errors(model, attacked, labels) > 0.5
    assert counted.queries < 0.9 * 51 * len(images)


@pytest.mark.parametrize(
    "make",
    [
        FGSM,
        lambda epsilon: IFGSM(epsilon, 0.1, 5),
        lambda epsilon: PGD(epsilon, 0.1, 5),
        Square,
        AutoAttack,
        lambda epsilon: AutoAttack(epsilon, version="rand"),
    ],
)
def test_gray_levels_are_refused_by_every_attack_in_linf(make):
    with pytest.raises(ValueError, match="epsilon must be at most 1 in pixel units; got 8; write 8/255 for gray levels"):
        make(8)
    make(1.0)


def test_other_balls_may_be_larger():
    for attack in (PGD(8, 0.1, 5, norm="l2"), AutoAttack(8, norm="l2"), FGSM(8, "normalized")):
        assert attack.epsilon == 8


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_the_public_names():
    from wassersmooth.robustness import attacks

    for name in ("FGSM", "IFGSM", "PGD", "WassersteinFGSM", "WassersteinPGD", "AutoAttack", "Square"):
        assert issubclass(getattr(attacks, name), Attack)


@pytest.mark.parametrize("epsilon", [0.0123456789, 1 / 3, 8 / 255, 0.8 / 255, 8 * (1 / 255), 0.1 + 0.2, 2**-30, 1e-5, 0.2, 1.0])
def test_two_attacks_with_one_repr_are_equal(epsilon):
    """Results are stored under the repr, so a number must read back as exactly itself."""
    read = eval(repr(FGSM(epsilon)))
    assert read == FGSM(epsilon)
    assert read.epsilon == epsilon


def test_the_reprs_of_stored_results_do_not_change():
    stored = {
        "fgsm_25_normalized": "FGSM(epsilon=25/255, units='normalized')",
        "ifgsm20_8_pixel": "IFGSM(epsilon=8/255, step=2/255, iterations=20, units='pixel')",
        "pgd20_margin_1_pixel": (
            "PGD(epsilon=1/255, step=0.25/255, iterations=20, norm='linf', random_start=True, restarts=1, loss='margin')"
        ),
        "pgd20_l2_0.5_pixel": (
            "PGD(epsilon=0.5, step=0.1, iterations=20, norm='l2', random_start=True, restarts=1, loss='margin')"
        ),
        "wasserstein20_0.5_unit_r2": (
            "WassersteinPGD(metric=Wasserstein(PixelGraph.grid(32, 32, radius=2, neighborhood='square', weight='constant'), "
            "scale='unit', mass=0, uniform=False), epsilon=0.5, iterations=20, loss='margin')"
        ),
        "autoattack_2_pixel": "AutoAttack(epsilon=2/255, norm='linf', version='standard')",
    }
    suite = perturbations("full", (32, 32), normalized=True)
    found = {name: description_of(perturb) for name, perturb in suite.items()}
    assert {name: found[name] for name in stored} == stored
    assert repr(Square(8 / 255)) == "Square(epsilon=8/255, queries=1000, start_share=0.8)"


def test_attacks_that_would_not_move_are_refused():
    for make in (IFGSM, PGD, MultiTargetedPGD):
        with pytest.raises(ValueError, match=r"step must be positive, .*; got 0 with epsilon=0\.1; try epsilon / 4$"):
            make(0.1, 0, 5)
        make(0, 0, 5)  # epsilon 0 is allowed, as the first of several sizes


@pytest.mark.parametrize("share", [0, 1.5, 2, 1000])
def test_squares_cover_a_share_of_the_pixels(share):
    with pytest.raises(ValueError, match=rf"start_share must be above 0 and at most 1, .*; got {share}$"):
        Square(0.1, start_share=share)
    Square(0.1, start_share=1)


class Decoy(torch.nn.Module):
    """Class 1 has the largest wrong score but never overtakes class 0; class 2 has a small one, and can."""

    def forward(self, images):
        near, far = images[:, 0, 0, 0], images[:, 0, 0, 1]
        zero = torch.zeros_like(near)
        return torch.stack([zero, 0.005 * torch.tanh(near - 0.5) - 0.01, 33 * (far - 0.5) - 1], 1)


def test_a_class_with_a_small_score_is_reached_by_a_targeted_attempt(device, seeded):
    images = torch.full((3, 1, 2, 2), 0.5, device=device)
    labels = torch.zeros(3, dtype=torch.long, device=device)
    budget = (8 / 255, 2 / 255, 10)
    nearest = PGD(*budget, loss="margin", random_start=False)(Decoy(), images, labels)
    assert bool((Decoy()(nearest).argmax(1) == 0).all()), "the margin alone follows the class that is ahead"
    every = MultiTargetedPGD(*budget)(Decoy(), images, labels, seeded(0))
    assert Decoy()(every).argmax(1).tolist() == [2, 2, 2]
    one = MultiTargetedPGD(*budget, targets=1)(Decoy(), images, labels, seeded(0))
    assert bool((Decoy()(one).argmax(1) == 0).all())


def test_several_targets_fool_all_that_the_margin_fools(device, seeded):
    model, images, labels = case(device)
    for levels in (8, 24, 48):
        budget = (levels / 255, levels / 4 / 255, 5)
        first = PGD(*budget, loss="margin")(model, images, labels, seeded(1))
        every = MultiTargetedPGD(*budget, targets=9)(model, images, labels, seeded(1))
        fooled = [scores(model, x).argmax(1) != labels for x in (first, every)]
        assert bool((fooled[1] | ~fooled[0]).all())
        assert torch.equal(first[fooled[0]], every[fooled[0]])
    with pytest.raises(ValueError, match="chooses its targets itself"):
        MultiTargetedPGD(0.1, 0.1, 1, targeted=True)
    with pytest.raises(ValueError, match="targets must be an integer of at least 1"):
        MultiTargetedPGD(0.1, 0.1, 1, targets=0)


# Predictions in place of labels, and attacks of a user's own ---------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda **k: FGSM(0.1, **k), lambda **k: IFGSM(0.1, 0.03, 4, **k), lambda **k: PGD(0.1, 0.03, 4, **k)]
)
def test_against_predictions_the_labels_do_not_matter(make, seeded):
    model, images, labels = case()
    predicted = model(images).argmax(1)
    attack = make(against="predictions")
    expected = make()(model, images, predicted, seeded(0))
    assert torch.equal(attack(model, images, (predicted + 1) % 10, seeded(0)), expected)
    assert torch.equal(attack(model, images, labels, seeded(0)), expected)
    assert repr(attack) == repr(make())[:-1] + ", against='predictions')"
    assert repr(attack) != repr(make())
    with pytest.raises(ValueError, match=r"a targeted attack aims for the labels; got against='predictions'"):
        make(against="predictions", targeted=True)
    with pytest.raises(ValueError, match="against must be one of 'labels', 'predictions'; got 'both'"):
        make(against="both")


def test_against_predictions_in_normalized_units():
    model, images, _ = case()
    predicted = model(images).argmax(1)
    attack = FGSM(8 / 255, "normalized", against="predictions")
    assert torch.equal(attack(model, images, 9 - predicted), FGSM(8 / 255, "normalized")(model, images, predicted))


def test_labels_must_still_fit_the_model():
    model, images, labels = case()
    with pytest.raises(ValueError, match="labels must be class indices from 0 to 9"):
        FGSM(0.1, against="predictions")(model, images, labels + 5)


def test_a_loss_of_ones_own_is_raised(seeded):
    def margin(outputs, labels):
        return loss_per_image(outputs, labels, "margin")

    model, images, labels = case()
    for own, named in ((margin, "margin"), (nn.CrossEntropyLoss(reduction="none"), "cross_entropy")):
        attacks = [PGD(0.1, 0.03, 4, loss=loss, restarts=2) for loss in (own, named)]
        first, second = (attack(model, images, labels, seeded(0)) for attack in attacks)
        torch.testing.assert_close(first, second)
    assert "loss=test_a_loss_of_ones_own_is_raised.<locals>.margin" in repr(PGD(0.1, 0.03, 4, loss=margin))
    with pytest.raises(ValueError, match=r"loss must return one value per image, shape \(40,\); got shape \(\); use reduction"):
        PGD(0.1, 0.03, 4, loss=nn.CrossEntropyLoss())(model, images, labels)
    with pytest.raises(ValueError, match=r"loss must be differentiable in the outputs.*; got values without one, as after"):
        PGD(0.1, 0.03, 4, loss=lambda outputs, labels: (outputs.argmax(1) != labels).float())(model, images, labels)
    with pytest.raises(ValueError, match="loss must be one of 'cross_entropy', 'margin'; got 'hinge'"):
        PGD(0.1, 0.03, 4, loss="hinge")


def test_a_subclass_may_override_start_direction_and_projection(seeded):
    called = []

    class Own(PGD):
        def start(self, images, generator):
            called.append("start")
            return images

        def direction(self, gradient):
            called.append("direction")
            return gradient.sign() * (torch.arange(8) < 4)  # the left half only

        def project(self, x, images):
            called.append("project")
            return super().project(x, images).clamp(0.1, 0.9)

    model, images, labels = case()
    attacked = Own(0.1, 0.05, 3)(model, images, labels, seeded(0))
    assert called == ["start", *["direction", "project"] * 3]
    assert attacked.min() >= 0.1
    inside = (images >= 0.1) & (images <= 0.9)
    assert torch.equal((attacked - images)[..., 4:][inside[..., 4:]].abs().max(), torch.tensor(0.0))
    assert repr(Own(0.1, 0.05, 3)).startswith("Own(epsilon=0.1, step=0.05, iterations=3")
    Own.project = lambda self, x, images: x[:1]
    with pytest.raises(ValueError, match=r"project must return images of shape \(40, 1, 8, 8\); got \(1, 1, 8, 8\)"):
        Own(0.1, 0.05, 3)(model, images, labels, seeded(0))


def test_a_subclass_may_have_a_step_rule(seeded):
    """Steps that shrink, counted anew in every restart: a linear model's gradient has one sign, so all steps add up."""

    class Shrinking(PGD):
        def step_size(self, iteration):
            asked.append(iteration)
            return self.step / 2**iteration

    asked = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    images, labels = torch.full((3, 1, 8, 8), 0.5), torch.zeros(3, dtype=torch.long)
    attacked = Shrinking(0.4, 0.1, 3, random_start=False, loss="margin")(model, images, labels)
    assert torch.allclose((attacked - images).abs(), torch.tensor(0.1 + 0.05 + 0.025), atol=1e-6)
    Shrinking(0.4, 0.1, 3, restarts=2)(model, images, labels, seeded(0))
    assert asked == [0, 1, 2] * 3


def test_square_in_l2_is_shown_as_such():
    assert repr(Square(0.5, norm="l2")) == "Square(epsilon=0.5, queries=1000, start_share=0.8, norm='l2')"
    assert Square(8, norm="l2").epsilon == 8


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_ball_of_radius_zero_is_its_center(norm):
    images = torch.rand(2, 1, 2, 2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    nn.init.zeros_(model[1].weight)  # no gradient: the images do not move at all
    attacked = PGD(0.0, 0.5, 2, norm=norm)(model, images, torch.tensor([0, 1]))
    assert torch.equal(attacked, images)
