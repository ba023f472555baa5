"""Fast gradients are the gradients of the objective: every layer, every objective, every side effect."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import along, differences, flat, gradient_penalty
from tests.learning.steps import assert_same_step, convolutions, gradients, ordinary, products, step_function, traced
from tests.learning.zoo import CLASSES, ZOO, Masked, batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning import fast
from wassersmooth.learning.dual_norm import DualNorm
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.fast import FastGradients
from wassersmooth.learning.objectives import AdversarialTraining, DirectionalPenalty, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.learning.tracing import compiled
from wassersmooth.robustness.attacks import FGSM, PGD

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
PENALTY = GradientPenalty(METRIC, eta=0.7)
OBJECTIVES = [Plain(), PENALTY, GradientPenalty(Euclidean(), 0.5), GradientPenalty(DualNorm(), 0.5)]
RANDOM = [name for name in ZOO if "dropout" in name]
DRAWING = NoisyInputs | AdversarialTraining | Tikhonov
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("name", [name for name in ZOO if name not in RANDOM])
def test_terms_gradients_and_buffers_are_those_of_the_objective(name, objective, device):
    model, (images, labels) = make(name, device), batch(device=device)
    twin = copy.deepcopy(model)
    expected = ordinary(objective, twin, images, labels)
    received = traced(objective, model)(images, labels)
    assert_same_step(received, expected, model, twin, 1e-10)


@pytest.mark.parametrize("name", ["batch_norm_train", "vision_transformer", "residual_train"])
def test_the_gradient_matches_central_differences(name, device):
    model, (images, labels) = make(name, device), batch(device=device)
    parameters = list(model.parameters())

    def value():
        loss = F.cross_entropy(model(images), labels)
        return loss + gradient_penalty(model, images, labels, METRIC, 0.7)

    expected = differences(value, parameters)
    traced(PENALTY, model)(images, labels)
    assert_matches(along(gradients(model), parameters), expected, 1e-6)


def test_a_step_takes_six_sweeps():
    """Forward, input gradient, their tangents, two weight gradients; the tangent of the last input gradient is not needed."""
    layers, (images, labels) = 3, batch()
    model = convolutions(layers)
    assert products(step_function(Plain(), model, images, labels)) == (layers, layers - 1, layers)
    assert products(step_function(PENALTY, model, images, labels)) == (2 * layers, 2 * layers - 1, 2 * layers)


def test_random_draws_are_shared_by_all_passes_and_new_in_every_step(device):
    torch.manual_seed(0)
    model, (images, labels) = Masked().to(device).double(), batch(device=device)
    fast = traced(PENALTY, model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        received = fast(images, labels)
        found = flat(gradients(model))
        torch.manual_seed(seed)
        expected = ordinary(PENALTY, model, images, labels)
        assert_matches(received.total, expected.total, 1e-10)
        assert_matches(found, flat(gradients(model)), 1e-10)


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_is_unbiased(name, device):
    """Torch's own dropout draws otherwise when traced, so the mean is compared."""
    model, (images, labels) = make(name, device), batch(device=device)
    fast, found, expected = traced(Plain(), model), [], []
    for _ in range(400):
        found.append(fast(images, labels).loss.item())
        expected.append(Plain()(model, images, labels).loss.item())
    a, b = torch.tensor(found), torch.tensor(expected)
    assert abs(a.mean() - b.mean()) < 5 * ((a.var() + b.var()) / 400).sqrt()
    assert a.std() > 0


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ELU(inplace=True), nn.Flatten(), nn.Linear(144, CLASSES))

    def forward(self, x):
        x = x * 1
        x += 0.1
        return self.layers(x).mul_(2)


class Shared(nn.Module):
    """One weight used twice, one never, one frozen."""

    def __init__(self):
        super().__init__()
        self.twice, self.never = nn.Linear(64, 64), nn.Linear(3, 3)
        self.frozen, self.last = nn.Linear(64, 64), nn.Linear(64, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(torch.tanh(self.twice(torch.tanh(self.twice(x.flatten(1))))))))


@pytest.mark.parametrize("maker", [InPlace, Shared])
def test_inplace_layers_shared_unused_and_frozen_weights(maker, device):
    torch.manual_seed(3)
    model, (images, labels) = maker().double().to(device), batch(device=device)
    twin = copy.deepcopy(model)
    ordinary(PENALTY, twin, images, labels)
    traced(PENALTY, model)(images, labels)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert_matches(one.grad, other.grad, 1e-10)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class StraightThrough(nn.Module):
    def __init__(self, detached):
        super().__init__()
        self.first, self.last, self.detached = nn.Linear(64, 16), nn.Linear(16, CLASSES), detached

    def forward(self, x):
        hidden = F.softplus(self.first(x.flatten(1)))
        hidden = hidden.square() + (hidden - hidden.square()).detach() if self.detached else Rounding.apply(8 * hidden)
        return self.last(torch.tanh(hidden))


