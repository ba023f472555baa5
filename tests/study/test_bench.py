"""The bench: each step times what it says, and the JSON is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.study.fake_bench import fake_report
from tests.study.fake_runs import fake_study
from wassersmooth import Euclidean, PixelGraph, Wasserstein, cli
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.study import durable
from wassersmooth.study.bench import accuracy, operator, profile, steps
from wassersmooth.study.bench.command import training_record, with_training
from wassersmooth.study.bench.steps import CASES, SWEEPS, Setup, objective_of, timed_step
from wassersmooth.study.bench.tables import goals, tables, unsteady
from wassersmooth.study.bench.timing import Timing, timings
from wassersmooth.study.config import Model
from wassersmooth.study.errors import StudyError

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
QUICK = ["bench", "--quick", "--preset", "digits", "--device", "cpu", "--threads", "1", "--repeats", "1"]


def setup_of(compile: bool = False, model: str = "resnet20", width: int = 4) -> Setup:
    return Setup(CPU, Model(model), (4, 3, 16, 16), 10, "float32", compile, False, width)


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
        ("sample", "forward"),
        *((op, direction) for op in ("quad", "mv") for direction in ("forward", "backward", "backward in x")),
    }
    assert all(row["ms"] > 0 and row["copy_ms"] > 0 for row in report["operator"])
    assert (report["memory"], report["throughput"], report["training"]) == (None, None, None)
    assert report["goals"] == []
    assert "H200" not in out  # the goals of a GPU say nothing about a CPU
    kinds = [f"{kind}, radius {radius}" for kind in ("square gaussian", "disk constant", "square learned") for radius in (4, 8)]
    kinds += [f"square edge-aware, radius {radius}" for radius in (4, 8)]
    others = {"error of the gradient, fast/double backward", "operator, square constant, times a copy: worst of 18"}
    others |= {f"operator, {kind}, times a copy: worst of 6" for kind in kinds}
    others.add("operator, coherent motion, times a copy: worst of 24")
    sampled = ("constant", "gaussian", "edge-aware")
    others |= {f"sample of L(x), square {weights}, times its normal numbers: worst of 1" for weights in sampled}
    assert {goal["what"] for goal in goals(report | {"cuda": "13.0"})} == {*report["ratio"], *others}


def test_goals_of_the_operator_are_those_of_its_weights() -> None:
    ratios = {("gaussian", 4): 5.9, ("gaussian", 8): 12.1, ("edge-aware", 8): 39.0, ("constant", 8): 2.1, ("learned", 8): 0.0}
    rows = [
        {"neighborhood": "square", "weights": weights, "radius": radius, "op": "quad", "ratio": ratio}
        for (weights, radius), ratio in ratios.items()
    ]
    rows[-1]["failure"] = "out of registers"
    judged = {goal["what"].split(",")[1].strip(): goal["reached"] for goal in goals({"cuda": "13.0", "operator": rows[:1]})}
    assert judged == {"square gaussian": True}
    reached = [goal["reached"] for goal in goals({"cuda": "13.0", "operator": rows})]
    assert reached == [True, False, True, False]  # what failed is in the table of the operator, and reaches nothing
    rows = [rows[2] | {"pass": "backward in x", "ratio": 41.0}, rows[2] | {"op": "sample", "ratio": 1.6}]
    judged = {goal["what"]: (goal["goal"], goal["reached"]) for goal in goals({"cuda": "13.0", "operator": rows})}
    assert judged == {
        "operator, square edge-aware, radius 8, times a copy: worst of 1": ("<= 40", False),
        "sample of L(x), square edge-aware, times its normal numbers: worst of 1": ("<= 1.5", False),
    }


def test_every_field_that_an_operation_reads_or_writes_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a copy of n fields is made to be n ms; what fails has a row of its own, and the others have theirs."""
    cases = (operator.Case(2, "square", "constant"), operator.Case(2, "motion", "advection"))
    monkeypatch.setattr(operator, "CASES", cases)
    monkeypatch.setattr(operator, "SAMPLED", cases[:1])
    captured, failing = operator._captured, []

    def prepared(work: Any, *given: Any) -> Any:
        failing.append(work)
        if len(failing) == 9:  # after three copies, the last operation of the first case
            raise ValueError("out of registers\nand more")
        return captured(work, *given)

    def milliseconds(works: Any, *given: Any) -> Any:
        for work in works.values():
            work()
        return {key: Timing(float(key) if isinstance(key, int) else 12.0, 0.0, 0.0) for key in works}

    monkeypatch.setattr(operator, "_captured", prepared)
    monkeypatch.setattr(operator, "timings", milliseconds)
    reported: list[str] = []
    rows = operator.operator_rows(CPU, reported.append, 1, ((2, 2, 8, 8),))
    assert len(reported) == operator.parts(((2, 2, 8, 8),)) == len(failing)
    found = {(row["neighborhood"], row["op"], row["pass"]): row["copy_ms"] for row in rows}
    assert found == {
        ("square", "quad", "forward"): 2.0,  # x, v
        ("square", "quad", "backward"): 3.0,  # x, v, its gradient
        ("square", "quad", "backward in x"): 2.0,  # v, the gradient
        ("square", "mv", "forward"): 3.0,  # x, v, the product
        ("square", "mv", "backward"): 3.0,  # x, the product's gradient, that of v
        ("square", "mv", "backward in x"): 0.0,  # which failed
        ("square", "sample", "forward"): 12.0,
        ("motion", "quad", "forward"): 2.0,
        ("motion", "quad", "backward"): 3.0,
        ("motion", "quad", "backward in x"): 3.0,  # L is quadratic in x
        ("motion", "mv", "forward"): 3.0,
        ("motion", "mv", "backward"): 3.0,
        ("motion", "mv", "backward in x"): 4.0,
    }
    assert [row.get("failure") for row in rows if "failure" in row] == ["ValueError: out of registers"]


