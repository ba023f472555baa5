"""A part of `make fuzz` in every run of the tests, and proof that the finders find: faults are planted."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests.fuzz import arguments, calls, damages, kills, laws
from tests.fuzz.findings import Findings
from wassersmooth.geometry.cometric import Identity
from wassersmooth.robustness.smoothing import SmoothingNoise
from wassersmooth.study.runs import RunFiles


def silent() -> Findings:
    """Failures are shown by the assertion."""
    return Findings(show=lambda fault: None)


@pytest.mark.parametrize("first", [0, 1000])  # two, so that two processes share them
def test_random_calls(first: int) -> None:
    found = calls.run(1000, seed=0, first=first, found=silent())
    assert not found.failures, "\n".join(found.failures)
    assert found.outcomes["answer"] > 400, "too few calls are answered"
    assert found.outcomes["refusal"] > 100, "too few calls are refused"


def test_damaged_files() -> None:
    found = damages.run(30, seed=0, found=silent())
    assert not found.failures, "\n".join(found.failures)
    assert found.outcomes["refusal"] > 5


@pytest.mark.slow
def test_killed_commands() -> None:
    found = kills.run(3, seed=0, found=silent())
    assert not found.failures, "\n".join(found.failures)


def calls_of(name: str, count: int = 40) -> list[calls.Outcome]:
    return [calls.judge(calls.Call.draw(name, arguments.Dice(0, number))) for number in range(count)]


def texts(outcomes: list[calls.Outcome]) -> str:
    return "\n".join(outcome.text for outcome in outcomes if outcome.kind == "failure")


def test_a_wrong_answer_is_found_and_printed_as_a_script_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Identity, "mv", lambda self, v: 2 * v)
    monkeypatch.setattr(calls, "NAMES", {"L.mv": arguments.NAMES["L.mv"]})
    found = calls.run(30, seed=0, found=silent())
    assert "wrong answer of L.mv" in found.failures[0]
    script = found.failures[0].partition("from tests.fuzz.prelude")[2]
    assert "B, C, H, W, K, D = 1, 1, 2, 2, 2, torch.float64" in script, "made as small as possible"
    assert "transpose" not in script
    names: dict[str, object] = {}
    exec(f"from tests.fuzz.prelude{script}", names)
    v = names["v"]
    assert isinstance(v, Tensor)
    assert capsys.readouterr().out.strip() == str(2 * v)


def test_changed_arguments_and_random_states_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Identity, "mv", lambda self, v: v.mul_(1.5) / 1.5)
    assert "changes its argument v" in texts(calls_of("L.mv"))
    monkeypatch.setattr(Identity, "mv", lambda self, v: v.clone() + 0 * torch.rand(()))
    monkeypatch.setattr(calls, "RESTORING", ("L.",))
    assert "changes the global random state" in texts(calls_of("L.mv"))


@pytest.mark.slow
def test_wrong_noise_and_wrong_certificates_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ws.Wasserstein, "w1_constant", lambda self: 1.1 * math.sqrt(2))
    assert "wrong answer of metric.w1_constant" in texts(calls_of("metric.w1_constant", 5))
    assert "wrong answer of certificates.w1" in texts(calls_of("certificates.w1", 20))
    monkeypatch.setattr(SmoothingNoise, "fill", lambda self, noise, parts: noise.fill_(3.0))
    for name in ("ws.certify", "ws.Smoothed"):
        assert f"wrong answer of {name}: a share of" in texts(calls_of(name, 20))


def test_errors_of_python_and_refusals_of_valid_calls_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, v: Tensor) -> Tensor:
        raise KeyError("a detail")

    monkeypatch.setattr(Identity, "mv", broken)
    assert "KeyError of Python or torch" in texts(calls_of("L.mv"))
    monkeypatch.setattr(ws.Euclidean, "check", lambda self, x: ws.Wasserstein(None))  # type: ignore[arg-type]
    assert "refuses a valid call: graph must be" in texts(calls_of("L.mv"))


def test_errors_of_torch_that_come_through_a_model_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = calls.Call.draw("ws.Plain", arguments.Dice(0, 0))
    call = dataclasses.replace(drawn, arguments=drawn.arguments | {"model": ("net(C, H, W, K, D).half()",)}, plain=False)
    assert calls.judge(call).kind == "refusal"
    monkeypatch.setattr("wassersmooth._model_checks.DTYPE_MISMATCH", re.compile("never said"))
    assert calls.judge(call).text.startswith("RuntimeError of Python or torch: Input type")


def test_a_refusal_says_what_is_wrong_and_what_is_right() -> None:
    for message, wrong, right in (("got 3", True, False), ("x must be 2", False, True), ("x must be 2; got 3", True, True)):
        found = [bool(pattern.search(message)) for pattern in (laws.STATES_WHAT_IS_WRONG, laws.STATES_WHAT_IS_RIGHT)]
        assert found == [wrong, right]


def test_a_name_that_is_new_on_the_page_has_to_be_taught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "reference.md"
    page.write_text(arguments.PAGE.read_text() + "| `ws._checks.weights(received, relations)` | new |\n")
    monkeypatch.setattr(arguments, "PAGE", page)
    names = arguments.public_names()
    monkeypatch.setattr(calls, "NAMES", names)
    with pytest.raises(LookupError, match=r"no law for ws\._checks\.weights; add one .* to tests/fuzz/laws\.py"):
        calls.run(1, seed=0)
    monkeypatch.setattr(arguments, "NAMES", names)
    with pytest.raises(LookupError, match=r"cannot make the argument 'received' of ws\._checks\.weights; add a line"):
        arguments.Dice(0, 0).call("ws._checks.weights")


def test_every_name_can_be_called_plainly() -> None:
    for name in arguments.NAMES:
        call = calls.Call.draw(name, arguments.Dice(0, 0))
        assert set(call.arguments) <= {*arguments.NAMES[name].parameters, *arguments.NAMES[name].others}
        assert name in laws.LAWS


def test_a_traceback_and_a_changed_file_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    act = dataclasses.replace(damages.ACTS[0], files=("study/*/config.json",))
    monkeypatch.setattr(damages, "ACTS", (act, *damages.ACTS[1:]))
    damages.template()

    def broken(self: RunFiles) -> dict[str, object]:
        (self.folder / "notes.txt").write_text("a file that nobody asked for")
        raise KeyError("a detail")

    monkeypatch.setattr(RunFiles, "stored_config", broken)
    monkeypatch.setattr(damages, "ACTS", (act,))
    found = damages.run(2, seed=0, found=silent())
    assert "exit code None" in found.failures[0]
    assert "KeyError: 'a detail'" in found.failures[0]
