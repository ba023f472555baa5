"""The first finder: random calls of every public name, each answer against a law, each refusal against the rules for one.

A call is source code (`arguments.py`), executed line by line. What must hold of an answer is in `laws.py`. A failing call is
made as small as possible and printed as a script.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import random
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wassersmooth
from tests.fuzz import laws, prelude
from tests.fuzz.arguments import NAMES, Code, Dice, needed, weight
from tests.fuzz.findings import Findings
from wassersmooth._checks import MissingExtraError
from wassersmooth.study.errors import StudyError

SOURCE = str(Path(wassersmooth.__file__).parent)
REFUSALS = (ValueError, TypeError, MissingExtraError, StudyError)
LIMIT = 60  # seconds that one call may take
Scene = dict[str, int | str]
SMALLEST: Scene = {"B": 1, "C": 1, "H": 2, "W": 2, "K": 2, "D": "torch.float64"}
SIZES, THIN = ((2, 3), (3, 2), (3, 4), (2, 2), (4, 4)), ((1, 4), (5, 1), (1, 1))
# These leave the model and the global random state as they were; all others draw from it where they get no generator.
RESTORING = (
    "ws.attacks.",
    "ws.certify",
    "certificates.",
    "ws.evaluate",
    "ws.doctor",
    "ws.suggest_eta",
    "report.",
    "ws.variations.label_flips",
    "ws.transport.",
    "wassersmooth.",
)


class TooLongError(Exception):
    """A call took longer than it may."""


@dataclass(frozen=True)
class Call:
    """One call: its scene, and the source code of each argument. ``plain`` calls have nothing that may be refused."""

    name: str
    scene: Scene
    arguments: dict[str, Code]
    plain: bool

    @classmethod
    def draw(cls, name: str, dice: Dice) -> Call:
        pick, public = dice.random.choice, NAMES[name]
        plain = dice.random.random() < 0.5
        height, width = pick(SIZES if plain or dice.random.random() < 0.8 else THIN)
        scene = {"B": pick((1, 2, 3)), "C": pick((1, 1, 2, 3)), "H": height, "W": width, "K": pick((2, 3, 5))}
        scene["D"] = pick(("torch.float64", "torch.float32"))
        own, others = dice.arguments(name), {other: dice.value(name, other) for other in public.others}
        drawn = {**others, **own}
        if not plain and drawn:
            for strange in {pick(list(drawn)) for _ in range(pick((1, 1, 2)))}:
                drawn[strange] = dice.value(name, strange, odd=True)
        return cls(name, scene, drawn, plain)

    def setup(self) -> list[str]:
        """Assignments of the scene and of every argument; those that need others come last."""
        scene = f"{', '.join(self.scene)} = {', '.join(map(str, self.scene.values()))}"
        codes = {name: "".join(code) for name, code in self.arguments.items()}
        late = sorted(codes, key=lambda name: "metric.cometric" in codes[name] or "x.mean" in codes[name])
        return [scene, *(f"{name} = {codes[name]}" for name in late)]

    def expression(self) -> str:
        public = NAMES[self.name]
        own = ", ".join(f"{name}={name}" for name in public.parameters if name in self.arguments)
        short = (
            self.name.rpartition(".")[2] if self.name.startswith(("L.", "metric.", "report.", "certificates.")) else self.name
        )
        return public.template.format(f"{short}({own})") if "load_model" not in public.template else public.template

    def script(self) -> str:
        lines = [
            "from tests.fuzz.prelude import *",
            "import wassersmooth.learning.gradient_gap, wassersmooth.study.published_models",
        ]
        lines = lines[: 1 + self.name.startswith("wassersmooth.")]
        return "\n".join([*lines, *self.setup(), f"print({self.expression()})"])


@dataclass
class Outcome:
    """``kind`` is "answer", "refusal", "failure", or "none" where the arguments themselves cannot be made."""

    kind: str
    text: str = ""
    detail: str = ""

    @property
    def fault(self) -> str:
        """What a smaller call must have in common with a failing one: the kind of error, and where it is raised."""
        return self.text.split(":")[0] + self.detail.splitlines()[-1] if self.detail else self.text


def run(calls: int, seed: int, first: int = 0, found: Findings | None = None) -> Findings:
    """Make calls: first one of every name, then by weight. Every fault is shown once for each name."""
    missing = [name for name in NAMES if name not in laws.LAWS]
    if missing:
        raise LookupError(f"the finder has no law for {', '.join(missing)}; add one for each to tests/fuzz/laws.py")
    names, found, seen = list(NAMES), found or Findings(), set()
    weights = [weight(name) for name in names]
    for number in range(first, first + calls):
        name = names[number] if number < len(names) else random.Random(f"{seed}/{number}").choices(names, weights)[0]
        call = Call.draw(name, Dice(seed, number))
        outcome = judge(call)
        found.outcomes[outcome.kind] += 1
        shown = outcome.fault if outcome.detail else name + outcome.fault
        if outcome.kind == "failure" and shown not in seen:
            seen.add(shown)
            call, outcome = shrink(call, outcome)
            again = f"make fuzz CALLS=1 SEED={seed} FIRST={number}"
            found.add(f"{name}: {outcome.text}\n{outcome.detail}# {again}\n{call.script()}\n")
            if found.enough:
                break
    return found


def shrink(call: Call, outcome: Outcome) -> tuple[Call, Outcome]:
    """The smallest call with the same fault: fewer options, fewer changes of tensors, a smaller scene."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(call):
            found = judge(candidate)
            if found.kind == "failure" and found.fault == outcome.fault:
                call, outcome, smaller = candidate, found, True
                break
    return call, outcome


