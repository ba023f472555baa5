"""Fast gradients are the gradients of the objective: every layer, every objective, every side effect."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import along, differences, flat, gradient_penalty
from tests.learning.steps import assert_same_step, convolutions, eager, gradients, products, step_graph, traced
from tests.learning.zoo import CLASSES, ZOO, Masked, batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.compiled import compile_cache, prepared_step
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.covector_norms import DualNorm
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.objective import Terms
from wassersmooth.learning.objectives import AdversarialTraining, DirectionalPenalty, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.robustness.attacks import FGSM, PGD

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
PENALTY = GradientPenalty(METRIC, eta=0.7)
RANDOM = [name for name in ZOO if "dropout" in name]
CASES = [
    *((name, objective) for name in ZOO if name not in RANDOM for objective in (Plain(), PENALTY)),
    *(("batch_norm_train", GradientPenalty(metric, 0.5)) for metric in (Euclidean(), DualNorm())),
    *((name, GradientPenalty(METRIC, 0.5, of="logits")) for name in ("batch_norm_train", "group_norm")),
    ("group_norm", GradientPenalty(METRIC, 0.5, of="logits", power=1)),
    ("batch_norm_train", DirectionalPenalty(lambda model, images, labels: 0.1 * images.flip(3))),
    ("residual_train", DirectionalPenalty.from_attack(FGSM(0.1))),
]
DRAWING = NoisyInputs | AdversarialTraining | Tikhonov
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective"), CASES, ids=repr)
def test_terms_gradients_and_buffers_are_those_of_the_objective(name, objective, device):
    model, (images, labels) = make(name, device), batch(device=device)
    twin = copy.deepcopy(model)
    expected = eager(objective, twin, images, labels)
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
    assert products(step_graph(Plain(), model, images, labels)[0]) == (layers, layers - 1, layers)
    assert products(step_graph(PENALTY, model, images, labels)[0]) == (2 * layers, 2 * layers - 1, 2 * layers)


def test_random_draws_are_shared_by_all_passes_and_new_in_every_step(device):
    torch.manual_seed(0)
    model, (images, labels) = Masked().to(device).double(), batch(device=device)
    fast = traced(PENALTY, model, verify=False)  # it draws in eval mode, too
    for seed in (1, 2):
        torch.manual_seed(seed)
        received = fast(images, labels)
        found = flat(gradients(model))
        torch.manual_seed(seed)
        expected = eager(PENALTY, model, images, labels)
        assert_matches(received.total, expected.total, 1e-10)
        assert_matches(found, flat(gradients(model)), 1e-10)


@pytest.mark.slow
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
    eager(PENALTY, twin, images, labels)
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
def test_a_custom_backward_pass_is_noticed(detached, said):
    torch.manual_seed(0)
    model, (images, labels) = StraightThrough(detached).double(), batch()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=said + r".* use the objective itself"):
        traced(PENALTY, model)(images, labels)
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class DetachedGate(nn.Module):
    """Its gate is a constant to autograd, but not in a trace."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        with torch.no_grad():
            gate = torch.sigmoid(4 * self.gate(x))
        return self.last(torch.tanh(self.first(x)) * gate)


@pytest.mark.parametrize("make_eta", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("eta", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("power", [1, 2])
def test_a_wrong_gradient_of_a_weak_penalty_is_noticed(make_eta, eta, power, device):
    """Beside that of the loss, it would be smaller than the rounding that is allowed."""
    torch.manual_seed(0)
    images, labels = batch(device=device, dtype=torch.float32)
    strength, model = make_eta(eta), DetachedGate().to(device)
    fast = traced(GradientPenalty(Euclidean(), strength, power=power), model)
    if isinstance(strength, float) and eta == 0:  # it stays zero
        fast(images, labels)
        return
    with pytest.raises(RuntimeError, match=r"hides what it computes from autograd \(.detach\(\), torch.no_grad\(\)\)"):
        fast(images, labels)
    assert strength == eta


@pytest.mark.parametrize("eta", [0.0, 1e-6, 0.01])
@pytest.mark.parametrize("learned", [False, True])
def test_a_weak_penalty_does_not_fail_the_comparison(eta, learned, device):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), *layers, nn.Flatten(), nn.Linear(4 * 64, CLASSES)).to(device)
    images, labels = batch(device=device, dtype=torch.float32)
    for of in ("loss", "logits", "margin"):
        strength = torch.tensor(eta, device=device, requires_grad=learned)
        traced(GradientPenalty(Euclidean(), strength, of=of), model)(images, labels)
        assert strength == torch.tensor(eta)


