"""The tables of networks: rows that are right where the truth is known, merged, and readable without the libraries."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.networks import architectures, commands, exactness, step_cost
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


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        ("exactness", {"network": "a"}, "without size, verdict"),
        ("exactness", {"network": [], "size": 8, "verdict": "exact"}, "network: expected text; got []"),
        ("exactness", {"network": "a", "size": 8, "verdict": "exact", "error": "x"}, "error: expected a number"),
        ("bench", {"network": "a", "size": 8, "batch": 2, "precision": "tf32", "steps": {"fast": {"ms": 0}}}, "ms: expected"),
        ("bench", {"network": "a", "size": 8, "batch": 2, "precision": "tf32", "steps": []}, "steps: expected an object"),
    ],
)
def test_a_damaged_row_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, row: dict[str, object], message: str
) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("exactness", "bench")}
    paths[file].write_text(json.dumps({"rows": [row]}))
    flags = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert main(["render", *flags, "--page", str(tmp_path / "page.md")], PROGRAM) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "row 1 is damaged" in complaint
    assert message in complaint


def test_text_of_a_row_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>|[a](b)"
    row = {"network": evil, "size": 8, "batch": 2, "precision": evil, "verdict": evil, "reason": evil}
    for line in (exactness.table([row])[-1], step_cost.table([row | {"steps": {"fast": {"reason": evil}}}])[-1]):
        assert "<img" not in line
        assert "](" not in line.replace("\\]", "")


@pytest.mark.slow
def test_a_row_of_the_bench_made_by_two_commands(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    flags = f"--size 8 --batch 2 --device cpu --repeats 1 --precision float32 --turns {tmp_path / 'turns'} --output {path}"
    for kinds in (step_cost.OWN_KINDS, step_cost.RIVALS):
        assert main(["bench", "discriminator", *flags.split(), "--kinds", *kinds], PROGRAM) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["steps"]) == set(step_cost.KINDS)
    assert all("ms" in step for step in row["steps"].values()), row["steps"]
    assert list(row["steps"]["fast"]["stages"]) == ["tracing", "comparing"]
    assert row["gradient_error"]["fast"] < 1e-3
    assert "| discriminator | 8, 2 | float32 |" in "\n".join(step_cost.table([row]))


def test_a_step_that_does_not_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = step_cost.Setup("discriminator", 8, 2, "float32", torch.device("cpu"))

    def fail(*given: object) -> None:
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(step_cost, "step_of", fail)
    assert step_cost.prepare("fast", setup, False) == (None, {"reason": "no kernel"})
    assert step_cost.measure("fast", setup, fail, 1) == {"reason": "no kernel"}


def test_turns_are_shared_or_taken_alone(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    turns = tmp_path / "turns"
    with commands._together(turns), commands._together(turns), turns.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with commands._alone(turns), turns.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_the_first_call_is_timed_with_an_empty_and_with_a_full_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(words: list[str], env: dict[str, str], check: bool) -> None:
        cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        seconds = 1.0 if cache.exists() else 60.0
        cache.mkdir(exist_ok=True)
        row = {"steps": {"fast": {"first_call_seconds": seconds}}}
        Path(words[words.index("--output") + 1]).write_text(json.dumps({"rows": [row]}))

    monkeypatch.setattr(commands.subprocess, "run", bench)
    path = tmp_path / "first.json"
    assert main(["first-call", "resnet20", "--device", "cpu", "--output", str(path)], PROGRAM) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["cold"]["first_call_seconds"], row["warm"]["first_call_seconds"]) == (60.0, 1.0)
    assert main(["first-call", "resnet20", "--device", "cpu", "--cache", str(tmp_path)], PROGRAM) == 2


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
