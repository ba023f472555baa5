"""Fast gradients of models that are unusual, or change between steps: right, eager, or refused."""

import copy
import gc
import pickle
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.steps import assert_same_step, eager, gradients, traced
from tests.learning.zoo import CLASSES, DropsLayers, Masked, batch, make, smooth_net
from tests.robustness.small_models import Around
from wassersmooth import PixelGraph, Wasserstein
from wassersmooth.learning import gradient_gap
from wassersmooth.learning.compiled import compile_cache, prepared_step
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.compiled.functional_model import FunctionalModel
from wassersmooth.learning.compiled.joint_graph import StepArguments, trace_elementary
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.robustness.attacks import FGSM

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
PENALTY = GradientPenalty(METRIC, eta=0.7)


def assert_same(fast, objective, model, images, labels, tolerance=1e-9):
    """A step of ``fast`` is the step of the objective on a twin of the model."""
    twin = copy.deepcopy(model)
    expected = eager(objective, twin, images, labels)
    assert_same_step(fast(images, labels), expected, model, twin, tolerance)
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in twin.parameters()]


class TwoNames(nn.Module):
    """One layer and one norm, each under two names, and one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.tied = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.b, self.again, self.last = self.a, self.norm, nn.Linear(64, CLASSES)
        self.tied.weight = self.a.weight

    def forward(self, x):
        hidden = torch.tanh(self.again(self.b(torch.tanh(self.norm(self.a(x.flatten(1)))))))
        return self.last(torch.tanh(self.tied(hidden)))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2 * 64, CLASSES)

    def forward(self, x):
        return self.last(torch.fft.irfft2(torch.fft.rfft2(self.first(x)) ** 2, s=(8, 8)).flatten(1))


class Arithmetic(nn.Module):
    """Sums with a factor, a variance over everything, and a weight of another precision."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.shift = nn.Linear(64, 8), nn.Linear(8, CLASSES), nn.Parameter(torch.rand(8))

    def forward(self, x):
        hidden = torch.tanh(self.first(x.flatten(1)))
        hidden = torch.add(hidden, hidden * hidden, alpha=2) - torch.var_mean(hidden)[0]
        return self.last(torch.sub(hidden, hidden.tanh(), alpha=0.5).float() + self.shift)


@pytest.mark.parametrize("objective", [Plain(), PENALTY, GradientPenalty(METRIC, 0.5, loss="square")], ids=repr)
@pytest.mark.parametrize("kind", [TwoNames, Spectral, Arithmetic])
def test_unusual_models(kind, objective):
    torch.manual_seed(0)
    model, (images, labels) = kind().double(), batch()
    fast = traced(objective, model, verify=False)
    for _ in range(2):
        assert_same(fast, objective, model, images, labels, 1e-6 if kind is Arithmetic else 1e-9)


def test_calling_a_model_with_two_names_for_a_layer_leaves_it_as_it_was():
    torch.manual_seed(0)
    model, (images, _) = TwoNames().double(), batch()
    before, kept = copy.deepcopy(model.state_dict()), [*model.parameters(), *model.buffers()]
    FunctionalModel(model)(images)
    GradientPenalty(METRIC, 0.5, engine="forward_mode")(model, images, batch()[1])
    assert all(one is other for one, other in zip((*model.parameters(), *model.buffers()), kept, strict=True))
    assert_matches(model.a.weight, before["a.weight"], 0)


def frozen(model):
    model[0].weight.requires_grad_(False)


def moved(model):
    model.float().double()


def assigned(model):
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()}, assign=True)


def rewrapped(model):
    model[0].weight = nn.Parameter(model[0].weight.data)


def replaced(model):
    model[-1] = nn.Linear(model[-1].in_features, CLASSES).double()


@pytest.mark.parametrize("name", ["batch_norm_train", "pooling"])
@pytest.mark.parametrize("change", [frozen, moved, assigned, rewrapped, replaced])
def test_a_model_that_changes_between_steps_runs_eagerly(name, change):
    model, (images, labels) = make(name), batch()
    fast = traced(PENALTY, model)
    assert_same(fast, PENALTY, model, images, labels)
    change(model)
    assert_same(fast, PENALTY, model, images, labels)


