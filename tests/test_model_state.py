"""The state of a model is restored, also if the model replaces its buffers by new tensors."""

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.learning.zoo import batch, smooth_net
from wassersmooth import (
    AdversarialTraining,
    DirectionalPenalty,
    Euclidean,
    FastGradients,
    GradientPenalty,
    Normalized,
    attacks,
    evaluate,
)
from wassersmooth.learning.objective import Objective
from wassersmooth.model_state import model_lock, preserve_state


class Restless(nn.Module):
    """Has buffers that a pass changes in place, replaces, sets for the first time, and registers."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"in_place": torch.zeros(1), "replaced": torch.zeros(1), "late": None}.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        level = x.detach().mean().reshape(1)
        self.in_place.mul_(0.9).add_(0.1 * level)
        self.replaced.add_(1)  # of the tensor that is replaced next
        self.replaced = 0.9 * self.replaced + 0.1 * level
        self.late = level if self.late is None else 0.9 * self.late + 0.1 * level
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(1))
        return x * (1 + self.replaced + self.late)


def restless_net() -> nn.Sequential:
    return nn.Sequential(Restless(), smooth_net()).double()


@pytest.mark.parametrize("passes_before", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_replaced_buffers_are_restored(passes_before: int, fails: bool) -> None:
    model, (images, _) = restless_net(), batch()
    for _ in range(passes_before):
        model(images)
    held = dict(model[0]._buffers)
    values = {name: None if buffer is None else buffer.clone() for name, buffer in held.items()}
    try:
        with preserve_state(model, images.device):
            model(images)
            model(1 - images)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    for name, buffer in held.items():
        assert model[0]._buffers[name] is buffer
        assert buffer is None or torch.equal(buffer, values[name])
    assert hasattr(model[0], "cache")  # the module may have other attributes that rely on it


def test_attacks_leave_replaced_buffers() -> None:
    model, (images, labels) = restless_net(), batch()
    model(images)
    before = [buffer.clone() for buffer in model.buffers()]
    for attack in (attacks.FGSM(0.1), attacks.PGD(0.1, 0.02, 3)):
        attack(model, images, labels)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


def test_adversarial_training_updates_replaced_buffers_once() -> None:
    model, twin, (images, labels) = restless_net(), restless_net(), batch()
    attack = attacks.PGD(0.1, 0.02, 7, random_start=False)
    twin(attack(copy.deepcopy(twin), images, labels))
    AdversarialTraining(attack)(model, images, labels)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))


class Counting(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(1)
        return x


@pytest.mark.parametrize("engine", ["finite_difference", "forward_mode", "double_backward"])
def test_a_buffer_that_two_layers_share_is_updated_as_in_one_pass(engine: str) -> None:
    first, second, (images, labels) = Counting(), Counting(), batch()
    second.passes = first.passes
    model = nn.Sequential(first, second, smooth_net()).double()
    second.passes = first.passes  # double() has made two copies
    GradientPenalty(Euclidean(), 0.1, engine=engine)(model, images, labels)
    assert first.passes is second.passes
    assert first.passes.item() == 2


class Expanded(nn.Module):
    """Has a buffer that is one number expanded to eight, and can count passes in it."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64).expand(8).view(1, 1, 1, 8))
        self.network, self.counts = smooth_net(), counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.scale[..., :1].add_(1)
        scores: Tensor = self.network(x * self.scale)
        return scores


ATTACK = attacks.PGD(0.1, 0.02, 2)


@pytest.mark.parametrize(
    "objective",
    [
        AdversarialTraining(ATTACK),
        DirectionalPenalty.from_attack(ATTACK),
        GradientPenalty(Euclidean(), 0.3, engine="forward_mode"),
    ],
    ids=repr,
)
def test_models_with_expanded_buffers_can_be_trained(objective: Objective) -> None:
    model, (images, labels) = Expanded(), batch()
    plain = nn.Sequential(model.network)
    expected = objective(plain, images, labels, torch.Generator().manual_seed(0))
    torch.testing.assert_close(objective(model, images, labels, torch.Generator().manual_seed(0)), expected)
    if not isinstance(objective, DirectionalPenalty):
        fast = FastGradients(objective, model, compile=False)
        torch.testing.assert_close(fast(images, labels, torch.Generator().manual_seed(0)).loss, expected.loss)
    assert model.scale.stride() == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_step_with_an_expanded_buffer_compiles() -> None:
    objective, model, (images, labels) = (
        GradientPenalty(Euclidean(), 0.3, engine="forward_mode"),
        Expanded(),
        batch(),
    )
    step = torch.compile(lambda x, y: objective(model, x, y).total, backend="aot_eager")
    torch.testing.assert_close(step(images, labels), objective(model, images, labels).total)


