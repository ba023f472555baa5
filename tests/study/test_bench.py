"""The bench: what is timed is what it says, the JSON is whole, and the page says what the JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from study.fake_runs import fake_study
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from wassersmooth import Euclidean, PixelGraph, Wasserstein, cli
from wassersmooth.learning.fast import FastGradients
from wassersmooth.study import durable
from wassersmooth.study.bench import accuracy, operator, profile, steps
from wassersmooth.study.bench.measuring import training_record
from wassersmooth.study.bench.page import BLOCK, PICTURE, filled_page
from wassersmooth.study.bench.steps import CASES, MEMORY_CASES, SWEEPS, Setup, make_step, objective_of
from wassersmooth.study.bench.tables import goals, tables, unsteady
from wassersmooth.study.bench.timing import timings
from wassersmooth.study.config import Model
from wassersmooth.study.errors import StudyError

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
QUICK = ["bench", "--quick", "--preset", "digits", "--device", "cpu", "--threads", "1", "--repeats", "1"]


def setup_of(compile: bool = False, model: str = "resnet20", width: int = 4) -> Setup:
    return Setup(CPU, Model(model), (4, 3, 16, 16), 10, "float32", compile, False, width)


def fake_report(**changes: Any) -> dict[str, Any]:
    """Made-up numbers, none of them ever measured."""
    step = {name: 2.0 + number for number, name in enumerate(CASES)}
    ratio = {"wasserstein_r4/plain": 2.5, "wasserstein_r8/euclidean": 2.0, "pgd7/wasserstein_r4": 1.4}
    settings = {"network": "made-up", "batch": 3, "image": [3, 32, 32], "precision": "tf32", "memory_format": "channels_last"}
    settings |= {"optimizer": "SGD", "repeats": 1}
    row = {"shape": [2, 3, 32, 32], "radius": 4, "op": "mv", "pass": "forward", "neighborhood": "square", "weights": "constant"}
    row |= {"captured": True}
    memory = {"mib": {name: 100.0 * (k + 1) for k, name in enumerate(MEMORY_CASES)}, "ratio": {"wasserstein_r4/plain": 2.0}}
    at_once = {"case": "wasserstein_r4", "runs": 8, "ms_per_step_per_run": 1.25}
    at_once |= {
        "table": [{"runs": 8, "ms_per_step_per_run": 1.25}],
        "study": {"runs": 2, "of": ["a", "b"], "ms_per_step_per_run": 9},
    }
    report = {"hardware": "no machine", "torch": "0.fake", "commit": "abc", "command": "made up", "settings": settings}
    report |= {"step": step, "ratio": ratio, "limit": {name: SWEEPS[name] / 3 for name in CASES}, "memory": memory}
    report |= {"engine": {name: {"engine": "by hand", "captured": True} for name in CASES}, "throughput": at_once}
    report |= {"operator": [row | {"ms": 0.5, "copy_ms": 0.25, "ratio": 2.0}]}
    report |= {"training": {"study": "s", "runs": 3, "epochs": 200, "seconds": 610.0, "ms_per_step_per_run": None}}
    report["training"] |= {"training_seconds": 590.0, "evaluation_seconds": 20.0}
    report |= {"accuracy": {"precision": "tf32", "fast": [3e-4], "double_backward": [1e-4], "ratio": 3.0}}
    report |= {"profile": {name: {"convolutions": {"ms": k + 0.5, "kernels": 7.0}} for k, name in enumerate(("plain", "pgd7"))}}
    return report | changes


class Counting(TorchDispatchMode):
    """Counts the multiplications of convolutions and matrix products."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def test_a_quick_bench_writes_the_whole_json_and_shows_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    assert cli.main([*QUICK, "--output", str(path), "--regularizers", "adversarial:eta=0.03"]) == 0
    out = capsys.readouterr().out
    assert "times plain  limit by arithmetic" in out
    assert "steps  0/10  preparing plain" in out
    report = json.loads(path.read_text())
    assert {"hardware", "torch", "commit", "command", "step", "ratio", "operator", "training", "memory"} <= report.keys()
    assert set(report["step"]) == {*CASES, "adversarial:eta=0.03"}
    assert all(ms > 0 for ms in report["step"].values())
    assert all(low <= report["step"][name] <= high for name, (low, high) in report["quartiles"].items())
    assert report["ratio"]["pgd7/wasserstein_r4"] == report["step"]["pgd7"] / report["step"]["wasserstein_r4"]
    assert report["settings"] | {"batch": 16, "precision": "float32", "compile": False} == report["settings"]
    assert report["engine"]["algorithm1_r8"] == {
        "engine": "double backward, a loop over all neighbor relations",
        "captured": False,
    }
    assert {(row["op"], row["pass"]) for row in report["operator"]} == {
        (op, direction) for op in ("quad", "mv") for direction in ("forward", "backward")
    }
    assert all(row["ms"] > 0 and row["copy_ms"] > 0 for row in report["operator"])
    assert (report["memory"], report["throughput"], report["training"]) == (None, None, None)
    others = {"error of the gradient, fast/double backward", "operator, square constant, times a copy: worst of 12"}
    assert {goal["what"] for goal in report["goals"]} == {*report["ratio"], *others}