def test_a_model_may_move_before_the_first_call():
    model, (images, labels) = make("batch_norm_train", dtype=torch.float32), batch()
    fast = traced(PENALTY, model)
    model.double()
    for _ in range(2):
        assert_same(fast, PENALTY, model, images, labels)


def test_images_may_have_any_memory_layout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 64, 8), nn.Softplus(), nn.Linear(8, CLASSES)).double()
    images, labels = torch.rand(4, 8, 8, 2, dtype=torch.float64).permute(0, 3, 1, 2), batch()[1]
    fast = traced(PENALTY, model)
    for given in (images, images.contiguous()):
        assert_same(fast, PENALTY, model, given, labels)


def test_gradients_share_no_memory():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q, self.r = (nn.Parameter(torch.rand(8, 8)) for _ in range(3))
            self.last = nn.Linear(64, CLASSES)

        def forward(self, x):
            return self.last((x * (self.p + self.q)).flatten(1)) + self.r.sum()

    torch.manual_seed(0)
    model, (images, labels) = Shared().double(), batch()
    twin = copy.deepcopy(model)
    loss = Plain(lambda outputs, labels: outputs.square().sum(1))
    traced(loss, model)(images, labels)
    loss(twin, images, labels).total.backward()
    for net in (model, twin):
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)


def test_a_gradient_that_is_constant_is_a_gradient():
    """The loss of a critic is linear in its last bias."""
    model, (images, labels) = smooth_net(), batch()
    objective = GradientPenalty(METRIC, 0.5, loss=lambda outputs, labels: outputs.sum(1))
    assert_same(traced(objective, model), objective, model, images, labels)


def test_gradients_from_before_do_not_stay():
    model, (images, labels) = smooth_net(), batch()
    model.unused = nn.Parameter(torch.ones(2))
    model.unused.grad = torch.ones(2)
    traced(PENALTY, model)(images, labels)
    assert model.unused.grad is None


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, CLASSES)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.flatten(1).detach().mean(0)
        return self.last(torch.tanh(x.flatten(1)))


def test_what_cannot_be_followed_is_refused():
    images, labels = batch()
    with pytest.raises(RuntimeError, match="replaces its buffers, where it should change them in place"):
        traced(Plain(), Replacing().double())(images, labels)
    with pytest.raises(RuntimeError, match="replaces its buffers"):  # also where random draws leave nothing to compare
        traced(Plain(), nn.Sequential(nn.Dropout(0.5), Replacing()).double())(images, labels)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, CLASSES)).double()
    with pytest.raises(RuntimeError, match="draws random numbers, which several probes would have to share: probes=1"):
        traced(Tikhonov(METRIC, 0.1, probes=2), model)(images, labels)
    with pytest.raises(ValueError, match="non-negative"):
        traced(PENALTY, smooth_net(), verify=False)(images - 1, labels)
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="eta must be on the device of the images, cuda"):
            traced(GradientPenalty(METRIC, torch.tensor(0.1)), smooth_net("cuda"))(images.cuda(), labels.cuda())


def test_weights_that_are_cached_are_refused():
    """A trace took them for constants, and their parameters silently had no gradient."""
    model, (images, labels) = nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, CLASSES))).double(), batch()
    fast = traced(PENALTY, model)
    with parametrize.cached(), pytest.raises(ValueError, match=r"inside parametrize.cached\(\); call outside$"):
        fast(images, labels)
    assert_same(fast, PENALTY, model, images, labels)


def test_a_gradient_that_is_not_a_number_is_not_believed(monkeypatch):
    model, (images, labels) = smooth_net(), batch()
    fast = traced(Plain(), model)
    kind = prepared_step.STEPS[type(None)]._replace(make_step=lambda *given: _nan_step)
    monkeypatch.setitem(prepared_step.STEPS, type(None), kind)
    with pytest.raises(RuntimeError, match="off by nan"):
        fast(images, labels)


def _nan_step(*given):
    arguments = StepArguments(*given)
    zero = arguments.images.sum() * 0
    return zero, zero, [p * torch.nan for p in arguments.parameters], [b + 0 for b in arguments.buffers], []


def test_a_custom_attack_may_compute_gradients():
    def attack(model, images, labels, generator=None):
        x = images.detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(x), labels), x)
        return (x + 0.1 * g.sign()).detach()

    model, (images, labels) = smooth_net(), batch()
    objective = AdversarialTraining(attack)
    fast = traced(objective, model)
    for _ in range(2):
        assert_same(fast, objective, model, images, labels)


