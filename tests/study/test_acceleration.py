"""Faster steps are the eager step: they fall back to it with a reason, and interleaved runs do not disturb each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.study.small_studies import CPU, SILENT, tiny_run, tiny_study
from wassersmooth import Euclidean
from wassersmooth.learning.compiled import fast_gradients, prepared_step
from wassersmooth.learning.gradient_gap import DifferentGradientsError
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import GradientPenalty, Plain
from wassersmooth.study import acceleration, checkpoints, experiment
from wassersmooth.study.acceleration import (
    EagerStep,
    FastStep,
    apply_settings,
    describe,
    fast_options,
    interleave,
    training_step,
)
from wassersmooth.study.config import Machine
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run
from wassersmooth.study.training import TrainingState

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def small_eager_step(objective: Objective) -> EagerStep:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(144, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return EagerStep(model, objective, optimizer, torch.Generator().manual_seed(0), nullcontext())


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("no kernel for this\nand a long story")


def differ(*_: object, **__: object) -> None:
    raise DifferentGradientsError("no kernel for this")


@pytest.mark.parametrize("fail", [refuse, differ])
def test_a_step_that_cannot_be_prepared_falls_back_permanently_and_says_why(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None]
) -> None:
    images, labels = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
    calls = []

    def prepare(*_: object, **__: object) -> None:
        calls.append("fast")
        fail()

    def count(*_: object) -> None:
        calls.append("eager")

    eager = small_eager_step(Plain())
    eager.optimizer.register_step_post_hook(count)
    step = FastStep(eager, compile=False, cuda_graph=False)
    monkeypatch.setattr(fast_gradients.FastGradients, "_prepare", prepare)
    with pytest.warns(UserWarning, match="continues with the eager step, not the fast one: no kernel for this$"):
        step(images, labels, 1.0)
    step(images, labels, 1.0)
    assert calls == ["fast", "eager", "eager"]
    assert step.gradients is None


def test_errors_about_the_data_do_not_fall_back() -> None:
    step = FastStep(small_eager_step(Plain()), compile=False, cuda_graph=False)
    with pytest.raises(ValueError, match="finite"):
        step(torch.full((6, 1, 8, 8), torch.nan, dtype=torch.float64), torch.arange(6) % 3, 1.0)
    assert step.gradients is not None


@pytest.mark.parametrize("broken", ["optimizer", "gradients"])
def test_a_step_that_fails_once_it_is_prepared_does_not_fall_back(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    images, labels = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
    eager = small_eager_step(Plain())
    step = FastStep(eager, compile=False, cuda_graph=False)
    step(images, labels, 1.0)
    gradients = step.gradients
    monkeypatch.setattr(*((eager.optimizer, "step") if broken == "optimizer" else (gradients, "_prepared_step")), refuse)
    with pytest.raises(RuntimeError, match="no kernel"):
        step(images, labels, 1.0)
    assert step.gradients is gradients, "its failure has another reason"


@pytest.mark.parametrize("attack", ["l2-adversarial", "pgd7"])
def test_the_fast_step_under_attack_is_the_eager_one(attack: str) -> None:
    objective = Regularizer.parse(f"wasserstein+{attack}:eta=0.3,radius=1,epsilon=0.05").objective((8, 8), "double_backward")
    ends = []
    for fast in (False, True):
        torch.manual_seed(0)
        eager = small_eager_step(objective)
        step = FastStep(eager, compile=False, cuda_graph=False) if fast else eager
        for _ in range(3):
            images, labels = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
            _, penalty = step(images, labels, 1.0)
            assert penalty > 0
        ends.append(torch.cat([tensor.detach().flatten().double() for tensor in eager.model.state_dict().values()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_several_processes_take_the_fast_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, examples: graph)  # only traced: compiling takes long
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ends = []
        for fast in (False, True):
            torch.manual_seed(0)
            eager = small_eager_step(GradientPenalty(Euclidean(), 0.3))
            eager.model = DistributedDataParallel(eager.model)
            given = (eager.model, eager.objective, eager.optimizer, eager.noise, Machine(compile=fast), torch.device("cpu"))
            step = training_step(*given)
            assert isinstance(step, FastStep) == fast
            for weight in (1.0, 1.0, 1.2, 1.0):  # a batch that cannot be divided has a weight
                step(torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3, weight)
            ends.append(torch.cat([tensor.detach().flatten().double() for tensor in eager.model.state_dict().values()]))
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)
    finally:
        dist.destroy_process_group()


def test_on_a_cpu_the_default_step_is_the_eager_one() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for machine in (Machine(), Machine(cuda_graph=True)):
        assert isinstance(training_step(model, Plain(), optimizer, torch.Generator(), machine, torch.device("cpu")), EagerStep)


@pytest.mark.parametrize(("precision", "allowed"), [("float32", False), ("tf32", True), ("bfloat16", True)])
def test_precision_sets_tf32(precision: str, allowed: bool) -> None:
    apply_settings(Machine(precision=precision))  # type: ignore[arg-type]
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed


def test_bfloat16_trains(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, precision="bfloat16")
    state = TrainingState(run.config, loaded, CPU)
    step = state.build_step()
    images, labels = loaded.train.images[:32], loaded.train.labels[:32]
    losses = [step(images, labels, 1.0)[0].item() for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype == torch.float32 for p in state.model.parameters())


def test_interleaved_runs_end_as_they_would_alone(tmp_path: Path) -> None:
    regularizers = ("none", "euclidean:eta=0.2", "wasserstein-noise:eta=0.05,radius=1")
    alone = tiny_study(tmp_path, regularizers=regularizers, augment=True)
    together = dataclasses.replace(alone, machine=dataclasses.replace(alone.machine, parallel=2))
    experiment.train(alone, "tiny", tmp_path / "alone", CPU, SILENT)
    experiment.train(together, "tiny", tmp_path / "together", CPU, SILENT)
    for config in alone.runs("tiny"):
        first, second = (
            checkpoints.load(Run.of(tmp_path / name, config).folder / "model.safetensors").tensors
            for name in ("alone", "together")
        )
        assert all(first[name].equal(second[name]) for name in first)


def test_interleaved_runs_have_separate_random_states_and_the_limit_holds() -> None:
    running: set[int] = set()
    most = 0

    def work(number: int, drawn: list[float]) -> Iterator[None]:
        nonlocal most
        torch.manual_seed(number)
        running.add(number)
        for _ in range(4):
            most = max(most, len(running))
            drawn.append(torch.rand(()).item())
            yield
        running.remove(number)

    drawn: list[list[float]] = [[], [], [], []]
    interleave([work(k, drawn[k]) for k in range(4)], torch.device("cpu"), 2)
    assert most == 2
    for number, values in enumerate(drawn):
        torch.manual_seed(number)
        assert values == torch.rand(4).tolist()


def fast_and_eager(tmp_path: Path, regularizer: str) -> tuple[EagerStep, FastStep, torch.Tensor, torch.Tensor]:
    run, loaded = tiny_run(tmp_path, regularizers=(regularizer,))
    eager, traced = (TrainingState(run.config, loaded, CPU).build_step() for _ in range(2))
    assert isinstance(eager, EagerStep)
    assert isinstance(traced, EagerStep)
    images, labels = loaded.train.images[:8], loaded.train.labels[:8]
    return eager, FastStep(traced, compile=False, cuda_graph=False), images, labels


@pytest.mark.parametrize(
    "regularizer",
    [
        *("none", "wasserstein:eta=0.3,radius=2", "uniform:eta=0.3,radius=2"),
        *("wasserstein-noise:eta=0.1,radius=2", "tikhonov-curvature:eta=0.3,radius=2"),
    ],
)
def test_the_fast_step_is_the_eager_step(tmp_path: Path, regularizer: str) -> None:
    eager, fast, images, labels = fast_and_eager(tmp_path, regularizer)
    for size in (8, 8, 5):  # a smaller last batch takes the eager step
        expected = eager(images[:size], labels[:size], 1.0)
        torch.testing.assert_close(fast(images[:size], labels[:size], 1.0), expected, rtol=1e-4, atol=1e-6)


def test_a_weighted_batch_takes_the_eager_step(tmp_path: Path) -> None:
    eager, fast, images, labels = fast_and_eager(tmp_path, "euclidean:eta=0.3")
    torch.testing.assert_close(fast(images, labels, 0.5), eager(images, labels, 0.5))


@pytest.mark.slow
def test_training_curves_of_the_fast_step_and_of_double_backward_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over whole epochs, on the same batches: the difference is rounding, far below that between two seeds."""
    monkeypatch.setattr(acceleration, "fast_options", lambda machine, device: (bool(machine.compile), False))
    monkeypatch.setattr(prepared_step.compile_cache, "_cache", {})
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, examples: graph)  # only traced: compiling takes long
    curves = {}
    for name, compile, seed in (("fast", True, 0), ("double backward", False, 0), ("another seed", False, 1)):
        study = tiny_study(tmp_path, regularizers=("wasserstein:eta=0.3,radius=2",), epochs=3, compile=compile, seeds=(seed,))
        (run,) = experiment.train(study, "tiny", tmp_path / name, CPU, SILENT)
        curves[name] = torch.tensor([[row["loss"], row["penalty"]] for row in run.metrics()])
    gap = (curves["fast"] - curves["double backward"]).abs().max()
    assert gap < 1e-3
    assert gap < 0.05 * (curves["another seed"] - curves["double backward"]).abs().max()