def _smaller(call: Call) -> Iterator[Call]:
    optional = NAMES[call.name].optional
    for name, code in call.arguments.items():
        if name in optional and not needed(call.name, name):
            yield replace(call, arguments={other: given for other, given in call.arguments.items() if other != name})
        for index in range(1, len(code)):
            yield replace(call, arguments=call.arguments | {name: code[:index] + code[index + 1 :]})
        for simple in ("ws.Euclidean()", "ws.Wasserstein(ws.PixelGraph.grid(H, W, 1))", "net(C, H, W, K, D)"):
            if len("".join(code)) > len(simple) and code[0].startswith(simple[:5]):
                yield replace(call, arguments=call.arguments | {name: (simple,)})
    for name, least in SMALLEST.items():
        if call.scene[name] != least:
            yield replace(call, scene=call.scene | {name: least})


def judge(call: Call) -> Outcome:
    """Make a call and compare it with its law."""
    values: dict[str, Any] = {name: getattr(prelude, name) for name in prelude.__all__} | {"wassersmooth": wassersmooth}
    with warnings.catch_warnings(record=True) as warned, _time_limit():
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            for line in call.setup():
                exec(line, values)
        except Exception as error:
            ours = any(frame.filename.startswith(SOURCE) for frame in traceback.extract_tb(error.__traceback__))
            return _refusal(error, call) if ours else Outcome("none")
        given = SimpleNamespace(
            **{name: values[name] for name in call.arguments}, again=lambda name: eval("".join(call.arguments[name]), values)
        )
        before = {name: snapshot(getattr(given, name)) for name in call.arguments}
        state = _random_state()
        try:
            result = eval(call.expression(), values)
        except Exception as error:
            return _refusal(error, call)
        changed = [
            name
            for name in call.arguments
            if snapshot(getattr(given, name)) != before[name] and not _may_change(call, name, getattr(given, name))
        ]
        if changed:
            return Outcome("failure", f"changes its argument {changed[0]}")
        if _random_state() != state and not _may_draw(call, given):
            return Outcome("failure", "changes the global random state")
        if not warned and any(bool(part.isnan().any()) for part in _tensors(result)) and not _propagates(call, given):
            return Outcome("failure", "answers NaN without a warning")
        try:
            laws.LAWS[call.name](given, result, bool(warned))
        except AssertionError as error:
            return Outcome("failure", f"wrong answer of {call.name}: {error}", _last_lines(error, 2))
        except Exception as error:
            return Outcome("failure", f"its law fails with {type(error).__name__}: {error}", _last_lines(error, 4))
    return Outcome("answer")