@pytest.mark.parametrize("penalty", [None, PENALTY], ids=repr)
def test_attacks_in_half_precision(penalty, device):
    model, (images, labels) = make("batch_norm_train", device, torch.float32), batch(8, device, torch.float32)
    twin, objective = copy.deepcopy(model), AdversarialTraining(FGSM(0.1), penalty=penalty)
    with torch.autocast(device, torch.bfloat16):
        received = traced(objective, model)(images, labels)
        expected = objective(twin, images, labels)
    expected.total.backward()
    assert_matches(received.total, expected.total.detach(), 2e-2)
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 5e-2)


def test_hooks_of_parameters_are_refused_before_anything_is_called():
    """A hook may be an optimizer that steps as soon as a gradient is there."""
    model, called = smooth_net(), []
    late = traced(PENALTY, model)
    list(model.parameters())[-1].register_post_accumulate_grad_hook(called.append)
    for attempt in (lambda: traced(PENALTY, model), lambda: late(*batch())):
        with pytest.raises(ValueError, match=r"hooks of parameters would not run; got some on \w+\.bias; call the objective"):
            attempt()
    other = smooth_net()
    next(other.parameters()).register_hook(lambda g: 0 * g)
    with pytest.raises(ValueError, match="hooks of parameters"):
        traced(PENALTY, other)
    assert not called


@pytest.mark.parametrize(
    "change",
    [
        lambda model: next(model.parameters()).register_hook(lambda g: 0 * g),
        lambda model: next(model.children()).register_forward_hook(lambda module, given, found: 0.5 * found),
        lambda model: next(model.children()).register_forward_pre_hook(lambda module, given: 0.5 * given[0]),
        lambda model: setattr(next(model.children()), "forward", lambda x: F.conv2d(x, next(model.parameters()))),
    ],
    ids=["gradient", "forward", "before forward", "another forward"],
)
def test_hooks_added_later_take_effect(change):
    model, (images, labels) = (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, CLASSES)).double(),
        batch(),
    )
    fast = traced(PENALTY, model)
    fast(images, labels)
    change(model)
    received = fast(images, labels)
    found = flat(gradients(model))
    model.zero_grad()
    expected = PENALTY(model, images, labels)
    expected.total.backward()
    assert_matches(received.total, expected.total.detach(), 1e-12)
    assert_matches(found, flat(gradients(model)), 1e-12)


def normalized_in_place(x):
    """Where it lies."""
    return x.sub_(0.5).div_(0.25)


@pytest.mark.parametrize(
    "objective",
    [
        *(Plain(), PENALTY, AdversarialTraining(FGSM(0.05)), NoisyInputs(METRIC, 0.1), Tikhonov(METRIC, 0.3)),
        *(GradientPenalty(METRIC, 0.7, engine=engine) for engine in ("forward_mode", "finite_difference")),
    ],
    ids=repr,
)
def test_models_that_write_into_their_input_do_not_change_the_images(objective):
    inner, (images, labels) = smooth_net(), batch()
    before, found = images.clone(), []
    for model in (Around(inner, normalized_in_place), Around(inner, lambda x: (x - 0.5) / 0.25)):
        model.zero_grad()
        total = objective(model, images, labels, torch.Generator().manual_seed(0)).total
        total.backward()
        found.append((total.detach(), flat(gradients(model))))
    for received, expected in zip(*found, strict=True):
        assert_matches(received, expected, 1e-9)
    if not (isinstance(objective, GradientPenalty) and objective.engine == "finite_difference"):
        with pytest.raises(RuntimeError, match=r"cannot be traced \(.*in-place operation.*use the objective itself"):
            traced(objective, Around(inner, normalized_in_place))(images, labels)
    assert torch.equal(images, before)


@pytest.mark.parametrize("objective", [Plain(), PENALTY, Tikhonov(METRIC, 0.3)], ids=repr)
def test_a_model_without_anything_to_train_is_refused(objective):
    """Every gradient would be None, and no optimizer would complain."""
    model, (images, labels) = smooth_net(), batch()
    fast = traced(objective, model.requires_grad_(False))
    with pytest.raises(ValueError, match=r"got no parameter that requires grad; use model\.requires_grad_\(True\)$"):
        fast(images, labels)
    model.requires_grad_(True)
    fast(images, labels)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="got no parameter that requires grad"):
        fast(images, labels)


