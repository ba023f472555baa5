"""Objectives leave nothing behind: random state, buffers, modes, flags, gradients and memory."""

import contextlib
import copy
import gc
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from tests.learning.test_objectives import EVERY, METRIC, random_attack, sign_attack
from tests.learning.zoo import VisionTransformer, batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein, transport
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.tikhonov import Tikhonov

every = pytest.mark.parametrize("objective", EVERY.values(), ids=EVERY.keys())


class Centered(nn.Module):
    """Puts new tensors in the place of its buffers; one of them is first made in a pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("late", None)

    def forward(self, x):
        level = x.detach().mean().reshape(1)
        self.mean = 0.9 * self.mean + 0.1 * level
        self.late = level if self.late is None else 0.9 * self.late + 0.1 * level
        return x - self.mean - self.late


def stateful_net(device):
    """Everything that moves in a forward pass."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Softplus(), nn.Dropout(0.3), nn.Flatten()
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 3))
    return nn.Sequential(*layers, Centered(), spectral).double().to(device)


def state(model, device):
    random = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device == "cuda" else [])
    return [*random, *(buffer.clone() for buffer in model.buffers())]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every
def test_the_first_pass_of_a_model_counts_once(objective, device):
    """A buffer that is made in it would otherwise move a second time in the passes that follow."""
    if isinstance(objective, AdversarialTraining | NoisyInputs):
        return  # their plain pass is at other images
    model, twin, (images, labels) = stateful_net(device), stateful_net(device), batch(device=device)
    torch.manual_seed(3)
    twin(images)
    torch.manual_seed(3)
    objective(model, images, labels, torch.Generator(device).manual_seed(1))
    assert same([b.clone() for b in model.buffers()], [b.clone() for b in twin.buffers()])


def put_back(model, saved):
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), saved, strict=True):
            buffer.copy_(value)


@every
@pytest.mark.parametrize("training", [True, False])
def test_one_call_moves_state_as_one_plain_pass(objective, training, device):
    model, (images, labels) = stateful_net(device).train(training), batch(device=device)
    objective(model, images, labels, torch.Generator(device).manual_seed(0))  # whatever happens once
    points = images
    if isinstance(objective, AdversarialTraining):  # the plain pass is the one at the attacked images
        points = sign_attack(copy.deepcopy(model).eval(), images, labels)
        objective = AdversarialTraining(lambda *args, generator: sign_attack(args[0].eval(), *args[1:]))
    if isinstance(objective, NoisyInputs):
        points = images + objective.eta * METRIC.cometric(images).sample(torch.Generator(device).manual_seed(1))
    buffers = [buffer.clone() for buffer in model.buffers()]

    torch.manual_seed(3)
    model(points)
    expected = state(model, device)

    put_back(model, buffers)
    torch.manual_seed(3)
    objective(model, images, labels, torch.Generator(device).manual_seed(1))
    assert same(state(model, device), expected)


def test_dropout_of_attention_moves_the_random_state_once(device):
    torch.manual_seed(0)
    model, (images, labels) = VisionTransformer(0.3).double().to(device), batch(device=device)
    for engine in ("double_backward", "forward_mode", "finite_difference"):
        objective = GradientPenalty(METRIC, 0.3, engine=engine)
        objective(model, images, labels)
        torch.manual_seed(3)
        model(images)
        expected = state(model, device)
        torch.manual_seed(3)
        objective(model, images, labels)
        assert same(state(model, device), expected), engine


