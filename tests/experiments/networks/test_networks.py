"""The tables of networks: rows that are right where the truth is known, merged, and readable without the libraries."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from experiments.networks import architectures, commands, exactness, first_call, page, precision, step_cost, turns
from experiments.networks.commands import PROGRAM
from wassersmooth.cli import main
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import locked


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
    page, speed = tmp_path / "page.md", tmp_path / "speed.md"
    speed.write_text("Before\n<!-- networks: step -->\nold\n<!-- /networks -->\nafter\n")
    flags = ["--exactness", str(path), "--page", str(page), "--speed", str(speed)]
    for name in ("bench", "first-calls", "precision"):
        flags += [f"--{name}", str(tmp_path / "none.json")]
    assert main(["render", *flags], PROGRAM) == 0
    assert "| resnet20 | 0.0 M | 16 | exact |" in page.read_text()
    assert page.read_text().count("Not measured.") == 3
    assert speed.read_text().startswith("Before\n<!-- networks: step -->\nNot measured.\n")
    assert speed.read_text().endswith("<!-- /networks -->\nafter\n")


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
    others = [word for name in ("first-calls", "precision") for word in (f"--{name}", str(tmp_path / "none.json"))]
    assert main(["render", *flags, *others, "--page", str(tmp_path / "page.md"), "--speed", "None"], PROGRAM) == 2
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
    flags = f"--size 8 --batch 2 --device cpu --repeats 1 --precision float32 --output {path}"
    for kinds in (step_cost.OWN_KINDS, step_cost.RIVALS):
        assert main(["bench", "discriminator", *flags.split(), "--kinds", *kinds], PROGRAM) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["steps"]) == set(step_cost.KINDS)
    assert all("ms" in step for step in row["steps"].values()), row["steps"]
    assert list(row["steps"]["fast"]["stages"]) == ["tracing", "comparing"]
    assert row["gradient_error"]["fast"] < 1e-3
    assert "| discriminator | 8, 2 | float32 |" in "\n".join(step_cost.table([row]))


def test_a_new_measurement_keeps_nothing_of_the_one_before(tmp_path: Path) -> None:
    bench = commands.Bench("resnet20", output=tmp_path / "bench.json")
    row = {"network": "resnet20", "size": 32, "batch": 128, "precision": "tf32", "hardware": "none"}
    bench._store(row | {"steps": {"fast": {"commit": "a", "ms": 1.0}, "plain": {"commit": "a", "ms": 2.0}}})
    bench._store(row | {"steps": {"fast": {"commit": "b", "reason": "no kernel"}}})
    stored = bench._store(row | {"steps": {"plain": {"peak_bytes": 3}}})
    expected = {"fast": {"commit": "b", "reason": "no kernel"}, "plain": {"commit": "a", "ms": 2.0, "peak_bytes": 3}}
    assert stored["steps"] == expected
    lines = page._origins(page.Results([], [stored], [], []))
    assert lines == ["- bench, none, commit a", "- bench, none, commit b"]


def test_steps_wait_for_memory_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def prepare(*given: object) -> tuple[None, dict[str, Any]]:
        tries.append(given)
        return None, {"reason": "CUDA out of memory" if len(tries) < 3 else "no kernel"}

    monkeypatch.setattr(step_cost, "prepare", prepare)
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    bench = commands.Bench("discriminator", size=8, batch=2, kinds=("fast",), device="cpu", output=tmp_path / "bench.json")
    dataclasses.replace(bench, processes=2)()
    assert len(tries) == 3
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["steps"]["fast"]["reason"] == "no kernel"


def test_a_step_that_does_not_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = step_cost.Setup("discriminator", 8, 2, "float32", torch.device("cpu"))

    def fail(*given: object) -> None:
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(step_cost, "_gradients_of", lambda *given: fail)
    assert step_cost.prepare("fast", setup, False) == (None, {"reason": "no kernel"})
    step = step_cost.Step("fast", setup, False)
    assert step_cost.measure(step, 1) == {"reason": "no kernel"}
    assert step_cost.gradient_error(step) == {"reason": "no kernel"}


def test_gradients_are_compared_one_after_the_other(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    stages = step_cost.Stages(turns)
    stages("tracing")
    stages("comparing")
    with locked(turns) as mine:
        assert not mine
    stages("end")
    with locked(turns) as mine:
        assert mine
    assert list(stages.seconds()) == ["tracing", "comparing"]


# Prints what it is doing into a file, so that the order of several can be seen.
WORKER = """
import sys, time
name, log, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
time.sleep(seconds)
print("prepared", name, flush=True)
print("ready", flush=True)
if sys.stdin.readline():
    open(log, "a").write(f"{name} begins\\n")
    time.sleep(0.05)
    open(log, "a").write(f"{name} ends\\n")