def test_parts_that_were_not_asked_for_stay_if_the_machine_and_the_settings_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    assert cli.main([*QUICK, "--only", "step", "--output", str(path)]) == 0
    first = json.loads(path.read_text())
    assert (first["operator"], list(first["parts"])) == (None, ["step"])
    assert cli.main([*QUICK, "--only", "operator", "--output", str(path)]) == 0
    both = json.loads(path.read_text())
    assert both["step"] == first["step"]
    assert both["operator"]
    assert both["parts"]["step"]["command"] == first["command"]
    capsys.readouterr()
    other = ["--only", "operator", "memory", "--batch-size", "8", "--compile", "True", "--output", str(path)]
    assert cli.main([*QUICK, *other]) == 0
    assert json.loads(path.read_text())["step"] is None
    out = capsys.readouterr().out
    assert "what was there has other settings, and is replaced" in out
    assert "memory: not measured, CUDA only" in out


def test_a_few_steps_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiling takes long, so whoever wants the price of one regularizer waits for no other."""
    path = tmp_path / "bench.json"
    few = [*QUICK, "--only", "step", "--cases", "euclidean", "--output", str(path)]
    assert cli.main([*few, "--regularizers", "dual-norm:eta=0.5", "dual-norm:eta=0.50"]) == 0
    report = json.loads(path.read_text())
    assert list(report["step"]) == ["plain", "euclidean", "dual-norm:eta=0.5"]
    assert (report["ratio"], report["goals"]) == ({}, [])
    before = path.read_bytes()
    capsys.readouterr()
    assert cli.main(few) == 2
    assert "holds steps that are not to be timed again, dual-norm:eta=0.5, and would lose them" in capsys.readouterr().err
    assert cli.main([*QUICK, "--render", str(path), "--page", str(tmp_path / "page.md")]) == 2
    assert "--render needs all steps; the file has no wasserstein_r2, " in capsys.readouterr().err
    assert path.read_bytes() == before
    assert cli.main([*few, "--regularizers", "dual-norm:eta=0.5"]) == 0  # the same again


@pytest.mark.parametrize("case", ["plain", "wasserstein_r4", "pgd7", "double_backward_r4", "algorithm1_r8"])
def test_the_limits_by_arithmetic_are_counted(case: str) -> None:
    """In multiples of a forward pass; the first layer, which needs no input gradient, and the last make up the rest."""
    setup = setup_of(width=16)
    with Counting() as once, torch.no_grad():
        setup.network()(setup.batch()[0])
    work = make_step(case, setup).work
    with Counting() as counted:
        work()
    assert counted.total / once.total == pytest.approx(SWEEPS[case], rel=0.02)


def test_the_fast_penalty_takes_six_sweeps_too() -> None:
    setup = setup_of(width=16)
    model, (images, labels) = setup.network(), setup.batch()
    fast = FastGradients(objective_of("wasserstein_r4", (16, 16)), model, compile=False, cuda_graph=False)
    fast(images, labels)
    with Counting() as once, torch.no_grad():
        model(images)
    with Counting() as counted:
        fast(images, labels)
    assert counted.total / once.total == pytest.approx(SWEEPS["wasserstein_r4"], rel=0.02)


def test_algorithm_1_computes_the_penalty() -> None:
    setup = setup_of(model="small")
    model, (images, labels) = setup.network(), setup.batch()
    objective: Any = objective_of("algorithm1_r8", (16, 16))
    expected = objective(model, images, labels).total
    torch.testing.assert_close(steps.algorithm1(objective, model, images, labels), expected)


def test_the_loop_over_relations_is_quad() -> None:
    x, v = torch.rand(2, 3, 9, 7), torch.randn(2, 3, 9, 7)
    laplacian = Wasserstein(PixelGraph.grid(9, 7, radius=3, weight="gaussian")).evaluate(x)
    torch.testing.assert_close(operator.quad_by_edges(laplacian, v), laplacian.quad(v))


def test_a_step_moves_the_weights_and_the_objectives_are_what_they_are_called() -> None:
    step = make_step("wasserstein_r2", setup_of(model="small"))
    before = [parameter.detach().clone() for parameter in step.parameters]
    step.work()
    assert not all(torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))
    penalty: Any = objective_of("euclidean", (8, 8))
    assert isinstance(penalty.metric, Euclidean)
    assert [objective_of(f"wasserstein_r{r}", (8, 8)).metric.graph.radius for r in (2, 4, 8)] == [2, 4, 8]  # type: ignore[attr-defined]


class Refusing:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *_: object) -> None:
        raise RuntimeError("no such kernel\nand a long story")


class RefusingAtOnce:
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("no such kernel\nand a long story")


@pytest.mark.parametrize("kind", [Refusing, RefusingAtOnce])
def test_what_cannot_be_compiled_is_timed_as_it_is_and_says_so(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FastGradients", kind)
    step = make_step("wasserstein_r4", setup_of(compile=True, model="small"))
    assert (step.engine, step.note) == ("double backward", "FastGradients: RuntimeError: no such kernel")
    step.work()


def test_a_network_without_a_fast_way_costs_no_other_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (steps, accuracy):
        monkeypatch.setattr(module, "FastGradients", RefusingAtOnce)
    path = tmp_path / "bench.json"
    assert cli.main([*QUICK, "--only", "step", "accuracy", "--compile", "True", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "euclidean: double backward, not the fast way; FastGradients: RuntimeError: no such kernel" in out
    assert "accuracy: not measured, no such kernel" in out
    assert json.loads(path.read_text())["accuracy"] is None


def test_an_interrupted_bench_keeps_its_finished_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "bench.json"
    with monkeypatch.context() as patch:
        patch.setattr(accuracy, "gradient_errors", interrupted)
        assert cli.main([*QUICK, "--only", "operator", "accuracy", "step", "--output", str(path)]) == 130
    assert f"{path} keeps what was measured; --only accuracy step measures the rest" in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert list(kept["parts"]) == ["operator"]
    assert kept["operator"]


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "aside_of", lambda path: tmp_path / "missing" / path.name)
    assert cli.main([*QUICK, "--output", str(tmp_path / "bench.json")]) != 0
    told = capsys.readouterr()
    assert "bench.json cannot be written" in told.err
    assert "preparing" not in told.out


def test_a_strength_at_which_the_step_diverges_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "step", "--regularizers", "euclidean:eta=1e30", "--output", str(tmp_path / "bench.json")]
    assert cli.main([*QUICK, *arguments]) != 0
    assert "take a smaller eta in --regularizers" in capsys.readouterr().err


def test_the_compiled_way_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FastGradients", lambda *given, **how: FastGradients(*given, **how | {"compile": False}))
    assert make_step("wasserstein_r4", setup_of(compile=True, model="small")).engine == "FastGradients, compiled"


def test_timings_take_turns_and_leave_the_first_call_out() -> None:
    calls: list[str] = []
    found = timings({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, CPU)
    assert calls == ["a", "a", "b", "b"] * 2
    assert all(0 <= timing.low <= timing.ms <= timing.high for timing in found.values())


def test_a_study_on_record(tmp_path: Path) -> None:
    study = fake_study(tmp_path / "night", seeds=2, pictures=False, dataset="cifar10", batch_size=100, validation=0.0)
    found = training_record(study)
    assert (found["study"], found["runs"], found["epochs"], found["steps"]) == ("night", 6, 12, 6 * 12 * 500)
    (study / "study.json").write_text('{"training_seconds": 72.0, "evaluation_seconds": 8.0, "seconds": 80.0}')
    found = training_record(study)
    assert (found["seconds"], found["training_seconds"], found["ms_per_step_per_run"]) == (80.0, 72.0, 2.0)
    next(study.glob("*/provenance.json")).unlink()
    with pytest.raises(StudyError, match="needs a finished study"):
        training_record(study)


def test_the_time_of_a_study_goes_into_a_file_that_is_there(tmp_path: Path) -> None:
    study, source, page = fake_study(tmp_path / "night", seeds=2), tmp_path / "bench.json", tmp_path / "speed.md"
    page.write_text((ROOT / "docs" / "speed.md").read_text())
    source.write_text(json.dumps(fake_report(training=None)))
    command = ["bench", "--render", str(source), "--page", str(page), "--training", str(study)]
    assert cli.main(command) == 0
    assert json.loads(source.read_text())["training"] == training_record(study)
    assert "| night | 6 | 12 |" in page.read_text()
    source.write_text(before := json.dumps(fake_report(cuda="13.0")))
    assert cli.main(command) == 2  # the study ran somewhere else
    assert source.read_text() == before


def test_gradients_are_compared_with_float64() -> None:
    """On a CPU both ways are as exact as float32 is, and another objective's gradient is not."""
    found = accuracy.gradient_errors(setup_of(), lambda what: None)
    assert len(found["fast"]) == len(found["double_backward"]) == accuracy.BATCHES
    assert all(1e-9 < error < 1e-4 for name in ("fast", "double_backward") for error in found[name])
    assert found["ratio"] == max(found["fast"]) / max(found["double_backward"])