@pytest.mark.parametrize(
    ("detached", "said"), [(True, "the traced gradient of this model is off by"), (False, "cannot be traced")]
)
def test_a_backward_pass_of_its_own_is_noticed(detached, said):
    torch.manual_seed(0)
    model, (images, labels) = StraightThrough(detached).double(), batch()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=said + r".* use the objective itself"):
        traced(PENALTY, model)(images, labels)
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_of_another_shape_or_mode_goes_the_ordinary_way(device):
    model, (images, labels) = make("batch_norm_train", device), batch(size=6, device=device)
    fast, twin = traced(PENALTY, model), copy.deepcopy(model)
    for size, training in ((6, True), (4, True), (6, False), (6, True)):
        model.train(training)
        twin.train(training)
        received = fast(images[:size], labels[:size])
        expected = ordinary(PENALTY, twin, images[:size], labels[:size])
        assert_matches(received.total, expected.total, 1e-10)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-10)


def test_eta_may_be_a_tensor_that_changes(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    eta = torch.tensor(0.5, device=device)
    fast = traced(GradientPenalty(METRIC, eta), model)
    for strength in (0.5, 1.5, 0.0):
        eta.fill_(strength)
        received = fast(images, labels)
        found = flat(gradients(model))
        expected = ordinary(GradientPenalty(METRIC, strength), model, images, labels)
        assert_matches(received.total, expected.total, 1e-10)
        assert_matches(found, flat(gradients(model)), 1e-10)


@pytest.mark.parametrize(
    "objective",
    [NoisyInputs(METRIC, 0.1), AdversarialTraining(PGD(0.1, 0.05, 3)), AdversarialTraining(FGSM(0.1), penalty=PENALTY)],
)
def test_noise_and_attacks_draw_from_the_generator(objective, device, seeded):
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    generator, fast, twin = seeded(7), traced(objective, model), copy.deepcopy(model)
    other = seeded(7)
    for _ in range(2):
        received = fast(images, labels, generator)
        expected = ordinary(objective, twin, images, labels, other)
        assert_matches(received.total, expected.total, 1e-9)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)
    for one, other_buffer in zip(model.buffers(), twin.buffers(), strict=True):
        assert_matches(one, other_buffer, 1e-12)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (DirectionalPenalty(lambda model, images, labels: images), "DirectionalPenalty, which has no fast gradients"),
        (GradientPenalty(METRIC, 0.1, of="logits"), "of='logits'; call the objective"),
        (GradientPenalty(METRIC, 0.1, engine=FiniteDifference()), "are exact; got engine='finite_difference'"),
        (
            GradientPenalty(Wasserstein(PixelGraph.grid(8, 8, 1, weight=torch.ones(4, requires_grad=True))), 0.1),
            "weights that require grad",
        ),
        (GradientPenalty(METRIC, torch.tensor(0.1, requires_grad=True)), "an eta that is not learned; .*eta.detach"),
        (AdversarialTraining(FGSM(0.1), penalty=GradientPenalty(METRIC, nn.Parameter(torch.tensor(0.1)))), "is not learned"),
        (NoisyInputs(METRIC, torch.tensor(0.1, requires_grad=True).exp()), "an eta that is not learned"),
        (Tikhonov(METRIC, torch.tensor(0.1, requires_grad=True)), "an eta that is not learned"),
    ],
)
def test_objectives_without_a_fast_way_are_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        FastGradients(objective, smooth_net())


def test_wrapped_and_compiled_models_are_refused():
    with pytest.raises(ValueError, match="hand over the model inside"):
        FastGradients(PENALTY, nn.DataParallel(smooth_net()))
    with pytest.raises(ValueError, match="hand over the model as it was"):
        FastGradients(PENALTY, torch.compile(smooth_net()))


def test_bad_batches_are_complained_about_before_anything_is_traced():
    model, (images, labels) = smooth_net(), batch()
    with pytest.raises(ValueError, match="images"):
        traced(PENALTY, model)(-images, labels)
    with pytest.raises(ValueError, match="labels"):
        traced(PENALTY, model)(images, labels[:2])


