"""The manual of a command: `--help` shows the options that people use, `--help-all` all of them.

A command is a dataclass: its fields and those of its groups are the options, the text under a field explains it, and the
docstring of the class has a summary, examples (paragraphs that begin with what one types), and notes. A command with many
options names the ones that `--help` shows in a class variable, ``common``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

EXAMPLES = 3  # that --help shows, the first ones
TEXT_AT = 24  # the column at which the text of an option begins
WIDEST = 100  # columns; longer lines are hard to read
_METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
_TYPED = ("wassersmooth ", "python -m ", "torchrun ")


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: of the field, ``batch_size``.
        group: the name of the group it belongs to; empty for the command's own.
        text: what it does.
        default: its value where it is not given; None also where it must be.
        metavar: stands for its value; empty for a boolean.
        choices: the values that it may have; empty where these are not a list.
        several: whether it takes several values.
        positional: whether it is given without its name.
    """

    name: str
    group: str
    text: str
    default: Any
    metavar: str
    choices: tuple[str, ...] = ()
    several: bool = False
    positional: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_boolean(self) -> bool:
        return not self.metavar

    @property
    def spelled(self) -> str:
        """The option as it is typed."""
        if self.positional:
            return self.metavar
        return f"{self.flag}, --no-{self.flag[2:]}" if self.is_boolean else f"{self.flag} {self.metavar}"


def options_of(command: type, values: object = None, group: str = "") -> list[Option]:
    """All options of a command, its own first.

    Arguments:
        command: the class.
        values: one whose fields are the defaults; without it, those of the class.
        group: the name of the group that ``command`` is.
    """
    hints, texts = typing.get_type_hints(command, include_extras=True), _texts(command)
    found: list[Option] = []
    groups: list[Option] = []
    for item in dataclasses.fields(command):
        hint = hints[item.name]
        value = _default(item) if values is None else getattr(values, item.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups += options_of(hint, value, item.name)
        else:
            found.append(_option(item.name, group, texts.get(item.name, ""), value, hint))
    return found + groups


def short_manual(name: str, command: type, values: object = None) -> str:
    """What `--help` shows. ``name`` is what a user types, such as ``wassersmooth train``."""
    options = options_of(command, values)
    common = getattr(command, "common", None) or tuple(option.name for option in options)
    shown = sorted((option for option in options if option.name in common), key=lambda option: common.index(option.name))
    rows = [_row(option.spelled, _first_sentence(option.text) + _stated(option)) for option in shown]
    hidden = len(options) - len(shown)
    more = f"show {hidden} more options" if hidden else "show the full text"
    summary, examples, _ = _paragraphs(command)
    parts = [f"usage: {name} {_usage(options)}", _filled(summary), "options:", *rows, _row("--help-all", f"{more}, and notes")]
    return _joined([*parts[:2], "\n".join(parts[2:]), _examples(examples[:EXAMPLES])])


def long_manual(name: str, command: type, values: object = None) -> str:
    """What `--help-all` shows."""
    options = options_of(command, values)
    summary, examples, notes = _paragraphs(command)
    parts = [f"usage: {name} {_usage(options)}", *map(_filled, (summary, *notes))]
    classes = typing.get_type_hints(command)
    for group in dict.fromkeys(option.group for option in options):
        title = _filled(f"{group} options: {_summary(classes[group])}") if group else "options:"
        rows = [_row(o.spelled, " ".join(o.text.split()) + _stated(o)) for o in options if o.group == group]
        parts.append("\n".join([title, *rows]))
    return _joined([*parts, _examples(examples)])


def overview(name: str, description: str, commands: Mapping[str, type]) -> str:
    """The commands of a program, one line or two for each."""
    rows = [
        textwrap.fill(_summary(command), _width(), initial_indent=f"  {word:11}", subsequent_indent=13 * " ")
        for word, command in commands.items()
    ]
    return _joined([f"usage: {name} COMMAND [OPTIONS]", *map(_filled, description.split("\n\n")), "\n".join(rows)])


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return None if item.default is dataclasses.MISSING else item.default


def _texts(command: type) -> dict[str, str]:
    """The text under each field, of the class and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(command.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # installed without its source: options without texts are better than no command
            continue
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = str(text.value.value)
    return found


def _option(name: str, group: str, text: str, default: Any, hint: Any) -> Option:
    notes: Sequence[Any] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
    own = next((note.metavar for note in notes if getattr(note, "metavar", None)), None)
    several, metavar = False, ""
    choices: tuple[str, ...] = ()
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for kind in alternatives:
        if typing.get_origin(kind) is tuple:
            several, kind = True, typing.get_args(kind)[0]
        if typing.get_origin(kind) is Literal:
            choices = tuple(map(str, typing.get_args(kind)))
            metavar = "{" + ",".join(choices) + "}"
            metavar = metavar if len(metavar) <= WIDEST // 2 else "NAME"
        elif kind is not bool and kind is not types.NoneType and not metavar:
            metavar = _METAVARS[kind]
    metavar = (own or metavar) + (" ..." if several and not own else "")
    return Option(name, group, text, default, metavar, choices, several, tyro.conf.Positional in notes)


def _paragraphs(command: type) -> tuple[str, list[str], list[str]]:
    """Summary, examples and notes of a docstring."""
    summary, *rest = re.split(r"\n\s*\n", inspect.cleandoc(str(command.__doc__)))
    examples = [text for text in rest if text.startswith(_TYPED)]
    return summary, examples, [text for text in rest if text not in examples]


def _summary(command: type) -> str:
    return _paragraphs(command)[0]


def _first_sentence(text: str) -> str:
    plain = " ".join(text.split())
    found = re.match(r".*?[^.]\.(?=\s|$)", plain)
    return found.group() if found else plain


def _stated(option: Option) -> str:
    """The default at the end of a text; nothing where leaving the option out is explained there."""
    default = option.default
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return f" (default: {'yes' if default else 'no'})"
    if isinstance(default, tuple):
        return f" (default: {'all of ' if default == option.choices else ''}{' '.join(map(str, default))})"
    return f" (default: {default})"


def _usage(options: Sequence[Option]) -> str:
    return " ".join([*(option.metavar for option in options if option.positional), "[OPTIONS]"])


def _examples(texts: Sequence[str]) -> str:
    """What one types, to be copied, and below it what it does."""
    lines = ["examples:"] if texts else []
    for text in texts:
        typed, _, purpose = " ".join(text.split()).partition(": ")
        words = textwrap.wrap(typed, _width() - 8, break_long_words=False, break_on_hyphens=False)
        lines.append("  " + " \\\n      ".join(words))
        lines += textwrap.wrap(purpose, _width(), initial_indent=6 * " ", subsequent_indent=6 * " ")
    return "\n".join(lines)


def _row(left: str, text: str) -> str:
    """An option and its text, which begins on the next line where the option is long."""
    lines = textwrap.wrap(text, _width() - TEXT_AT, break_on_hyphens=False)
    first = lines.pop(0) if lines and len(left) + 4 <= TEXT_AT else ""
    return "\n".join([f"  {left}".ljust(TEXT_AT if first else 0) + first, *(TEXT_AT * " " + line for line in lines)])


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _width())


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _width() -> int:
    return min(max(2 * TEXT_AT, shutil.get_terminal_size().columns), WIDEST)