def test_a_wrong_gradient_of_the_fast_way_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(FastGradients):
        def __call__(self, *given: Any) -> Any:
            terms = super().__call__(*given)
            torch._foreach_mul_([p.grad for p in self.model.parameters()], 1.5)
            return terms

    monkeypatch.setattr(accuracy, "FastGradients", Wrong)
    found = accuracy.gradient_errors(setup_of(), lambda what: None)
    assert found["fast"] == pytest.approx([0.5] * accuracy.BATCHES, abs=1e-3)
    assert max(found["double_backward"]) < 1e-4


def test_kernels_are_told_apart_by_their_names() -> None:
    names = {
        "triton_poi_fused_add_mul_convolution_12": "pointwise and sums",
        "weight_gradient": "convolutions",
        "sm90_xmma_dgrad_implicit_gemm_tf32f32": "convolutions",
        "quadratic": "L(x)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>": "update",
        "Memcpy DtoD (Device -> Device)": "other",
    }
    events = [(name, 1000.0 * (k + 1), 4) for k, name in enumerate(names)]
    found = profile.by_kind([*events, ("cudaGraphLaunch", 0.0, 2)], calls=2)
    for (name, microseconds, _), kind in zip(events, names.values(), strict=True):
        assert profile.kind_of(name) == kind
        alone = list(names.values()).count(kind) == 1
        assert found[kind] == {"ms": microseconds / 2000, "kernels": 2.0} or not alone
    assert found["convolutions"] == {"ms": 2.5, "kernels": 4.0}


