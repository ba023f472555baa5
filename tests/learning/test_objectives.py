"""What each objective computes, and the terms it returns."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import along, differences, flat, gradient_penalty, gradients_of
from tests.learning.steps import traced
from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.covector_norms import DualNorm
from wassersmooth.learning.engines import FiniteDifference, ForwardMode
from wassersmooth.learning.losses import cross_entropy, square
from wassersmooth.learning.objective import Terms
from wassersmooth.learning.objectives import AdversarialTraining, DirectionalPenalty, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.robustness.attacks import FGSM, PGD

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))


def sign_attack(model, images, labels, generator=None):
    x = images.detach().requires_grad_()
    loss = cross_entropy(model(x), labels).sum()
    return (images + 0.05 * torch.autograd.grad(loss, x)[0].sign()).clamp(0, 1)


def random_attack(model, images, labels, generator=None):
    return (images + 0.1 * torch.rand(images.shape, dtype=images.dtype, device=images.device, generator=generator)).clamp(0, 1)


EVERY = {
    "plain": Plain(),
    "gradient": GradientPenalty(METRIC, 0.3),
    "forward": GradientPenalty(METRIC, 0.3, engine="forward_mode"),
    "differences": GradientPenalty(METRIC, 0.3, engine=FiniteDifference(1e-4, central=False)),
    "logits": GradientPenalty(Euclidean(), 0.3, of="logits"),
    "dual": GradientPenalty(DualNorm("linf"), 0.3),
    "directional": DirectionalPenalty.from_attack(sign_attack),
    "noisy": NoisyInputs(METRIC, 0.1),
    "adversarial": AdversarialTraining(sign_attack),
    "tikhonov": Tikhonov(METRIC, 0.3),
}
every = pytest.mark.parametrize("objective", EVERY.values(), ids=EVERY.keys())


@every
def test_terms_add_up_and_reach_every_parameter(objective, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    terms = objective(model, images, labels)
    assert isinstance(terms, Terms)
    assert all(term.shape == () for term in terms)
    assert torch.equal(terms.total, terms.loss + terms.penalty)
    terms.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every
def test_images_are_constants(objective, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    images.requires_grad_()
    objective(model, images, labels).total.backward()
    assert images.grad is None


@every
def test_the_loss_is_the_mean_cross_entropy_where_the_images_are_the_callers(objective, device):
    if isinstance(objective, NoisyInputs | AdversarialTraining):
        return
    model, (images, labels) = smooth_net(device), batch(device=device)
    assert_matches(objective(model, images, labels).loss, F.cross_entropy(model(images), labels), 1e-12)


@every
def test_objectives_are_values(objective):
    assert copy.deepcopy(objective) == objective
    assert pickle.loads(pickle.dumps(objective)) == objective
    assert type(objective).__name__ in repr(objective)
    with pytest.raises(AttributeError):
        objective.loss = "square"


def test_plain_and_adversarial_have_no_penalty(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    for objective in (Plain(), NoisyInputs(METRIC, 0.1), AdversarialTraining(sign_attack)):
        assert torch.equal(objective(model, images, labels).penalty, torch.zeros((), dtype=torch.float64, device=device))


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "finite_difference"])
def test_custom_losses_and_soft_labels(engine, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    smoothed = lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=0.2, reduction="none")  # noqa: E731
    soft = F.one_hot(labels, 3).double() * 0.8 + 0.2 / 3
    a = GradientPenalty(METRIC, 0.5, engine=engine, loss=smoothed)(model, images, labels)
    b = GradientPenalty(METRIC, 0.5)(model, images, soft)
    assert_matches(a.loss, b.loss, 1e-12)
    assert_matches(a.penalty, b.penalty, 1e-10)
    assert_matches(flat(gradients_of(a.total, model)), flat(gradients_of(b.total, model)), 1e-5)


def test_eta_as_a_tensor_can_ramp_and_be_learned(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    eta = torch.tensor(0.3, dtype=torch.float64, device=device, requires_grad=True)
    objective = GradientPenalty(METRIC, eta)
    first = objective(model, images, labels).penalty
    assert_matches(first, GradientPenalty(METRIC, 0.3)(model, images, labels).penalty, 1e-12)
    assert_matches(torch.autograd.grad(first, eta)[0], 2 * first / 0.3, 1e-12)
    with torch.no_grad():
        eta.mul_(2)
    assert_matches(objective(model, images, labels).penalty, 4 * first, 1e-12)
    assert objective(model.float(), images.float(), labels).total.dtype == torch.float32


def test_the_dual_norm_equals_the_euclidean_one_on_white_gradients():
    x = torch.rand(4, 3, 64, 64)
    white = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    cometric = DualNorm("linf").cometric(x)
    assert_matches(cometric.quad(white), white.square().sum((1, 2, 3)), 0.02)
    assert_matches((cometric.mv(white) * white).sum((1, 2, 3)), cometric.quad(white), 1e-5)
    g = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    assert_matches(cometric.quad(g), math.pi / 2 * g.abs().sum((1, 2, 3)) ** 2 / 9, 1e-12)


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode"])
def test_the_dual_norm_penalty_against_central_differences(engine, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    parameters = list(model.parameters())

    def value():
        x = images.detach().requires_grad_()
        g = torch.autograd.grad(F.cross_entropy(model(x), labels, reduction="sum"), x)[0]
        return 0.25 * (math.pi / 2 * g.abs().sum((1, 2, 3)) ** 2 / 64).mean()

    penalty = GradientPenalty(DualNorm("linf"), 0.5, engine=engine)(model, images, labels).penalty
    assert_matches(penalty, value(), 1e-10)
    received = along(gradients_of(penalty, model), parameters)
    assert_matches(received, differences(value, parameters, h=1e-6), 1e-6)  # small: |g| has corners


def test_directional_penalty_is_the_signed_derivative_along_xi(device):
    model, (images, labels) = make("group_norm", device), batch(device=device)
    xi = torch.randn(images.shape, dtype=images.dtype).to(device)
    parameters = list(model.parameters())

    def value():
        h = 1e-4
        plus, minus = (F.cross_entropy(model(images + s * h * xi), labels).detach() for s in (1, -1))
        return (plus - minus) / (2 * h)

    terms = DirectionalPenalty(lambda model, images, labels: xi)(model, images, labels)
    assert_matches(terms.penalty, value(), 1e-6)
    opposite = DirectionalPenalty(lambda model, images, labels: -xi)(model, images, labels)
    assert_matches(opposite.penalty, -terms.penalty, 1e-12)
    received = along(gradients_of(terms.penalty, model), parameters)
    assert_matches(received, differences(value, parameters, h=1e-3), 1e-5)


def test_directional_penalty_of_an_attack_uses_its_displacement(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    xi = sign_attack(model, images, labels) - images
    expected = DirectionalPenalty(lambda *_: xi)(model, images, labels)
    received = DirectionalPenalty.from_attack(sign_attack)(model, images, labels)
    assert_matches(received.penalty, expected.penalty, 1e-12)
    assert received.penalty > 0


@pytest.mark.parametrize("fast", [False, True])
def test_functions_of_a_user_may_move_the_images_in_place(fast, device):
    """It moved those of the caller, and a perturbation was then zero."""

    def attack(model, images, labels, generator=None):
        return images.mul_(0.9)

    model, (images, labels) = smooth_net(device), batch(device=device)
    given = images.clone()
    for objective, expected in (
        (AdversarialTraining(attack), Plain()(model, 0.9 * images, labels)),
        (DirectionalPenalty(attack), DirectionalPenalty(lambda model, x, y: 0.9 * x)(model, images, labels)),
        (DirectionalPenalty.from_attack(attack), DirectionalPenalty(lambda model, x, y: -0.1 * x)(model, images, labels)),
    ):
        step = traced(objective, model) if fast else partial(objective, model)
        for _ in range(2):
            assert_matches(step(given, labels).total, expected.total, 1e-12)
            assert torch.equal(given, images)


def test_noisy_inputs_are_the_loss_at_x_plus_noise(device, seeded):
    model, (images, labels) = smooth_net(device), batch(device=device)
    xi = METRIC.cometric(images).sample(seeded(4))
    expected = F.cross_entropy(model(images + 0.2 * xi), labels)
    assert_matches(NoisyInputs(METRIC, 0.2)(model, images, labels, seeded(4)).loss, expected, 1e-12)


def test_adversarial_training_is_the_loss_at_the_attacked_images(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    expected = F.cross_entropy(model(sign_attack(model, images, labels)), labels)
    assert_matches(AdversarialTraining(sign_attack)(model, images, labels).loss, expected, 1e-12)


class Drawing(nn.Module):
    """Remembers the random numbers of each of its passes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.drawn = inner, []

    def forward(self, x):
        self.drawn.append(torch.rand(1, device=x.device).item())
        return self.inner(x)