def test_outputs_that_depend_on_no_parameter_are_refused():
    with pytest.raises(ValueError, match=r"must depend on a parameter .* got a gradient for none; look for \.detach\(\)"):
        traced(Plain(), Around(smooth_net(), after=torch.detach))(*batch())


@pytest.mark.parametrize("objective", [PENALTY, NoisyInputs(METRIC, 0.1)], ids=repr)
def test_nothing_is_kept_alive(objective):
    model, (images, labels) = smooth_net(), batch()
    fast = traced(objective, model)
    fast(images, labels)
    gone = weakref.ref(fast)
    gc.disable()
    try:
        del fast
        assert gone() is None
    finally:
        gc.enable()


def test_the_cache_of_compiled_functions_is_limited(monkeypatch):
    monkeypatch.setattr(compile_cache, "_cache", {})
    monkeypatch.setattr(compile_cache, "MAX_ENTRIES", 3)
    made, graphs = [], {n: trace_elementary(partial(torch.add, alpha=n), (torch.rand(2), torch.rand(2))) for n in range(1, 5)}

    def ask(n):
        return compile_cache.get_or_compile(graphs[n], lambda: made.append(n) or str(n))

    assert [ask(n) for n in (1, 2, 3, 1, 4, 1, 2)] == ["1", "2", "3", "1", "4", "1", "2"]
    assert made == [1, 2, 3, 4, 2]  # 2 was dropped for 4: it was the least recently used
    assert len(compile_cache._cache) == 3


def test_constants_of_any_kind_have_a_fingerprint():
    def function(x):
        return x + torch.tensor([1.0, 2.0], dtype=torch.bfloat16), x + torch.tensor(3.0)

    graphs = [trace_elementary(function, (torch.rand(2),)) for _ in range(2)]
    assert compile_cache._fingerprint(graphs[0]) == compile_cache._fingerprint(graphs[1])


def test_threads_share_compiled_functions(monkeypatch):
    """Two threads may drop the oldest entry at once; and the second to compile takes the result of the first."""
    monkeypatch.setattr(compile_cache, "_cache", {})
    monkeypatch.setattr(compile_cache, "MAX_ENTRIES", 2)
    monkeypatch.setattr(compile_cache, "_fingerprint", str)  # takes most of the time
    together = threading.Barrier(8, timeout=60)

    def compile_at_once():
        together.wait()
        return object()

    def ask_for_many(_):
        for turn in range(3000):
            assert compile_cache.get_or_compile(turn % 7, lambda turn=turn: turn % 7) == turn % 7

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(lambda _: compile_cache.get_or_compile("same", compile_at_once), range(8)))) == 1
            list(pool.map(ask_for_many, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(compile_cache._cache) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [GradientPenalty(METRIC, 3.0), Tikhonov(METRIC, 3.0), Tikhonov(METRIC, 3.0, laplacian=None)]
)
def test_differentiable_draws_are_refused(objective, device):
    """Treated as constants, as other draws are, they would give gradients that are off by a third."""
    images, labels = batch(device=device)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.RReLU(), nn.Linear(16, 3)).double().to(device)
    with pytest.raises(
        RuntimeError, match=r"cannot be traced \(aten.rrelu_with_noise_functional.default draws .* use the objective"
    ):
        traced(objective, model)(images, labels)
    traced(Plain(), model)(images, labels)  # needs no tangents


def test_an_eta_that_requires_grad_from_now_on_runs_eagerly(device):
    images, labels = batch(device=device)
    eta = torch.tensor(0.5, dtype=torch.float64, device=device)
    gradients = traced(GradientPenalty(METRIC, eta), smooth_net(device))
    gradients(images, labels)
    assert eta.grad is None
    eta.requires_grad_()
    gradients(images, labels)
    assert eta.grad is not None


class Holding(nn.Module):
    """A network with its own way to its gradients in it."""

    def __init__(self):
        super().__init__()
        self.network = smooth_net()
        self.fast = FastGradients(PENALTY, self, compile=False, verify=False)

    def forward(self, x):
        return self.network(x)