def _refusal(error: Exception, call: Call) -> Outcome:
    message, kind = str(error), type(error).__name__
    detail = _last_lines(error, 3)
    if _is_of_the_user(error):
        return Outcome("refusal", message)
    if not isinstance(error, REFUSALS) or not _is_raised_here(error):
        return Outcome("failure", f"{kind} of Python or torch: {message.splitlines()[0][:200] if message else ''}", detail)
    if "\n" in message.strip():
        return Outcome("failure", f"refusal of several lines: {message!r}", detail)
    if not laws.STATES_WHAT_IS_WRONG.search(message):
        return Outcome("failure", f"refusal without what was received: {message}", detail)
    if not laws.STATES_WHAT_IS_RIGHT.search(message):
        return Outcome("failure", f"refusal without what was expected, or a remedy: {message}", detail)
    if call.plain and "is disconnected" not in message:  # as the pixels of a valid image may happen to be
        return Outcome("failure", f"refuses a valid call: {message}", detail)
    return Outcome("refusal", message)


def _is_raised_here(error: Exception) -> bool:
    """Whether the error was raised by a line of the library, not by what that line calls."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(SOURCE) and "raise " in linecache.getline(last.filename, last.lineno or 0)


def _is_of_the_user(error: Exception) -> bool:
    """Whether a function that was given has raised it, or a model that was called itself, in words of torch or of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(SOURCE)]
    called = max(ours, default=len(frames))
    if ours and all(frames[index].filename.endswith("normalized.py") and frames[index].name == "forward" for index in ours):
        return True
    told = called < len(frames) - 1 and "progress(" in (frames[called].line or "")
    return told or any(frame.filename == "<string>" for frame in frames[called + 1 :])


def _last_lines(error: Exception, count: int) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-count:]
    return "".join(f"#   {Path(frame.filename).name}:{frame.lineno} {frame.line}\n" for frame in frames)


def _may_change(call: Call, name: str, value: object) -> bool:
    """A generator moves on, a memory is filled, FastGradients fills `grad`, and a model in training mode counts and draws."""
    if isinstance(value, nn.Module) and not call.name.startswith(RESTORING):
        return call.name == "ws.FastGradients" or any(module.training for module in value.modules())
    return name in ("generator", "memory", "progress")


def _may_draw(call: Call, given: SimpleNamespace) -> bool:
    if call.name.startswith(RESTORING):
        return False
    dropout = any(
        isinstance(module, nn.Dropout)
        for value in vars(given).values()
        if isinstance(value, nn.Module)
        for module in value.modules()
    )
    return dropout or getattr(given, "generator", None) is None


def _propagates(call: Call, given: SimpleNamespace) -> bool:
    """Whether NaN may come out: a pixel is moved and a covector multiplied without a look, and large numbers overflow."""
    if call.name in ("ws.variations.translate", "ws.Normalized"):
        return True
    covectors = _tensors([getattr(given, name, None) for name in ("v", "b", "xi")])
    too_large = [
        tensor for tensor in _tensors(list(vars(given).values())) if tensor.numel() and float(tensor.abs().max()) > 1e15
    ]
    return bool(too_large) or any(not bool(torch.isfinite(v).all()) for v in covectors)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and not value.is_meta and value.layout == torch.strided else []
    return [part for item in value for part in _tensors(item)] if isinstance(value, (tuple, list)) else []


def snapshot(value: object) -> object:
    """Something to compare a value with after the call: bits of tensors; state, modes, flags and gradients of models."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            return None
        bits = value.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return bits.numpy().tobytes(), value.requires_grad
    if isinstance(value, nn.Module):
        parts = [*value.state_dict().values(), *(p.grad for p in value.parameters())]
        flags = [module.training for module in value.modules()] + [p.requires_grad for p in value.parameters()]
        return [snapshot(part) for part in parts], flags
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (list, tuple)):
        return [snapshot(part) if isinstance(part, (Tensor, tuple, list)) else copy.deepcopy(part) for part in value]
    return copy.deepcopy(value) if isinstance(value, dict) else None


def _random_state() -> tuple[object, ...]:
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), keys.tobytes(), rest


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError(f"the call takes more than {LIMIT} seconds")

    if threading.current_thread() is not threading.main_thread():  # only there can a signal be caught
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