def test_attacks_do_not_know_the_masks_of_the_pass_that_is_trained_on(device):
    model, (images, labels) = Drawing(smooth_net(device)), batch(device=device)
    for attack in (FGSM(0.1), PGD(0.1, 0.05, 2), PGD(0.1, 0.05, 2, random_start=False)):
        for state in range(3):
            model.drawn.clear()
            torch.manual_seed(state)
            AdversarialTraining(attack)(model, images, labels, torch.Generator(device).manual_seed(4))
            *attacking, last = model.drawn
            assert len({*attacking, last}) == len(attacking) + 1
            following = torch.rand(1, device=device)
            torch.manual_seed(state)
            assert torch.rand(1, device=device).item() == last  # one plain pass, and no more
            assert torch.equal(torch.rand(1, device=device), following)
        model.drawn.clear()
        for _ in range(3):
            AdversarialTraining(attack)(model, images, labels, torch.Generator(device).manual_seed(4))
        assert len({*model.drawn}) == len(model.drawn)  # others in every step


def test_random_attacks_start_elsewhere_each_step_and_follow_the_seed(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    objective = AdversarialTraining(random_attack)
    torch.manual_seed(0)
    first, second = (objective(model, images, labels).loss.item() for _ in range(2))
    assert first != second
    torch.manual_seed(0)
    assert objective(model, images, labels).loss.item() == first


def test_a_backward_pass_of_the_penalty_alone_reaches_all_parameters(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    for engine in ("double_backward", "forward_mode", "finite_difference"):
        model.zero_grad()
        GradientPenalty(METRIC, 0.5, of="logits", engine=engine)(model, images, labels).penalty.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert model[-1].bias.grad.abs().max() == 0  # outputs' gradients do not depend on the last bias


def test_frozen_layers_accumulation_and_channels_last(device):
    model, (images, labels) = smooth_net(device, channels=2), batch(8, device=device, channels=2)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    for engine in ("double_backward", "forward_mode", "finite_difference"):
        objective = GradientPenalty(METRIC, 0.5, engine=engine)
        model.zero_grad()
        objective(model, images, labels).total.backward()
        whole = model[-1].weight.grad.clone()
        assert model[0].weight.grad is None
        model.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):  # two halves, each with half the weight
            (objective(model, images[part], labels[part]).total / 2).backward()
        assert_matches(model[-1].weight.grad, whole, 1e-6)
        model.zero_grad()
        objective(model, images.to(memory_format=torch.channels_last), labels).total.backward()
        assert_matches(model[-1].weight.grad, whole, 1e-6)


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "finite_difference"])
def test_a_model_in_data_parallel(engine):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where DataParallel takes the model
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    objective = GradientPenalty(METRIC, 0.5, engine=engine)
    expected = flat(gradients_of(objective(model, images, labels).total, model))
    wrapped = torch.nn.DataParallel(model)
    assert_matches(flat(gradients_of(objective(wrapped, images, labels).total, wrapped)), expected, 1e-10)