def test_an_expanded_buffer_is_restored() -> None:
    model, (images, labels) = Expanded(counts=True), batch()
    ATTACK(model, images, labels)
    assert bool((model.scale == 1).all())
    assert evaluate(Expanded(), images, labels, suite="quick").entries


class Growing(nn.Module):
    """Enlarges a buffer in place to the size of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not len(self.cache):
            self.cache.resize_(4).fill_(1.0)
        return self.linear(x.flatten(1) * self.cache)


def test_a_buffer_that_a_pass_enlarges_is_restored() -> None:
    model, images, labels = Growing(), torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    attacks.FGSM(0.1)(model, images, labels)
    evaluate(model, images, labels, suite="quick", seed=0)
    assert model.cache.shape == (0,)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    GradientPenalty(Euclidean(), 0.1, engine="forward_mode")(model, images, labels).total.backward()
    assert model.cache.tolist() == [1.0] * 4


@pytest.mark.parametrize("training", [True, False])
def test_an_attack_does_not_spoil_the_backward_pass_of_an_earlier_forward_pass(training: bool) -> None:
    """As in TRADES: the clean outputs first, then an attack, then one backward pass of both."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 3)).double().train(training)
    images, labels = batch()
    clean = nn.functional.cross_entropy(model(images), labels)
    attacked = AdversarialTraining(attacks.FGSM(8 / 255))(model, images, labels)
    (clean + attacked.total).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_objective_that_needs_gradients_refuses_inference_mode() -> None:
    model, (images, labels) = smooth_net(), batch()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inference_mode\(\) forbids; use torch.no_grad"):
        GradientPenalty(Euclidean(), 0.1)(model, images, labels)
    with torch.no_grad():
        assert GradientPenalty(Euclidean(), 0.1)(model, images, labels).penalty > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_model_can_be_attacked() -> None:
    images, labels = batch()
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 3)).double().eval()
    attack = attacks.FGSM(8 / 255)
    torch.testing.assert_close(attack(torch.jit.trace(model, images), images, labels), attack(model, images, labels))


class Meeting(nn.Module):
    """Delays each pass; the first one until a second has begun, or for 0.3 seconds if none can begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)
        self.arrived, self.others = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.arrived.is_set():
            self.others.set()
        self.arrived.set()
        self.others.wait(0.3)
        scores: Tensor = self.layer(x.flatten(1))
        return scores


def in_thread(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: Normalized(model, 0.5, 0.5), nn.DataParallel])
def test_two_attacks_in_threads_leave_the_model_as_it_was(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The second, longer one must not save the flags that the first has cleared."""
    model, images, labels = Meeting(), torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    first = in_thread(lambda: attacks.FGSM(0.1)(model, images, labels))
    assert model.arrived.wait(10)
    second = in_thread(lambda: attacks.PGD(0.1, 0.01, 20)(wrap(model), images, labels))
    first.join(30)
    second.join(30)
    assert not first.is_alive()
    assert not second.is_alive()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_models_do_not_wait_and_the_lock_is_reentrant() -> None:
    model, other, (images, labels) = smooth_net(), smooth_net(), batch()
    with preserve_state(model, images.device), preserve_state(nn.Sequential(model), images.device):
        meanwhile = in_thread(lambda: attacks.FGSM(0.1)(other, images, labels))
        meanwhile.join(30)
        assert not meanwhile.is_alive()
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_lock_is_released_after_an_exception_and_is_not_shared_with_copies() -> None:
    model, (images, _) = smooth_net(), batch()
    with pytest.raises(ZeroDivisionError), preserve_state(model, images.device):
        raise ZeroDivisionError
    with preserve_state(model, images.device):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert model_lock(twin) is not model_lock(model)
    taken = threading.Event()
    thread = in_thread(lambda: taken.set() if model_lock(model).acquire(timeout=10) else None)
    thread.join(30)
    assert taken.is_set()
