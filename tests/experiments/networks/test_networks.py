"""The tables of networks: rows that are right where the truth is known, merged, and readable without the libraries."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.networks import architectures, exactness, step_cost
from experiments.networks.commands import PROGRAM
from wassersmooth.cli import main
from wassersmooth.study.errors import StudyError


def tiny(name: str, size: int) -> nn.Module:
    if name != "resnet20":
        return architectures.build(name, size)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Hardsigmoid(), nn.Flatten(), nn.LazyLinear(10))


def tiny_critic(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    return architectures.Discriminator(size, 4, 8)


@pytest.fixture(autouse=True)
def tiny_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "build", tiny)
    monkeypatch.setattr(step_cost, "build", tiny_critic)


@pytest.mark.slow
def test_a_network_of_the_sweep_is_exact_and_a_wrong_gradient_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    row = exactness.measure("resnet20", 16, 3)
    assert row["verdict"] == "exact"
    assert row["error"] < 1e-7
    by_hand = exactness.by_hand
    monkeypatch.setattr(exactness, "by_hand", lambda *given: {name: 1.01 * g for name, g in by_hand(*given).items()})
    assert exactness.measure("resnet20", 16, 3)["verdict"] == "off"


def test_rows_are_merged_and_libraries_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "exactness.json"
    names = ["resnet20", *(["timm:resnet26d"] if importlib.util.find_spec("timm") is None else [])]
    for name in (*names, "resnet20"):
        assert main(["sweep", "--networks", name, "--size", "16", "--output", str(path)], PROGRAM) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["network"] for row in rows] == names
    if len(rows) > 1:
        assert rows[1]["reason"] == "timm is not installed; pip install timm"
    page = tmp_path / "page.md"
    assert main(["render", "--exactness", str(path), "--bench", str(tmp_path / "none.json"), "--page", str(page)], PROGRAM) == 0
    assert "| resnet20 | 0.0 M | 16 | exact |" in page.read_text()


@pytest.mark.slow
def test_a_row_of_the_bench(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    flags = "--size 8 --batch 2 --device cpu --repeats 1 --precision float32 --rivals True"
    assert main(["bench", "discriminator", *flags.split(), "--output", str(path)], PROGRAM) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["steps"]) == {"plain_compiled", "plain", "fast", "double_backward", *step_cost.RIVALS}
    assert all("ms" in step for step in row["steps"].values()), row["steps"]
    assert row["gradient_error"]["fast"] < 1e-3
    assert "| discriminator | 8, 2 | float32 |" in "\n".join(step_cost.table([row]))


def test_all_ways_to_write_the_step_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, found = step_cost.Setup("discriminator", 8, 3, "float32", torch.device("cpu")), {}
    setup.images = setup.images.double()
    monkeypatch.setattr(step_cost.Setup, "network", lambda self: step_cost.build(self.name, self.size).double())
    for kind in ("fast", "double_backward", *step_cost.RIVALS):
        torch.manual_seed(0)
        model = setup.network()
        step_cost._gradients_of(kind, setup, model, torch.optim.SGD(model.parameters(), 0.1), compile=False)()
        found[kind] = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    for kind, gradient in found.items():
        torch.testing.assert_close(gradient, found["double_backward"], rtol=1e-9, atol=1e-11, msg=kind)


def test_randomness_is_taken_out() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.MultiheadAttention(4, 2, dropout=0.1))
    architectures.without_randomness(model)
    assert model[0].p == model[1].dropout == 0


@pytest.mark.parametrize("name", ["resnet21", "torchvision:resnet18", "torchvision:resnet0"])
def test_unknown_networks_are_refused(name: str) -> None:
    if name.startswith("torchvision") and importlib.util.find_spec("torchvision") is not None and name.endswith("18"):
        pytest.skip("torchvision is installed")
    with pytest.raises(
        StudyError, match=r"a network is resnet20.*got 'resnet21'|torchvision (is not installed|has no network)"
    ):
        architectures.build(name, 32)