def test_the_page_is_filled_and_what_stands_outside_the_blocks_stays(tmp_path: Path) -> None:
    page, source = tmp_path / "speed.md", tmp_path / "bench.json"
    page.write_text((ROOT / "docs" / "speed.md").read_text())
    source.write_text(json.dumps(fake_report()))
    assert cli.main(["bench", "--render", str(source), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| Wasserstein penalty, radius 4 | 5.00 | 2.50 | 2.00 |" in text
    assert "| wasserstein_r8/euclidean | 2.00 | <= 1.02 | no |" in text
    assert "| mv forward, 2x3x32x32, constant | 4 | 500.0 | 250.0 | 2.00 |" in text
    assert "| memory, wasserstein_r4/plain | 2.00 | <= 3 | yes |" in text
    assert "| operator, square constant, times a copy: worst of 1 | 2.00 | <= 2 | yes |" in text
    assert "| the paper's three runs and their evaluation, seconds | 610.00 | <= 600 | no |" in text
    assert "| fast | 3.0e-04 |" in text
    assert "| error of the gradient, fast/double backward | 3.00 | <= 2 | no |" in text
    assert "| convolutions | 0.50 | 7 | 1.50 | 7 |" in text
    assert "| 8 runs at once, ms per step and run | 1.25 | <= 2 | yes |" in text
    assert "no machine, torch 0.fake" in text
    assert "Not measured." not in text
    assert (tmp_path / "images" / "step-time.png").read_bytes().startswith(b"\x89PNG")
    assert BLOCK.sub("", text) == BLOCK.sub("", (ROOT / "docs" / "speed.md").read_text())
    source.write_text(json.dumps(fake_report(memory=None, throughput=None, training=None)))
    assert cli.main(["bench", "--render", str(source), "--page", str(page)]) == 0
    assert page.read_text().count("Not measured.") == 3


def test_no_goal_is_judged_by_an_unsteady_step() -> None:
    quartiles = {name: [ms, 1.05 * ms] for name, ms in fake_report()["step"].items()} | {"pgd7": [6.0, 9.0]}
    report = fake_report(quartiles=quartiles)
    assert unsteady(report) == ["pgd7"]
    reached = {goal["what"]: goal["reached"] for goal in goals(report)}
    assert (reached["wasserstein_r4/plain"], reached["pgd7/wasserstein_r4"]) == (True, None)
    quartiles |= {"plain": [1.0, 9.0]}
    reached = {goal["what"]: goal["reached"] for goal in goals(fake_report(quartiles=quartiles))}
    assert (reached["wasserstein_r4/plain"], reached["memory, wasserstein_r4/plain"]) == (
        None,
        True,
    )
    assert "| pgd7/wasserstein_r4 | 1.40 | >= 2 | unsteady |" in next(
        table.to_markdown() for table in tables(report) if table.name == "goals"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--render", "bench.json"], "needs a file that wassersmooth bench has written; got bench.json: not there"),
        (["--render", "other.json"], "another kind of JSON"),
        (["--render", "good.json", "--page", "nowhere.md"], "nowhere.md cannot be read"),
        (["--render", "good.json", "--page", "empty.md"], "the page has no block to fill"),
        (["--output", "."], "--output needs a file"),
        (["--render", "half.json"], "; restore it, or measure it again"),
        ([*QUICK[1:], "--only", "step", "--output", "half.json"], "; restore it, or choose another --output"),
        (["--training", "."], "neither a run nor a study folder"),
    ],
)
def test_what_cannot_be_rendered_or_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "good.json").write_text(json.dumps(fake_report()))
    (tmp_path / "empty.md").write_text("nothing\n")
    assert cli.main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_the_page_says_what_the_measurement_says() -> None:
    source = ROOT / "results" / "bench-h200.json"
    if not source.exists():
        pytest.skip("results/bench-h200.json is not there yet: it is made on an H200 by wassersmooth bench")
    text = (ROOT / "docs" / "speed.md").read_text()
    assert filled_page(text, json.loads(source.read_text())) == text
    assert (ROOT / "docs" / PICTURE).exists()