def test_a_model_that_cannot_be_traced_falls_back_and_trains(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, compile=True)
    state = TrainingState(run.config, loaded, CPU)

    def decides_by_value(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if float(inputs[0].sum()) < 0:
            raise AssertionError

    state.model.register_forward_pre_hook(decides_by_value)
    step = state.build_step()
    with pytest.warns(UserWarning, match="the eager step, not the fast one: this model cannot be traced"):
        step(loaded.train.images[:8], loaded.train.labels[:8], 1.0)
    assert all(p.grad is not None for p in state.model.parameters())


@pytest.mark.parametrize(
    ("machine", "device", "expected"),
    [
        (Machine(), "cpu", (False, False)),
        (Machine(compile=True, cuda_graph=True), "cpu", (True, False)),
        (Machine(), "cuda", (True, True)),
        (Machine(compile=False, cuda_graph=False), "cuda", (False, False)),
        (Machine(compile=False), "cuda", (False, True)),
        (Machine(cuda_graph=False), "cuda", (True, False)),
    ],
)
def test_the_fast_step_is_chosen_on_cuda_and_announced(machine: Machine, device: str, expected: tuple[bool, bool]) -> None:
    assert fast_options(machine, torch.device(device)) == expected
    line = describe(machine, torch.device(device))
    assert bool(line) == any(expected)
    assert ("compiled" in line, "CUDA graph" in line) == expected


@needs_cuda
@pytest.mark.parametrize("options", [{}, {"compile": False}, {"cuda_graph": False}, {"precision": "tf32"}], ids=str)
def test_fast_steps_on_cuda_train_like_the_eager_one(tmp_path: Path, options: dict[str, object]) -> None:
    from wassersmooth.study.distributed import World

    world = World(torch.device("cuda", 0))
    losses = []
    for name, extra in (("eager", {"compile": False, "cuda_graph": False}), ("fast", options)):
        study = tiny_study(tmp_path, regularizers=("wasserstein:eta=0.3,radius=2",), device="cuda", epochs=6, **extra)
        (run,) = experiment.train(study, "tiny", tmp_path / name, world, SILENT)
        losses.append([row["loss"] for row in run.metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=0.02, abs=1e-5)  # the last epochs end near zero
