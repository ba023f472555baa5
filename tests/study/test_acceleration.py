"""Faster steps are the eager step: they fall back to it with a reason, and runs that take turns do not disturb each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from study.small_studies import CPU, SILENT, tiny_run, tiny_study
from torch import nn

from wassersmooth.learning.objectives import Plain
from wassersmooth.study import checkpoints, experiment
from wassersmooth.study.acceleration import CompiledStep, EagerStep, FallingBack, apply_settings, make_step, take_turns
from wassersmooth.study.config import Machine
from wassersmooth.study.runs import Run
from wassersmooth.study.training import TrainingState

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_a_step_that_fails_falls_back_for_good_and_says_why() -> None:
    calls = []

    def fast(images: torch.Tensor, labels: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("fast")
        raise RuntimeError("no kernel for this\nand a long story")

    def eager(images: torch.Tensor, labels: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("eager")
        return images.sum(), images.sum()

    step = FallingBack(fast, eager, "torch.compile")
    with pytest.warns(UserWarning, match="torch.compile is not used for this step, the eager step is: no kernel for this$"):
        step(torch.zeros(1), torch.zeros(1), 1.0)
    step(torch.zeros(1), torch.zeros(1), 1.0)
    assert calls == ["fast", "eager", "eager"]


def test_complaints_about_the_data_are_not_taken_for_a_failure_of_the_machine() -> None:
    def fast(images: torch.Tensor, labels: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError("the loss must be finite")

    with pytest.raises(ValueError, match="finite"):
        FallingBack(fast, fast, "torch.compile")(torch.zeros(1), torch.zeros(1), 1.0)


def test_on_a_cpu_the_default_step_is_the_eager_one() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for machine in (Machine(), Machine(cuda_graph=True)):
        assert isinstance(make_step(model, Plain(), optimizer, torch.Generator(), machine, torch.device("cpu")), EagerStep)


@pytest.mark.parametrize(("precision", "allowed"), [("float32", False), ("tf32", True), ("bfloat16", True)])
def test_precision_is_a_choice(precision: str, allowed: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        apply_settings(Machine(precision=precision))  # type: ignore[arg-type]
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_bfloat16_trains(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, precision="bfloat16")
    state = TrainingState(run.config, loaded, CPU)
    step = state.make_step()
    images, labels = loaded.train.images[:32], loaded.train.labels[:32]
    losses = [step(images, labels, 1.0)[0].item() for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype == torch.float32 for p in state.model.parameters())


def test_runs_that_take_turns_end_as_they_would_alone(tmp_path: Path) -> None:
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


def test_turns_have_random_states_of_their_own_and_never_more_than_asked_for() -> None:
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
    take_turns([work(k, drawn[k]) for k in range(4)], torch.device("cpu"), 2)
    assert most == 2
    for number, values in enumerate(drawn):
        torch.manual_seed(number)
        assert values == torch.rand(4).tolist()


def compiled_and_eager(
    tmp_path: Path, engine: str
) -> tuple[EagerStep, CompiledStep, torch.Tensor, torch.Tensor, TrainingState]:
    run, loaded = tiny_run(tmp_path, regularizers=("wasserstein:eta=0.3,radius=2",), engine=engine)
    states = [TrainingState(run.config, loaded, CPU) for _ in range(2)]
    eager, traced = (state.make_step() for state in states)
    assert isinstance(eager, EagerStep)
    assert isinstance(traced, EagerStep)
    torch._dynamo.reset()
    images, labels = loaded.train.images[:8], loaded.train.labels[:8]
    return eager, CompiledStep(traced, backend="aot_eager"), images, labels, states[1]


def test_the_compiled_step_is_the_eager_step(tmp_path: Path) -> None:
    eager, compiled, images, labels, _ = compiled_and_eager(tmp_path, "forward_mode")
    for size in (8, 8, 5):  # a last batch that is smaller runs eagerly
        expected = eager(images[:size], labels[:size], 1.0)
        torch.testing.assert_close(compiled(images[:size], labels[:size], 1.0), expected, rtol=1e-4, atol=1e-6)


def test_an_engine_that_cannot_be_compiled_falls_back_and_goes_on(tmp_path: Path) -> None:
    eager, compiled, images, labels, state = compiled_and_eager(tmp_path, "double_backward")
    step = FallingBack(compiled, compiled.eager, "torch.compile")
    with pytest.warns(UserWarning, match="torch.compile is not used for this step, the eager step is: "):
        received = step(images, labels, 1.0)
    torch.testing.assert_close(received, eager(images, labels, 1.0))
    for name, tensor in state.model.named_parameters():
        assert tensor.grad is not None, name


@needs_cuda
@pytest.mark.parametrize("options", [{"cuda_graph": True}, {"compile": True, "engine": "forward_mode"}, {"precision": "tf32"}])
def test_fast_steps_on_cuda_train_like_the_eager_one(tmp_path: Path, options: dict[str, object]) -> None:
    from wassersmooth.study.distributed import World

    world = World(torch.device("cuda", 0))
    losses = []
    for name, extra in (("eager", {}), ("fast", options)):
        study = tiny_study(tmp_path, regularizers=("wasserstein:eta=0.3,radius=2",), device="cuda", epochs=6, **extra)
        (run,) = experiment.train(study, "tiny", tmp_path / name, world, SILENT)
        losses.append([row["loss"] for row in run.metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