def test_a_batch_of_another_shape_or_mode_runs_eagerly(device):
    model, (images, labels) = make("batch_norm_train", device), batch(size=6, device=device)
    fast, twin = traced(PENALTY, model), copy.deepcopy(model)
    for size, training in ((6, True), (4, True), (6, False), (6, True)):
        model.train(training)
        twin.train(training)
        received = fast(images[:size], labels[:size])
        expected = eager(PENALTY, twin, images[:size], labels[:size])
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
        expected = eager(GradientPenalty(METRIC, strength), model, images, labels)
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
        expected = eager(objective, twin, images, labels, other)
        assert_matches(received.total, expected.total, 1e-9)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)
    for one, other_buffer in zip(model.buffers(), twin.buffers(), strict=True):
        assert_matches(one, other_buffer, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
def test_many_outputs_are_projected(coupled, device, seeded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Softplus(), nn.Flatten(), nn.Linear(72, 20))
    model, (images, labels) = model.double().to(device).train(coupled), batch(device=device)
    objective, twin, generator, other = GradientPenalty(METRIC, 0.5, of="logits"), copy.deepcopy(model), seeded(3), seeded(3)
    fast = traced(objective, model)
    for _ in range(2):
        expected = eager(objective, twin, images, labels, other)
        assert_same_step(fast(images, labels, generator), expected, model, twin, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("of", ["loss", "logits"])
def test_learned_strengths_and_graph_weights_get_their_gradients(of, power, device):
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    weights = torch.rand(12, dtype=torch.float64, device=device).add_(0.5).requires_grad_()
    eta = nn.Parameter(torch.tensor(0.6, dtype=torch.float64, device=device))
    metric = Wasserstein(PixelGraph.grid(8, 8, radius=2, weight=weights), mass=0.1)
    objective, twin = GradientPenalty(metric, eta, of=of, power=power), copy.deepcopy(model)
    fast, optimizer = FastGradients(objective, model, compile=False), torch.optim.SGD([eta, weights], 1e-3)
    for step in range(3):  # also of the values that the optimizer has moved them to
        received, found = fast(images, labels), (eta.grad.clone(), weights.grad.clone())
        optimizer.zero_grad()
        expected = eager(objective, twin, images, labels)
        assert_same_step(received, Terms(*(term.detach() for term in expected)), model, twin, 1e-9)
        for one, tensor in zip(found, (eta, weights), strict=True):
            assert_matches(one, tensor.grad, 1e-9)
        fast(images, labels, accumulate=step == 1)
        assert_matches(eta.grad, (2 if step == 1 else 1) * found[0], 1e-9)
        with torch.no_grad():
            for one, other in zip(model.buffers(), twin.buffers(), strict=True):
                one.copy_(other)
        optimizer.step()


class WithLearned(nn.Module):
    """A network with a parameter that is also the strength, or the graph weights, of its penalty."""

    def __init__(self, learned, used):
        super().__init__()
        self.inner, self.learned, self.used = smooth_net(), nn.Parameter(learned), used

    def forward(self, x):
        return self.inner(x) * (self.learned.mean() if self.used else 1)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", ["eta", "weights"])
def test_what_is_learned_may_be_a_parameter_of_the_model(kind, used):
    """Its gradients as a parameter and as a part of the penalty add up."""
    (images, labels), terms = batch(), []
    learned = torch.tensor(0.6, dtype=torch.float64) if kind == "eta" else torch.rand(12, dtype=torch.float64).add_(0.5)
    model = WithLearned(learned, used)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        graph = PixelGraph.grid(8, 8, radius=2, **({"weight": one.learned} if kind == "weights" else {}))
        objective = GradientPenalty(Wasserstein(graph, mass=0.1), one.learned if kind == "eta" else 0.5)
        step = traced(objective, one) if one is model else partial(eager, objective, one)
        terms.append(step(images, labels))
    assert_same_step(terms[0], Terms(*(term.detach() for term in terms[1])), model, twin, 1e-9)
    assert model.learned.grad is not None
    fast, expected = traced(objective, twin), 3 * twin.learned.grad
    fast(images, labels)
    for _ in range(2):
        fast(images, labels, accumulate=True)
    assert_matches(twin.learned.grad, expected, 1e-9)


@pytest.mark.parametrize(
    "objective", [DirectionalPenalty.from_attack(PGD(0.1, 0.05, 2)), DirectionalPenalty(lambda m, x, y: x)]
)
def test_a_directional_penalty_draws_from_the_generator(objective, device, seeded):
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    fast, twin, generator, other = traced(objective, model), copy.deepcopy(model), seeded(5), seeded(5)
    for _ in range(2):
        expected = eager(objective, twin, images, labels, other)
        assert_same_step(fast(images, labels, generator), expected, model, twin, 1e-9)


def test_perturbations_may_have_any_memory_layout(device, monkeypatch):
    """Compiled functions take only the strides that they were compiled for."""
    strides = []
    layouts = [lambda xi: xi[:1].expand_as(xi), torch.clone, lambda xi: xi.mT.contiguous().mT]

    def compiled(graph, on_cuda):
        def run(*tensors):
            strides.append([tensor.stride() for tensor in tensors])
            return graph(*tensors)

        return run

    def perturbation(model, images, labels):
        return layouts[0](0.1 * images)

    monkeypatch.setattr(prepared_step, "_compiled", compiled)
    model, (images, labels) = smooth_net(device), batch(device=device)
    fast, twin = FastGradients(objective := DirectionalPenalty(perturbation), model, compile=True), copy.deepcopy(model)
    while layouts:
        assert_same_step(fast(images, labels), eager(objective, twin, images, labels), model, twin, 1e-10)
        layouts.pop(0)
    assert all(found == strides[0] for found in strides)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (GradientPenalty(METRIC, 0.1, engine=FiniteDifference()), "are exact; got engine='finite_difference'"),
        (
            GradientPenalty(Wasserstein(PixelGraph.grid(8, 8, 1, weight=torch.ones(4, requires_grad=True).exp())), 0.1),
            "some that were computed from others",
        ),
        (
            GradientPenalty(METRIC, torch.tensor(0.1, requires_grad=True).exp()),
            "which must be leaves; got some that were computed",
        ),
        (NoisyInputs(METRIC, torch.tensor(0.1, requires_grad=True)), "noise with a fixed eta; .*eta.detach"),
        (
            NoisyInputs(Wasserstein(PixelGraph.grid(8, 8, 1, weight=torch.ones(4, requires_grad=True))), 0.1),
            "noise with fixed graph weights",
        ),
        (Tikhonov(METRIC, torch.tensor(0.1, requires_grad=True)), "a fixed eta and fixed graph weights"),
        (Tikhonov(METRIC, 0.1, probes=None), "a number of probes; got laplacian='additive', probes=None"),
    ],
)
def test_objectives_that_cannot_be_compiled_are_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        FastGradients(objective, smooth_net())