def test_equal_steps_are_differentiated_and_compiled_once(device, monkeypatch):
    made = []
    monkeypatch.setattr(compiled, "_known", {})
    monkeypatch.setattr(fast, "_compiled", lambda graph, on_cuda: made.append(graph) or graph)
    images, labels = batch(device=device)

    def compilations(objective, model):
        before, twin = len(made), copy.deepcopy(model)
        received = FastGradients(objective, model, cuda_graph=False)(images, labels, torch.Generator(device).manual_seed(0))
        expected = ordinary(objective, twin, images, labels, torch.Generator(device).manual_seed(0))
        assert_same_step(received, expected, model, twin, 1e-9)
        return len(made) - before

    model, moved = smooth_net(device), smooth_net(device)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(0.5)
    assert compilations(GradientPenalty(METRIC, 0.1), model) == 1
    for objective in (GradientPenalty(METRIC, 0.4), GradientPenalty(Euclidean(), 0.1)):
        for net in (model, moved):
            assert compilations(objective, net) == 0  # weights, strengths and metrics do not matter
    partly = copy.deepcopy(model)
    next(partly.parameters()).requires_grad_(False)
    others = [
        (GradientPenalty(METRIC, 0.1, power=1), model),
        (GradientPenalty(METRIC, 0.1, loss="square"), model),
        (GradientPenalty(METRIC, 0.1), make("batch_norm_eval", device)),
        (GradientPenalty(METRIC, 0.1), partly),
        (Tikhonov(METRIC, 0.1, probes=1), model),
        (Tikhonov(METRIC, 0.1, probes=2), model),
        (Tikhonov(METRIC, 0.1, laplacian=None, probes=1), model),
        (Tikhonov(METRIC, 0.1, laplacian=None, probes=2), model),
        (Tikhonov(METRIC, 0.1, "square", laplacian=None), model),
        (Plain(), model),
    ]
    assert [compilations(objective, net) for objective, net in others] == [1] * len(others)
    assert [compilations(objective, net) for objective, net in others] == [0] * len(others)


def test_compiled_as_one_function(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Softplus(), nn.Linear(8, CLASSES)).double().to(device)
    images, labels = batch(device=device)
    twin, fast = copy.deepcopy(model), FastGradients(PENALTY, model)
    for _ in range(3):
        received, expected = fast(images, labels), ordinary(PENALTY, twin, images, labels)
        assert_matches(received.total, expected.total, 1e-9)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)
        images = images.flip(0)


def test_single_precision_is_as_good_as_that_of_double_backward(device):
    """Against float64: the fast way is off by at most twice what the ordinary way is."""
    for seed in range(3):
        exact, (images, labels) = make("residual_train", device), batch(8, device, seed=seed)
        rough, rougher = copy.deepcopy(exact).float(), copy.deepcopy(exact).float()
        ordinary(PENALTY, exact, images, labels)
        ordinary(PENALTY, rough, images.float(), labels)
        traced(PENALTY, rougher)(images.float(), labels)
        truth = flat(gradients(exact))
        errors = [(flat(gradients(model)).double() - truth).norm() / truth.norm() for model in (rough, rougher)]
        assert errors[1] <= 2 * errors[0] + 1e-6  # a rounding or two of a small network


def test_autocast_is_settled_by_the_first_call(device):
    model, (images, labels) = smooth_net(device, torch.float32), batch(device=device, dtype=torch.float32)
    fast, twin = traced(PENALTY, model), copy.deepcopy(model)
    for enabled in (True, True, False):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            received = fast(images, labels)
            expected = ordinary(PENALTY, twin, images, labels)
        assert received.total.dtype == torch.float32
        assert_matches(received.total, expected.total, 2e-2)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 5e-2)


@needs_cuda
@pytest.mark.parametrize(
    "objective",
    [
        *(Plain(), PENALTY, NoisyInputs(METRIC, 0.1), AdversarialTraining(PGD(0.1, 0.05, 3))),
        *(Tikhonov(METRIC, 0.1), Tikhonov(METRIC, 0.1, laplacian=None)),
    ],
    ids=repr,
)
def test_replayed_steps_train_like_the_ordinary_ones(objective):
    model, (images, labels) = make("batch_norm_train", "cuda"), batch(8, "cuda")
    twin = copy.deepcopy(model)
    generator, other = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    fast = FastGradients(objective, model, compile=False)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (model, twin)]
    for step in range(6):
        x = images.roll(step, 0)
        received, expected = fast(x, labels, generator), ordinary(objective, twin, x, labels, other)
        if not isinstance(objective, DRAWING):  # captured draws come from another stream of numbers
            assert_matches(received.total, expected.total, 1e-8)
            assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-8)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@needs_cuda
@pytest.mark.parametrize(
    "objective", [NoisyInputs(METRIC, 0.5), Tikhonov(METRIC, 0.5), Tikhonov(METRIC, 0.5, laplacian=None)], ids=repr
)
def test_replays_draw_anew(objective):
    model, (images, labels) = smooth_net("cuda"), batch(device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    fast = FastGradients(objective, model, compile=False)
    assert len({fast(images, labels, generator).total.item() for _ in range(5)}) == 5
