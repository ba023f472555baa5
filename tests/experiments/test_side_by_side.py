"""Networks side by side: slow steps are errors on CUDA, kinds that fail are left out, and time and locks are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import wassersmooth as ws
from experiments.side_by_side import Attempts, fast_steps_alone, full_precision, lock_of, train
from tests.study.small_studies import SILENT, tiny_run
from wassersmooth.learning.compiled import prepared_step
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.compiled.prepared_step import Options, PreparedStep
from wassersmooth.study.acceleration import EagerStep, FastStep
from wassersmooth.study.config import Machine
from wassersmooth.study.errors import DivergedError
from wassersmooth.study.runs import locked

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_step_that_falls_back_to_the_eager_one_is_an_error_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> NoReturn:
        raise RuntimeError("no rule")

    monkeypatch.setattr(FastGradients, "_prepare", fail)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    optimizer, noise = torch.optim.SGD(model.parameters(), 0.1), torch.Generator()
    images, labels = torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)

    def step() -> FastStep:
        return FastStep(EagerStep(model, ws.Plain(), optimizer, noise, nullcontext()), compile=False, cuda_graph=False)

    with fast_steps_alone(CUDA), pytest.raises(UserWarning, match="no rule"):
        step()(images, labels, 1.0)
    with fast_steps_alone(CPU), pytest.warns(UserWarning, match="no rule"):
        step()(images, labels, 1.0)


def test_a_step_that_is_not_compiled_is_an_error_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> NoReturn:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(prepared_step, "_compiled", fail)
    objective, model = ws.Plain(), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    batch = torch.rand(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    options = Options(compile=True, required=False, cuda_graph=False, verify=False, progress=lambda stage: None)
    with fast_steps_alone(CUDA), pytest.raises(UserWarning, match="no compiler"):
        PreparedStep(objective, objective.step_spec(), model, *batch, None, options)


def test_of_a_kind_that_fails_no_other_network_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = tiny_run(tmp_path, epochs=1)
    begun: list[str] = []

    def work(name: str, fails: bool = False) -> Iterator[None]:
        begun.append(name)
        yield
        if fails:
            raise RuntimeError("broken")

    attempts = Attempts(CPU, SILENT)
    for name, kind, fails in (("first", "a", True), ("second", "a", False), ("third", "b", False)):
        list(attempts.at(run, name, kind, lambda n=name, f=fails: work(n, f), lambda: True))  # type: ignore[misc]
    assert begun == ["first", "third"]
    assert attempts.failed == {"a"}
    with locked(lock_of(run)):
        list(attempts.at(run, "another process has it", "b", lambda: work("taken"), lambda: True))
    list(attempts.at(run, "done meanwhile", "b", lambda: work("done"), lambda: False))
    assert begun == ["first", "third"]


@pytest.mark.parametrize(
    ("raised", "deadline", "ended", "taken"),
    [(None, math.inf, True, 3), (DivergedError("nan"), math.inf, True, 3), (None, 0.0, False, 1)],
)
def test_a_training_ends_in_time_or_by_divergence(
    tmp_path: Path, raised: Exception | None, deadline: float, ended: bool, taken: int
) -> None:
    run, _ = tiny_run(tmp_path, epochs=1)

    def steps() -> Iterator[None]:
        yield from (None, None, None)
        if raised:
            raise raised

    found: list[bool] = []
    row: dict[str, Any] = {}

    def whole() -> Iterator[None]:
        found.append((yield from train(run, steps(), row, "a network", deadline, SILENT)))

    assert len(list(whole())) == taken
    assert found == [ended]
    assert row == ({"diverged": True} if raised else {})
    assert (run.folder / "config.json").is_file()


def test_measuring_is_in_full_precision_and_training_is_not() -> None:
    def tf32() -> bool:
        return torch.backends.cudnn.allow_tf32

    with full_precision(Machine(precision="tf32")):
        assert not tf32()
    assert tf32()
    with full_precision(Machine(precision="float32")):
        assert not tf32()
    assert not tf32()
