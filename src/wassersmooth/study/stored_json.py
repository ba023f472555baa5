"""JSON files that somebody may have edited or truncated: read with plain limits, and checked against a shape.

A shape is a function from a value to what is wrong with it in a few words, or to "". It is checked once, where a file is read,
so that no reader further down meets text where it expects a number.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wassersmooth.study.errors import StudyError

Shape = Callable[[Any], str]

MOST_NESTED = 40  # lists and objects inside one another; the files of this package have at most 8
LARGEST_WHOLE = 2**64  # seeds go up to it
LONGEST_SHOWN = 60  # characters of a value in a message


class UnreadableError(StudyError):
    """A file that is missing or damaged: the message of a command, and in ``problem`` a few words for a report.

    Attributes:
        path: the file.
        rows: of a file with one row per line, those before the first broken line.
    """

    def __init__(self, path: Path, problem: str, message: str, rows: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.path, self.problem, self.rows = path, problem, list(rows)


def anything(value: Any) -> str:
    return ""


def read_json(
    path: Path, what: str, remedy: str = "restore it, or move the run's folder away", shape: Shape = anything
) -> dict[str, Any]:
    """Read the JSON object in a file. Without the file, its folder is not ``what``; a damaged one has the ``remedy``."""
    try:
        content = parse(path.read_bytes())
    except FileNotFoundError:
        raise UnreadableError(path, "missing", f"{path.parent} is not {what}: it has no {path.name}; check the path") from None
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise UnreadableError(path, f"not readable as JSON ({reason})", f"{path} cannot be read ({reason}); {remedy}") from None
    if not isinstance(content, dict):
        got = type(content).__name__
        problem = f"holds a {got} where an object is expected"
        raise UnreadableError(path, problem, f"{path}: expected a JSON object; got {got}; {remedy}")
    if wrong := shape(content):
        raise UnreadableError(path, f"is damaged ({wrong})", f"{path} is damaged: {wrong}; {remedy}")
    return content


def parse(content: bytes | str) -> Any:
    """JSON with finite numbers of usual size and few levels; ValueError otherwise."""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _require_few_levels(found)
    return found


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{shown(text)} is not a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > 21 or abs(value := int(text)) > LARGEST_WHOLE:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return value


def _require_few_levels(value: Any) -> None:
    level = [value]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MOST_NESTED} levels deep")


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ..."


def _expected(what: str, value: Any) -> str:
    return f"expected {what}; got {shown(value)}"


def text(value: Any) -> str:
    return "" if isinstance(value, str) else _expected("text", value)


def plain_name(value: Any) -> str:
    """Text without anything that Markdown, a plot or a file system could take for more than a name."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.,:=/+ -]{1,200}", value)
    return "" if plain else _expected("a name of letters, digits and . , : = / + - _", value)


def truth(value: Any) -> str:
    return "" if isinstance(value, bool) else _expected("true or false", value)


def number(low: float = -math.inf, high: float = math.inf) -> Shape:
    """A finite number in a closed range."""
    return _in_range(int | float, "a number", low, high)


def whole(low: float = -math.inf, high: float = math.inf) -> Shape:
    """A whole number in a closed range."""
    return _in_range(int, "a whole number", low, high)


def _in_range(kind: type | types.UnionType, what: str, low: float, high: float) -> Shape:
    expected = f"{what}{_range(low, high)}"

    def check(value: Any) -> str:
        plain = isinstance(value, kind) and not isinstance(value, bool)
        return "" if plain and low <= value <= high and abs(value) < math.inf else _expected(expected, value)

    return check


def _range(low: float, high: float) -> str:
    least, most = (str(end) if isinstance(end, int) else f"{end:g}" for end in (low, high))
    if high < math.inf:
        return f" from {least} to {most}"
    return f" of at least {least}" if low > -math.inf else ""


def one_of(*values: object) -> Shape:
    return lambda value: (
        "" if isinstance(value, str) and value in values else _expected(f"one of {', '.join(map(str, values))}", value)
    )


def optional(shape: Shape) -> Shape:
    """The shape, or null."""
    return lambda value: "" if value is None else shape(value)


def list_of(shape: Shape, length: int | None = None) -> Shape:
    def check(value: Any) -> str:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            return _expected("a list" if length is None else f"a list of {length}", value)
        return _first((str(place), shape(inner)) for place, inner in enumerate(value, 1))

    return check


def object_of(shape: Shape, at_least: Sequence[str] = ()) -> Shape:
    """An object whose values all have the shape, with these keys among others."""
    return _object(at_least, lambda key: shape)


def object_with(required: Mapping[str, Shape], others: Mapping[str, Shape] | None = None) -> Shape:
    """An object with the required keys; a key that is neither required nor among the others may have any value."""
    shapes = {**required, **(others or {})}
    return _object(required, lambda key: shapes.get(key, anything))


def _object(required: Iterable[str], shape_of: Callable[[str], Shape]) -> Shape:
    def check(value: Any) -> str:
        if not isinstance(value, dict):
            return _expected("an object", value)
        missing = [key for key in required if key not in value]
        return f"without {', '.join(missing)}" if missing else _first((str(k), shape_of(k)(v)) for k, v in value.items())

    return check


def _first(problems: Iterable[tuple[str, str]]) -> str:
    """The first problem, behind the place where it is: ``entries: 2: error: expected a number; got 'x'``."""
    return next((f"{place}: {problem}" for place, problem in problems if problem), "")


PERCENT = number(0, 100)
COUNT = whole(0)
SEED = whole(0, 2**32 - 1)