class Telling(FastGradients):
    """A subclass with other arguments."""

    def __init__(self, model, words):
        super().__init__(PENALTY, model, compile=False)
        self.words = words


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"])
def test_copies_of_a_module_that_holds_it_and_of_a_subclass(make_copy):
    images, labels = batch()
    holding = Holding()
    holding.fast(images, labels)
    twin = make_copy(holding)
    assert twin.fast.model is twin
    assert_same(twin.fast, PENALTY, twin, images, labels)
    assert make_copy(Telling(smooth_net(), "as before")).words == "as before"


class Gated(nn.Module):
    """A gate that is detached, which tracing does not see; and dropout, so that no two passes are the same."""

    def __init__(self, rate):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(64, 16), nn.Dropout(rate), nn.Linear(16, CLASSES)

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.last(self.drop(hidden * torch.sigmoid(3 * hidden.detach())))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_model_that_draws_is_compared_in_eval_mode(rate):
    images, labels = batch()
    torch.manual_seed(0)
    model = Gated(rate).double()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="the traced gradient of this model is off by"):
        FastGradients(PENALTY, model, compile=False)(images, labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    FastGradients(PENALTY, nn.Sequential(smooth_net(), nn.Dropout(rate)), compile=False)(images, labels)


def test_a_model_that_draws_in_eval_mode_too_is_told_to_be_unverified():
    model, (images, labels) = Masked().double(), batch()
    with pytest.warns(UserWarning, match="draws random numbers in eval mode, too, so .* could not be compared"):
        FastGradients(PENALTY, model, compile=False)(images, labels)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_that_torch_does_not_draw_are_refused(draw):
    """They would be constants of the trace, and the comparison with an eager step may draw equal ones."""
    for loss in (None, lambda outputs, labels: draw() * outputs.square().sum(1)):
        model, (images, labels) = DropsLayers(draw if loss is None else lambda: 1.0), batch()
        fast = traced(Plain() if loss is None else Plain(loss), model)
        state = random.getstate()
        with pytest.raises(RuntimeError, match=r"draws random numbers by Python or NumPy, .* repeat\); use the objective"):
            fast(images, labels)
        assert random.getstate() == state


class Fragile(nn.Module):
    """Fails in eval mode, where a model with dropout is compared."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, CLASSES))

    def forward(self, x):
        if not self.training:
            raise RuntimeError("no evaluation here")
        return self.layers(x)


def test_a_comparison_that_fails_is_not_swallowed():
    model, (images, labels) = Fragile().double(), batch()
    with pytest.raises(RuntimeError, match="no evaluation here"):
        FastGradients(PENALTY, model, compile=False)(images, labels)
    FastGradients(PENALTY, model, compile=False, verify=False)(images, labels)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))], ids=["deepcopy", "pickle"]
)
def test_copies_prepare_themselves_again(make_copy):
    images, labels = batch()
    fast = FastGradients(PENALTY, smooth_net(), compile=False, verify=False)
    fast(images, labels)
    twin = make_copy(fast)
    assert (twin.prepared, twin.compile, twin.cuda_graph, twin.verify) == (False, False, True, False)
    assert twin.model is not fast.model
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter.mul_(1.5)
    assert_same(twin, PENALTY, twin.model, images, labels)
    assert twin.prepared
    assert_same(fast, PENALTY, fast.model, images, labels)


def test_kinks_do_not_fail_the_comparison_in_bfloat16(monkeypatch):
    """The eager gradient of a deep network with relu is as far from the exact one as the fast gradient is."""
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 1, 1), *layers, nn.Flatten(), nn.Linear(4 * 64, CLASSES))
    images, labels = batch()
    gaps, measured = [], gradient_gap.gap_between
    monkeypatch.setattr(gradient_gap, "gap_between", lambda a, b: gaps.append(measured(a, b)) or gaps[-1])
    with torch.autocast("cpu", torch.bfloat16):
        FastGradients(PENALTY, model)(images.float(), labels)
    fast_to_eager, in_full_precision, fast, eager = (gap.relative for gap in gaps)
    assert fast_to_eager > gradient_gap.LOW_PRECISION.relative
    assert in_full_precision < 1e-3
    assert fast < 2 * eager