def test_wrapped_and_compiled_models_are_refused():
    with pytest.raises(ValueError, match="pass the model inside, or use DistributedDataParallel"):
        FastGradients(PENALTY, nn.DataParallel(smooth_net()))
    with pytest.raises(ValueError, match="pass the model as it was"):
        FastGradients(PENALTY, torch.compile(smooth_net()))


def test_bad_batches_are_refused_before_tracing():
    model, (images, labels) = smooth_net(), batch()
    with pytest.raises(ValueError, match="images"):
        traced(PENALTY, model)(-images, labels)
    with pytest.raises(ValueError, match="labels"):
        traced(PENALTY, model)(images, labels[:2])


@pytest.mark.slow
def test_equal_steps_are_differentiated_and_compiled_once(device, monkeypatch):
    made = []
    monkeypatch.setattr(compile_cache, "_cache", {})
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, examples: made.append(graph) or graph)
    images, labels = batch(device=device)

    def compilations(objective, model):
        before, twin = len(made), copy.deepcopy(model)
        received = FastGradients(objective, model, True, cuda_graph=False)(
            images, labels, torch.Generator(device).manual_seed(0)
        )
        expected = eager(objective, twin, images, labels, torch.Generator(device).manual_seed(0))
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


def test_steps_that_share_a_compiled_function_keep_their_metrics_apart(device, monkeypatch):
    monkeypatch.setattr(compile_cache, "_cache", {})
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, examples: graph)
    images, labels = batch(device=device)
    objectives = [GradientPenalty(metric, 0.5) for metric in (METRIC, Euclidean())]
    models = [smooth_net(device) for _ in objectives]
    steps = [FastGradients(o, m, True, cuda_graph=False) for o, m in zip(objectives, models, strict=True)]
    for _ in range(2):
        for objective, model, fast in zip(objectives, models, steps, strict=True):
            assert_matches(fast(images, labels).penalty, objective(model, images, labels).penalty.detach(), 1e-10)
    assert len(compile_cache._cache) == 1