def test_attacks_without_randomness_leave_the_random_state(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    before = torch.get_rng_state()
    AdversarialTraining(sign_attack)(model, images, labels)
    assert torch.equal(torch.get_rng_state(), before)
    AdversarialTraining(random_attack)(model, images, labels)
    assert not torch.equal(torch.get_rng_state(), before)
    before = torch.get_rng_state()
    AdversarialTraining(random_attack)(model, images, labels, torch.Generator(device))
    assert torch.equal(torch.get_rng_state(), before)


@every
def test_modes_flags_and_gradients_come_back(objective, device):
    model, (images, labels) = stateful_net(device), batch(device=device)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.full_like(model[0].bias, 7)
    terms = objective(model, images, labels)
    assert [module.training for module in model[:3]] == [True, False, True]
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert bool((model[0].bias.grad == 7).all())
    assert not images.requires_grad
    terms.total.backward()
    assert bool((model[0].bias.grad != 7).any())


@every
def test_everything_comes_back_after_an_exception(objective, device):
    model, (images, labels) = stateful_net(device), batch(device=device)

    class Trap(nn.Module):
        countdown = 0

        def forward(self, x):
            Trap.countdown -= 1
            if Trap.countdown <= 0:
                raise ZeroDivisionError
            return x

    armed = nn.Sequential(model, Trap())
    armed[0][0].bias.grad = torch.ones_like(armed[0][0].bias)
    for trap_at in (1, 2, 3):  # in the first pass, and in those that follow where there are any
        Trap.countdown = trap_at
        parameters = [(p, p.requires_grad) for p in armed.parameters()]
        with contextlib.suppress(ZeroDivisionError):
            objective(armed, images, labels)
        assert all(p.requires_grad == flag for p, flag in parameters)
        assert all(module.training for module in armed.modules())
        assert bool((armed[0][0].bias.grad == 1).all())
        assert torch.is_grad_enabled()
        assert torch._C._len_torch_function_stack() == 0
        assert torch.autograd.forward_ad._current_level == -1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient", "forward", "differences", "tikhonov", "directional", "adversarial"])
def test_no_graph_is_kept_alive(name):
    model, (images, labels) = make("batch_norm_train"), batch()
    objective, optimizer = EVERY[name], torch.optim.SGD(model.parameters(), 1e-3)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            objective(model, images, labels).total.backward()
            optimizer.step()

    def tensors():
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    steps(5)
    gc.collect()
    gc.disable()  # a cycle would keep graphs alive until the collector happens to come
    try:
        before = tensors()
        steps(195 if name in ("gradient", "forward", "differences") else 30)
        assert tensors() <= before + 5
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts CUDA memory")
@pytest.mark.parametrize("name", ["gradient", "forward", "differences"])
def test_cuda_memory_is_flat(name):
    model, (images, labels) = make("batch_norm_train", "cuda"), batch(device="cuda")
    for step in range(200):
        EVERY[name](model, images, labels).total.backward()
        if step == 10:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= before


BAD = {
    "labels out of range": (lambda x, y: (x, y + 2), r"labels must be in 0\.\.2.*more outputs"),
    "negative labels": (lambda x, y: (x, y - 3), r"labels must be in 0\.\.2"),
    "float images of bytes": (lambda x, y: ((x * 255).byte(), y), "divide 8-bit images by 255"),
    "empty batch": (lambda x, y: (x[:0], y[:0]), "skip empty batches"),
    "mismatched lengths": (lambda x, y: (x, y[:2]), "one for each of 4; got 2 labels"),
    "int32 labels": (lambda x, y: (x, y.int()), r"\.long\(\)"),
    "labels as a list": (lambda x, y: (x, y.tolist()), "as_tensor"),
    "nan images": (lambda x, y: (x / 0 * 0, y), "images must be finite"),
    "targets of another width": (lambda x, y: (x, torch.rand(4, 5).double()), "shape of the outputs"),
}


@pytest.mark.parametrize(("spoil", "match"), BAD.values(), ids=BAD.keys())
@every
def test_bad_batches_are_refused_with_the_remedy(objective, spoil, match):
    images, labels = spoil(*batch())
    with pytest.raises(ValueError, match=match):
        objective(smooth_net(), images, labels)


@pytest.mark.filterwarnings("ignore:images are not in")
def test_negative_images_are_refused_where_they_are_masses():
    model, (images, labels) = smooth_net(), batch()
    for objective in (GradientPenalty(METRIC, 0.3), NoisyInputs(METRIC, 0.3)):
        with pytest.raises(ValueError, match="Normalized"):
            objective(model, images - 0.5, labels)
    assert torch.isfinite(GradientPenalty(Euclidean(), 0.3)(model, images - 0.5, labels).total)


def test_bad_images_are_refused_before_anything_moves():
    model, (images, labels) = stateful_net("cpu"), batch()
    before = state(model, "cpu")
    with pytest.raises(ValueError, match="finite"):
        GradientPenalty(Wasserstein(PixelGraph.grid(8, 8, radius=1)), 0.3, engine="forward_mode")(model, images / 0, labels)
    assert same(state(model, "cpu"), before)


@every
def test_a_loss_that_is_not_a_number_is_refused(objective):
    model, (images, labels) = smooth_net(), batch()
    with torch.no_grad():
        model[0].weight.mul_(float("nan"))
    with pytest.raises(ValueError, match=r"finite|NaN"):
        objective(model, images, labels)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, Fraction])
def test_numbers_of_other_kinds_are_floats(kind):
    eta = kind(1)
    made = [GradientPenalty(METRIC, eta), NoisyInputs(METRIC, eta), Tikhonov(METRIC, eta), Wasserstein(METRIC.graph, mass=eta)]
    made = [*(getattr(one, "eta", None) or one.mass for one in made), FiniteDifference(eta).step]
    assert [type(number) for number in made] == 5 * [float]
    assert GradientPenalty(METRIC, eta) == GradientPenalty(METRIC, 1.0)
    black, white = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
    assert torch.equal(transport.interpolate(black, white, eta, "l2"), transport.interpolate(black, white, 1.0, "l2"))
    with pytest.raises(ValueError, match="eta must be a finite number"):
        GradientPenalty(METRIC, kind(-1))
    for wrong in (np.float32("nan"), np.bool_(True), True, "1"):
        with pytest.raises(ValueError, match="eta must be a finite number"):
            GradientPenalty(METRIC, wrong)


def test_bad_settings_are_refused():
    for make_objective, match in [
        (lambda: GradientPenalty(METRIC, -1.0), "eta must be a finite number"),
        (lambda: GradientPenalty(METRIC, torch.ones(2)), "without dimensions"),
        (lambda: GradientPenalty(METRIC, torch.tensor(-1.0)), "at least 0"),
        (lambda: GradientPenalty(METRIC, 0.3, of="probabilities"), "'loss', 'logits'"),
        (lambda: GradientPenalty(METRIC, 0.3, engine="backward"), "'double_backward', 'forward_mode', 'finite_difference'"),
        (lambda: Plain(loss="hinge"), "'cross_entropy'"),
        (lambda: Plain(loss=3), "a function .* or a name"),
    ]:
        with pytest.raises(ValueError, match=match):
            make_objective()
    model, (images, labels) = smooth_net(), batch()
    with pytest.raises(ValueError, match="reduction='none'"):
        Plain(loss=nn.CrossEntropyLoss())(model, images, labels)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        Plain()(lambda x: x, images, labels)
    with pytest.raises(ValueError, match=r"shape \(B, classes\)"):
        Plain()(nn.Conv2d(1, 3, 3).double(), images, labels)