def test_derivatives_of_the_operator_are_those_that_rows_name() -> None:
    x, v, g = (torch.rand(2, 1, 6, 6) for _ in range(3))
    metric = Wasserstein(PixelGraph.grid(6, 6, radius=2))
    works = operator._passes(metric, x, v, g)
    image = x.clone().requires_grad_()
    cometric = metric.evaluate(image)
    for op, value in (("quad", cometric.quad(v).sum()), ("mv", (cometric.mv(v) * g).sum())):
        found: Any = works[op, "backward in x"]()
        torch.testing.assert_close(found, torch.autograd.grad(value, image, retain_graph=True))


def test_an_operation_that_fails_without_a_graph_too_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where capture fails, the plain calls are timed, if they work."""

    def refuse(*given: object) -> None:
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(operator, "captured", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    uncaptured: list[Any] = []
    calls: list[int] = []
    operator._captured(lambda: calls.append(1), CPU, 3, None, uncaptured)()
    assert (len(calls), len(uncaptured)) == (4, 1)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        operator._captured(refuse, CPU, 3, None, uncaptured)
    assert len(uncaptured) == 1


def test_other_parts_are_kept_if_machine_and_settings_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "its settings differ, so it is replaced" in out
    assert "memory: not measured, CUDA only" in out


def test_a_few_steps_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiling takes long, so one regularizer can be measured alone."""
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
    assert path.read_bytes() == before
    assert cli.main([*few, "--regularizers", "dual-norm:eta=0.5"]) == 0  # the same again


@pytest.mark.parametrize("case", ["plain", "wasserstein_r4", "pgd7", "double_backward_r4", "algorithm1_r8"])
def test_the_arithmetic_limits_are_counted(case: str) -> None:
    """In multiples of a forward pass; the difference is the first layer, which needs no input gradient, and the last."""
    setup = setup_of(width=16)
    with Counting() as once, torch.no_grad():
        setup.network()(setup.batch()[0])
    work = timed_step(case, setup).work
    with Counting() as counted:
        work()
    assert counted.total / once.total == pytest.approx(SWEEPS[case], rel=0.02)


@pytest.mark.slow
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


