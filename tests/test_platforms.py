"""What other systems lack, faked where that is honest: a device without float64, Windows without signals and Greek letters."""

from __future__ import annotations

import builtins
import errno
import io
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wassersmooth as ws
from experiments.speed import operator_cost
from tests.conftest import uses_cuda
from wassersmooth import _checks, cli
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.search import shared_grid

ROOT = Path(__file__).parent.parent
GRID = ws.PixelGraph.grid(8, 8, radius=2)
WASSERSTEIN = ws.Wasserstein(GRID)


class RecordsFloat64(TorchDispatchMode):
    """Note where the package makes float64 of a tensor of another type: on a device without it, that is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made, given = ([t.dtype for t in tree_leaves(of) if isinstance(t, Tensor)] for of in (result, (args, kwargs)))
        if torch.float64 in made and any(dtype != torch.float64 for dtype in given):
            self.found += [str(frame) for frame in traceback.extract_stack() if "/wassersmooth/" in frame.filename][-1:]
        return result


def penalty(metric: Any, **options: Any) -> Callable[[nn.Module, Tensor, Tensor], object]:
    return lambda *batch: ws.GradientPenalty(metric, 0.3, **options)(*batch).total.backward()


WORK_WITHOUT_FLOAT64: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {
    "Plain": lambda *batch: ws.Plain()(*batch).total.backward(),
    "Euclidean penalty": penalty(ws.Euclidean()),
    "Euclidean penalty, forward mode": penalty(ws.Euclidean(), engine="forward_mode"),
    "dual norm": penalty(ws.DualNorm()),
    "Wasserstein penalty": penalty(WASSERSTEIN),
    "Wasserstein penalty with mass": penalty(ws.Wasserstein(GRID, mass=0.25)),
    "GradientObjective": lambda *batch: ws.GradientObjective(lambda g, *_: g.square().flatten(1).sum(1))(
        *batch
    ).total.backward(),
    "Tikhonov": lambda *batch: ws.Tikhonov(WASSERSTEIN, 0.3)(*batch).total.backward(),
    "NoisyInputs": lambda *batch: ws.NoisyInputs(WASSERSTEIN, 0.3)(*batch).total.backward(),
    "AdversarialTraining": lambda *batch: ws.AdversarialTraining(ws.attacks.FGSM(0.1))(*batch).total.backward(),
    "FGSM": ws.attacks.FGSM(0.1),
    "PGD": ws.attacks.PGD(0.1, 0.05, 2),
    "Square": ws.attacks.Square(0.1, queries=3),
    "translate": lambda model, images, labels: ws.variations.translate(images, 1),
    "label_flips": lambda model, images, labels: ws.variations.label_flips(model, images, reach=2),
}
NEED_FLOAT64: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {
    "evaluate": lambda *batch: ws.evaluate(*batch, suite="quick"),
    "certify": lambda model, images, labels: ws.certify(model.eval(), images, ws.Euclidean(), 0.3, samples=20, select=5),
    "a Wasserstein attack": ws.attacks.WassersteinFGSM(WASSERSTEIN, 0.1),
    "a Wasserstein attack, several steps": ws.attacks.WassersteinPGD(WASSERSTEIN, 0.1, 2),
    "Deformations": penalty(ws.Deformations(8, 8)),
    "a graph whose weights are not constant": penalty(ws.Wasserstein(ws.PixelGraph.grid(8, 8, radius=2, weight="gaussian"))),
    "solving with L, a system": lambda model, images, labels: WASSERSTEIN.cometric(images).solve(images),
    "solving with L, a determinant": lambda model, images, labels: WASSERSTEIN.cometric(images + 0.1).logdet(),
}


def batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Softplus(), nn.Flatten(), nn.Linear(4 * 36, 3))
    return model, torch.rand(4, 1, 8, 8), torch.arange(4) % 3


@pytest.mark.parametrize("name", list(WORK_WITHOUT_FLOAT64))
def test_what_needs_no_float64(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As docs/platforms.md says; the CPU stands in for a device without it."""
    monkeypatch.setattr(_checks, "WITHOUT_FLOAT64", ("cpu",))
    model, images, labels = batch()
    with RecordsFloat64() as made:
        WORK_WITHOUT_FLOAT64[name](model, images, labels)
    assert made.found == []


@pytest.mark.parametrize("name", list(NEED_FLOAT64))
def test_what_needs_float64_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, images, labels = batch()
    monkeypatch.setattr(_checks, "WITHOUT_FLOAT64", ("cpu",))
    expected = (
        f"^{name.partition(', ')[0]}.* needs float64, which the device cpu does not have; move model and images to the CPU$"
    )
    with RecordsFloat64() as made, pytest.raises(ValueError, match=expected):
        NEED_FLOAT64[name](model, images, labels)
    assert made.found == []
    monkeypatch.undo()
    NEED_FLOAT64[name](model, images, labels)


def test_apples_gpus_are_devices_without_float64() -> None:
    with pytest.raises(ValueError, match="evaluate needs float64, which the device mps does not have"):
        _checks.float64_on(torch.device("mps"), "evaluate")
    with pytest.raises(StudyError, match="got mps, which has no float64; use --device cpu"):
        choose_device("mps")


def test_a_worker_on_windows_is_not_asked_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal 0 is Ctrl-C there: the question would stop the worker."""
    assert shared_grid._process_exists(os.getpid())
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert not shared_grid._process_exists(done.pid)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail("a signal was sent"))
    assert shared_grid._process_exists(done.pid)


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def import_others(name: str, *rest: Any, **more: Any) -> Any:
        if name == module:
            raise ModuleNotFoundError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", import_others)


def test_a_module_that_windows_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    without("resource", monkeypatch)
    assert operator_cost.peak_memory(torch.device("cpu")) == {}


@pytest.mark.parametrize("path", [*(ROOT / "src").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")], ids=lambda p: p.stem)
def test_no_module_needs_a_system_at_the_top(path: Path) -> None:
    top = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in top if line.split()[1] in {"fcntl", "resource", "pwd", "grp", "termios", "msvcrt", "winreg"}]


def test_letters_that_the_output_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe on Windows takes 256 letters, and no Greek ones."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    monkeypatch.setattr(cli, "parse", lambda *given: lambda: print("FGSM ε = 8/255"))
    assert cli.main(["evaluate"]) == 0
    assert raw.getvalue().split() == b"FGSM ? = 8/255".split()


def test_a_closed_pipe_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*given: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(cli, "_run", closed)
    monkeypatch.setattr(cli, "_discard_output", lambda: None)
    with pytest.raises(OSError, match="Invalid"):
        cli.main(["train"])
    monkeypatch.setattr(cli, "CLOSED_PIPE", (errno.EINVAL,))
    assert cli.main(["train"]) == 141


def test_what_uses_a_gpu_is_marked() -> None:
    def item(device: Any = None, of_module: str | None = None, reason: str = "") -> Any:
        marks = [pytest.mark.skipif(True, reason=reason).mark] if reason else []
        module = SimpleNamespace() if of_module is None else SimpleNamespace(DEVICE=of_module)
        return SimpleNamespace(callspec=SimpleNamespace(params={"x": device}), module=module, iter_markers=lambda name: marks)

    assert uses_cuda(item("cuda"))
    assert uses_cuda(item(of_module="cuda"))
    assert uses_cuda(item(reason="needs CUDA or Triton's interpreter"))
    assert not uses_cuda(item("cpu", "cpu", "needs POT"))
    assert not uses_cuda(item(torch.zeros(2)))