def test_forward_mode_refuses_what_it_gets_wrong_and_names_it():
    class SilentlyWrong(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.saved_tensors[0].cos().detach()

    class Sine(torch.nn.Module):
        def forward(self, x):
            return SilentlyWrong.apply(x)

    model = torch.nn.Sequential(smooth_net()[0], torch.nn.Sequential(Sine()), *smooth_net()[2:])
    images, labels = batch()
    objective = GradientPenalty(Euclidean(), 0.5, engine="forward_mode")
    with pytest.raises(ValueError, match=r"off by .* Culprit: 1\.0 \(Sine\).*double_backward"):
        objective(model, images, labels)
    unverified = GradientPenalty(Euclidean(), 0.5, engine=ForwardMode(verify=False))
    wrong = flat(gradients_of(unverified(model, images, labels).penalty, model))
    right = flat(gradients_of(GradientPenalty(Euclidean(), 0.5)(model, images, labels).penalty, model))
    assert (wrong - right).norm() > 0.01 * right.norm()  # it would have been silent


def test_the_value_of_the_reference_is_the_value_of_the_objective():
    """The twin in central.py and the engines agree on a batch where each image has its own scale."""
    model, (images, labels) = smooth_net(), batch()
    images = images * torch.tensor([1.0, 0.1, 0.01, 0.5], dtype=torch.float64).reshape(-1, 1, 1, 1)
    expected = gradient_penalty(model, images, labels, METRIC, 0.3)
    assert_matches(GradientPenalty(METRIC, 0.3)(model, images, labels).penalty, expected, 1e-10)


def test_attacked_images_have_the_loss_of_the_penalty():
    """Or the one that is given; both only where they are the same."""
    penalty = GradientPenalty(METRIC, 0.3, loss="square")
    model, (images, labels) = smooth_net(), batch()
    expected = Plain("square")(model, sign_attack(model, images, labels), labels).loss
    for objective in (
        AdversarialTraining(sign_attack, "square"),
        AdversarialTraining(sign_attack, penalty=penalty),
        AdversarialTraining(sign_attack, "square", penalty),
        AdversarialTraining(sign_attack, square, penalty),
    ):
        assert_matches(objective(model, images, labels).loss, expected, 1e-12)
        assert "loss='square'" in repr(objective)
    for loss in ("cross_entropy", cross_entropy):
        with pytest.raises(ValueError, match=r"loss must be that of the penalty, 'square'; got '?cross_entropy'?; give it"):
            AdversarialTraining(sign_attack, loss, penalty)
    with pytest.raises(ValueError, match="loss must be one of"):
        AdversarialTraining(sign_attack, "squared")
    assert repr(AdversarialTraining(sign_attack)) == (
        "AdversarialTraining(attack=sign_attack, loss='cross_entropy', penalty=None)"
    )


@pytest.mark.parametrize("power", [True, 1.0, "1", 3])
def test_the_power_is_one_or_two(power):
    with pytest.raises(ValueError, match=r"power must be one of 1, 2; got"):
        GradientPenalty(METRIC, 0.3, power=power)
    assert GradientPenalty(METRIC, 0.3, power=np.int64(1)) == GradientPenalty(METRIC, 0.3, power=1)


def test_a_class_is_no_metric():
    for kind in (Euclidean, Wasserstein, DualNorm):
        with pytest.raises(ValueError, match=rf"metric must be .* got the class {kind.__name__} itself"):
            GradientPenalty(kind, 0.3)