def test_a_step_changes_the_weights_and_has_the_named_objective() -> None:
    step = timed_step("wasserstein_r2", setup_of(model="small"))
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
def test_a_step_that_cannot_be_compiled_is_timed_eagerly_with_a_note(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FastGradients", kind)
    step = timed_step("wasserstein_r4", setup_of(compile=True, model="small"))
    assert (step.engine, step.note) == ("double backward", "FastGradients: RuntimeError: no such kernel")
    step.work()


def test_a_network_without_a_fast_step_keeps_the_other_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (steps, accuracy):
        monkeypatch.setattr(module, "FastGradients", RefusingAtOnce)
    path = tmp_path / "bench.json"
    assert cli.main([*QUICK, "--only", "step", "accuracy", "--compile", "True", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "euclidean: double backward, not the fast step; FastGradients: RuntimeError: no such kernel" in out
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


def test_an_output_that_cannot_be_written_is_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "temporary", lambda path: tmp_path / "missing" / path.name)
    assert cli.main([*QUICK, "--output", str(tmp_path / "bench.json")]) != 0
    told = capsys.readouterr()
    assert "bench.json cannot be written" in told.err
    assert "preparing" not in told.out


def test_a_regularizer_that_does_not_fit_the_images_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--regularizers", "deformation:eta=1,smoothness=99", "--output", str(tmp_path / "bench.json")]
    assert cli.main([*QUICK, "--only", "step", *arguments]) == 2
    assert "deformation:eta=1,smoothness=99: smoothness must be a finite number" in capsys.readouterr().err


def test_a_strength_at_which_the_step_diverges_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "step", "--regularizers", "euclidean:eta=1e17", "--output", str(tmp_path / "bench.json")]
    assert cli.main([*QUICK, *arguments]) != 0
    assert "take a smaller eta in --regularizers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_step_is_compiled_if_the_setup_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FastGradients", lambda *given, **how: FastGradients(*given, **how | {"compile": False}))
    assert timed_step("wasserstein_r4", setup_of(compile=True, model="small")).engine == "FastGradients, compiled"


def test_timings_interleave_the_cases_and_skip_the_first_call() -> None:
    calls: list[str] = []
    found = timings({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, CPU)
    assert calls == ["a", "a", "b", "b"] * 2
    assert all(0 <= timing.low <= timing.ms <= timing.high for timing in found.values())


def test_the_training_record_of_a_study(tmp_path: Path) -> None:
    study = fake_study(tmp_path / "night", seeds=2, pictures=False, dataset="cifar10", batch_size=100, validation=0.0)
    found = training_record(study)
    assert (found["study"], found["runs"], found["epochs"], found["steps"]) == ("night", 6, 12, 6 * 12 * 500)
    (study / "study.json").write_text('{"training_seconds": 72.0, "evaluation_seconds": 8.0, "seconds": 80.0}')
    found = training_record(study)
    assert (found["seconds"], found["training_seconds"], found["ms_per_step_per_run"]) == (80.0, 72.0, 2.0)
    next(study.glob("*/provenance.json")).unlink()
    with pytest.raises(StudyError, match="needs a finished study"):
        training_record(study)


def test_the_time_of_a_study_is_added_to_a_report(tmp_path: Path) -> None:
    study = fake_study(tmp_path / "night", seeds=2)
    report = with_training(fake_report(training=None), study)
    assert report["training"] == training_record(study)
    assert not any("three runs" in goal["what"] for goal in report["goals"]), "the study is not the paper's"
    with pytest.raises(StudyError, match="needs a study from the machine of the bench, no machine; got"):
        with_training(fake_report(cuda="13.0"), study)


@pytest.mark.slow
def test_gradients_are_compared_with_float64() -> None:
    """On a CPU both engines are as exact as float32, and another objective's gradient is not."""
    found = accuracy.gradient_errors(setup_of(), lambda what: None)
    assert len(found["fast"]) == len(found["double_backward"]) == accuracy.BATCHES
    assert all(1e-9 < error < 1e-4 for name in ("fast", "double_backward") for error in found[name])
    assert found["ratio"] == max(found["fast"]) / max(found["double_backward"])


@pytest.mark.slow
def test_a_wrong_fast_gradient_shows(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_goal_is_judged_by_an_unsteady_step() -> None:
    quartiles = {name: [ms, 1.05 * ms] for name, ms in fake_report()["step"].items()} | {"pgd7": [6.0, 9.0]}
    report = fake_report(quartiles=quartiles, cuda="0.fake")
    assert unsteady(report) == ["pgd7"]
    reached = {goal["what"]: goal["reached"] for goal in goals(report)}
    assert (reached["wasserstein_r4/plain"], reached["pgd7/wasserstein_r4"]) == (True, None)
    quartiles |= {"plain": [1.0, 9.0]}
    reached = {goal["what"]: goal["reached"] for goal in goals(fake_report(quartiles=quartiles, cuda="0.fake"))}
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
        (["--output", "."], "--output needs a file"),
        ([*QUICK[1:], "--only", "step", "--output", "half.json"], "; restore it, or choose another --output"),
        (["--training", "."], "neither a run nor a study folder"),
    ],
)
def test_what_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.json").write_text("{")
    assert cli.main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err