"""


def test_commands_prepare_side_by_side_and_take_turns(tmp_path: Path) -> None:
    log, said, started = tmp_path / "log", [], time.monotonic()
    durations = {"a": 0.2, "b": 0.0, "dead": 0.0, "late": 600.0}
    commands = [[sys.executable, "-c", WORKER, name, str(log), str(seconds)] for name, seconds in durations.items()]
    commands[2] = [sys.executable, "-c", "raise SystemExit(3)"]
    with turns.Processes(commands, os.environ, 2, said.append) as processes:
        processes.wait_until_ready(started + 4)
        processes.take_turns(started + 30)
    assert log.read_text().split("\n")[:-1] == ["a begins", "a ends", "b begins", "b ends"]
    assert {"prepared a", "prepared b"} <= set(said)
    assert [line[:18] for line in said if "late" in line] == ["not ready in time:"]
    assert all(process.poll() is not None for process in processes.started)


def test_without_time_nobody_has_a_turn(tmp_path: Path) -> None:
    log, said = tmp_path / "log", []
    with turns.Processes([[sys.executable, "-c", WORKER, "a", str(log), "0"]], os.environ, 1, said.append) as processes:
        processes.wait_until_ready(time.monotonic() + 60)
        processes.take_turns(time.monotonic() - 1)
    assert not log.exists()
    assert said[-1].startswith("no time left for")


@pytest.mark.slow
def test_all_of_a_table_and_what_is_missing_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    flags = f"--networks discriminator --size 8 --batch 2 --device cpu --repeats 1 --precision float32 --output {path}"
    assert main(["bench-all", *flags.split()], PROGRAM) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["steps"]) == set(step_cost.OWN_KINDS)
    assert all("ms" in step and step["processes"] > 1 for step in row["steps"].values())
    capsys.readouterr()
    assert main(["bench-all", *flags.split()], PROGRAM) == 0
    assert capsys.readouterr().out == ""  # nothing is measured twice
    assert main(["bench-all", *flags.split(), "--seconds", "5", "--compile-seconds", "6"], PROGRAM) == 2


@pytest.mark.parametrize("name", ["resnet20", "discriminator"])
def test_the_gradient_error_sees_a_wrong_penalty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "resnet20":
        monkeypatch.setattr(step_cost, "build", architectures.build)
    setup = step_cost.Setup(name, 8, 4, "float32", torch.device("cpu"))
    step, _ = step_cost.prepare("fast", setup, compile=False)
    assert step is not None
    eta = setup.eta.clone()
    assert max(step_cost.gradient_error(step).values()) < 1e-5
    right = step._gradients

    def one_percent_too_much() -> None:
        right()
        plain = copy.deepcopy(step.model)
        plain.zero_grad()
        setup.loss(plain(setup.images)).backward()
        for parameter, of_loss in zip(step.model.parameters(), plain.parameters(), strict=True):
            parameter.grad += 0.01 * (parameter.grad - of_loss.grad)  # type: ignore[operator]

    step._gradients = one_percent_too_much
    assert step_cost.gradient_error(step)["fast"] > 3e-3
    assert setup.eta == eta


def test_rivals_come_last_and_only_where_the_table_has_them() -> None:
    jobs = commands.BenchAll(networks=("torchvision:swin_t", "resnet20"), rivals=True)._jobs()
    assert [kinds for name, kinds in jobs if name == "torchvision:swin_t"] == [kinds for _, kinds in jobs[:2]]
    assert {kind for _, kinds in jobs[:4] for kind in kinds} == set(step_cost.OWN_KINDS)
    assert jobs[4:] == [("resnet20", (kind,)) for kind in step_cost.RIVALS]


def test_steps_are_timed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, held = tmp_path / "alone.lock", []

    def is_held(*arguments: object) -> None:
        with locked(path) as mine:
            held.append(not mine)

    monkeypatch.setattr(turns.Processes, "wait_until_ready", is_held)
    monkeypatch.setattr(turns.Processes, "take_turns", is_held)
    flags = f"--networks resnet20 --alone {path} --output {tmp_path / 'bench.json'}"
    assert main(["bench-all", *flags.split()], PROGRAM) == 0
    assert held == [False, True]


def test_waiting_for_the_device_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(turns.Processes, "wait_until_ready", lambda *arguments: None)
    path = tmp_path / "alone.lock"
    flags = f"--networks resnet20 --alone {path} --output {tmp_path / 'bench.json'} --seconds 0.2"
    with FileLock(path):
        assert main(["bench-all", *flags.split()], PROGRAM) == 2
    said = capsys.readouterr().err
    assert re.search(r"no step was timed: until the end, another process held .*alone\.lock; try again", said)


@pytest.mark.parametrize(
    ("step", "is_measured"),
    [({"ms": 1.0}, True), ({"reason": "no kernel"}, True), ({"reason": "CUDA out of memory. Tried to"}, False), ({}, False)],
)
def test_what_ran_out_of_memory_is_tried_again(step: dict[str, Any], is_measured: bool, tmp_path: Path) -> None:
    row = {"network": "resnet20", "size": 32, "batch": 128, "precision": "tf32", "steps": {"fast": step}}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [row]}))
    assert commands.BenchAll(output=path)._is_measured("resnet20", ("fast",)) is is_measured


def test_the_first_call_is_timed_with_an_empty_and_with_a_full_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bench:
        """In place of a process."""

        returncode = 0

        def __init__(self, words: list[str], env: dict[str, str]) -> None:
            cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
            seconds = 1.0 if cache.exists() else 60.0
            cache.mkdir(parents=True, exist_ok=True)
            row = {"steps": {"fast": {"first_call_seconds": seconds, "stages": {"tracing": 0.5}}}}
            Path(words[words.index("--output") + 1]).write_text(json.dumps({"rows": [row]}))

        def wait(self) -> int:
            return self.returncode

    monkeypatch.setattr(commands.subprocess, "Popen", Bench)
    path = tmp_path / "first.json"
    words = ["first-call", "resnet20", "torchvision:resnet50", "--device", "cpu", "--output", str(path)]
    assert main(words, PROGRAM) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["network"] for row in rows] == ["resnet20", "torchvision:resnet50"]
    for row in rows:
        assert (row["cold"]["first_call_seconds"], row["warm"]["first_call_seconds"]) == (60.0, 1.0)
        assert row["cold"]["processes"] == 2
    assert "| resnet20 | tf32 | cold | 60.0 | 0.5 |" in first_call.table(rows)[2]
    assert page.first_call_goals(rows)[0] == "- resnet20, cold: at most 60 s: reached."
    assert main(["first-call", "resnet20", "--device", "cpu", "--cache", str(tmp_path)], PROGRAM) == 2
    monkeypatch.setattr(Bench, "returncode", 1)
    assert main(words, PROGRAM) == 2


def benched(network: str, fast: float, plain: float, **others: float) -> dict[str, Any]:
    steps = {kind: {"ms": ms, "peak_bytes": 100} for kind, ms in (("fast", fast), ("plain", plain), *others.items())}
    return {"network": network, "size": 224, "batch": 64, "precision": "tf32", "steps": steps}


def test_goals_are_judged_by_the_rows() -> None:
    rows = [benched("torchvision:resnet50", 45.0, 22.5, make_fx=44.0), benched("torchvision:vit_b_16", 116.0, 50.0)]
    rows[1]["steps"]["fast"]["peak_bytes"] = 301
    assert page.goals(rows)[:3] == [
        "- fast / plain at most 2.1, for transformers 2.2: reached in 1 of 2; missed: torchvision:vit_b_16 in tf32 "
        "(2.320, goal 2.2).",
        "- memory at most 3 times that of a plain step: reached in 1 of 2; missed: torchvision:vit_b_16 in tf32 (3.010).",
        "- no rival is faster: missed: make_fx for torchvision:resnet50 in tf32 (44.0 against 45.0 ms).",
    ]


def test_what_the_table_lacks_is_named() -> None:
    complete: dict[str, Any] = {kind: {"ms": 1.0} for kind in step_cost.KINDS}
    rows = [
        {"network": network, "size": size, "batch": batch, "precision": precision, "steps": dict(complete)}
        for network, (size, batch) in step_cost.BENCHED.items()
        for precision in page.PRECISIONS
        if (network, precision) != ("discriminator", "bfloat16")
    ]
    rows[0]["steps"] |= {"fast": {"reason": "no kernel"}}
    del rows[0]["steps"]["make_fx"], rows[1]["steps"]["make_fx"]
    expected = "fast for resnet20 in tf32 (no kernel); make_fx for resnet20 in tf32; discriminator in bfloat16"
    assert page.goals(rows)[3:] == [f"- no figure: {expected}."]


def test_the_pages_are_those_of_the_committed_rows(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    folder, speed = root / "results" / "networks", root / "docs" / "speed.md"
    shutil.copy(speed, tmp_path)
    shutil.copytree(folder, tmp_path / "networks")
    flags = ["--page", str(tmp_path / "page.md"), "--speed", str(tmp_path / "speed.md")]
    for name, default in (("exactness", commands.EXACTNESS), ("bench", commands.BENCH), ("precision", commands.PRECISION)):
        flags += [f"--{name}", str(tmp_path / "networks" / default.name)]
    flags += ["--first-calls", str(tmp_path / "networks" / commands.FIRST_CALLS.name)]
    assert main(["render", *flags], PROGRAM) == 0
    assert (tmp_path / "page.md").read_text() == (folder / "networks.md").read_text()
    assert (tmp_path / "speed.md").read_text() == speed.read_text()


def test_many_gpus_by_hand() -> None:
    """A ring of n sends 2 (n - 1) / n times the gradients from each: 4 bytes for each of 25.6 million parameters."""
    first, second = page.many_gpus([benched("torchvision:resnet50", 50.0, 25.0)])[2:]
    assert first == "| 8 | 179 | 300 | 0.6 | 1 % of 50.0 ms |"
    assert second == "| 64 | 201 | 40 | 5.0 | 10 % of 50.0 ms |"


def test_low_precision_is_compared_seed_by_seed() -> None:
    def row(name: str, seed: int, error: float) -> dict[str, Any]:
        errors = dict.fromkeys(precision.MEASURES, error)
        return {"regularizer": "none", "epochs": 2, "precision": name, "seed": seed, "errors": errors}

    lines = precision.table([row("tf32", 0, 10.0), row("tf32", 1, 20.0), row("bfloat16", 0, 11.0), row("bfloat16", 1, 21.0)])
    assert "| tf32 | 2 | 15.0 ± 7.1 |" in lines[2]
    assert "| bfloat16 - tf32 | 2 | +1.0 ± 0.0 |" in lines[4]


def test_runs_of_a_precision_are_trained_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "precision.json"
    flags = "--precisions float32 --dataset digits --model small --epochs 1 --regularizer none --seeds 0 --test-images 20"
    flags += f" --device cpu --runs {tmp_path / 'runs'} --output {path}"
    assert main(["precision", *flags.split()], PROGRAM) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["precision"], row["seed"], row["images"]) == ("float32", 0, 20)
    assert row["errors"].keys() == precision.MEASURES.keys()
    assert precision.ROW(row) == ""


def test_each_precision_has_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Training:
        """In place of a process; that in bfloat16 fails."""

        def __init__(self, words: list[str]) -> None:
            found.append(words)

        def wait(self) -> int:
            return int(found[-1][found[-1].index("--precisions") + 1] == "bfloat16")

    monkeypatch.setattr(commands.subprocess, "Popen", Training)
    assert main(["precision", "--precisions", "tf32", "float32", "--seeds", "3", "4"], PROGRAM) == 0
    assert [words[words.index("--precisions") + 1] for words in found] == ["tf32", "float32"]
    assert all(words[words.index("--seeds") + 1 :][:2] == ["3", "4"] for words in found)
    assert main(["precision", "--precisions", "tf32", "bfloat16"], PROGRAM) == 2


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


@pytest.mark.parametrize("kind", ["forward_mode", "trace_autograd_ops"])
def test_rivals_are_compiled_as_a_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in parts, between which gradients are taken eagerly."""
    from torch._dynamo.utils import counters

    setup = step_cost.Setup("discriminator", 8, 2, "float32", torch.device("cpu"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    found = []
    for one in (kind, "double_backward"):
        with step_cost._traced_autograd(one):
            step = step_cost.Step(one, setup, compile=True)
            step.gradients()
        found.append(
            torch.cat([parameter.grad.flatten() for parameter in step.model.parameters() if parameter.grad is not None])
        )
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(*found)


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