@pytest.mark.slow
def test_compiled_as_one_function(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Softplus(), nn.Linear(8, CLASSES)).double().to(device)
    images, labels = batch(device=device)
    twin, fast = copy.deepcopy(model), FastGradients(PENALTY, model, compile=True)
    for _ in range(3):
        received, expected = fast(images, labels), eager(PENALTY, twin, images, labels)
        assert_matches(received.total, expected.total, 1e-9)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)
        images = images.flip(0)


@pytest.mark.slow
def test_single_precision_is_as_good_as_that_of_double_backward(device):
    """Against float64: the compiled step is off by at most twice as much as the eager one."""
    for seed in range(3):
        exact, (images, labels) = make("residual_train", device), batch(8, device, seed=seed)
        rough, rougher = copy.deepcopy(exact).float(), copy.deepcopy(exact).float()
        eager(PENALTY, exact, images, labels)
        eager(PENALTY, rough, images.float(), labels)
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
            expected = eager(PENALTY, twin, images, labels)
        assert received.total.dtype == torch.float32
        assert_matches(received.total, expected.total, 2e-2)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 5e-2)


@needs_cuda
@pytest.mark.parametrize(
    "objective",
    [
        *(Plain(), PENALTY, NoisyInputs(METRIC, 0.1), AdversarialTraining(PGD(0.1, 0.05, 3))),
        *(Tikhonov(METRIC, 0.1), Tikhonov(METRIC, 0.1, laplacian=None)),
        *(GradientPenalty(METRIC, 0.1, of="logits"), DirectionalPenalty.from_attack(FGSM(0.1))),
    ],
    ids=repr,
)
def test_captured_steps_train_like_eager_ones(objective):
    model, (images, labels) = make("batch_norm_train", "cuda"), batch(8, "cuda")
    twin = copy.deepcopy(model)
    generator, other = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    fast = FastGradients(objective, model, compile=False)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (model, twin)]
    for step in range(6):
        x = images.roll(step, 0)
        received, expected = fast(x, labels, generator), eager(objective, twin, x, labels, other)
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
def test_replays_draw_new_numbers(objective):
    model, (images, labels) = smooth_net("cuda"), batch(device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    fast = FastGradients(objective, model, compile=False)
    assert len({fast(images, labels, generator).total.item() for _ in range(5)}) == 5
