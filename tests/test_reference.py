"""docs/reference.md names everything public, and every call on it is spelled as in the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wassersmooth as ws
from wassersmooth.geometry.cometric import Cometric
from wassersmooth.learning import gradient_gap
from wassersmooth.study import published_models
from wassersmooth.study.runs import Run

PAGE = (Path(__file__).parent.parent / "docs" / "reference.md").read_text()
FAMILIES = (ws.attacks, ws.calculus, ws.engines, ws.transport, ws.variations)
# Not for users: what attacks and engines share, what is called after the checks, and values that others make.
INTERNAL = {"ws.attacks.Attack", "ws.engines.Engine", "ws.calculus.laplacian_at"}
INTERNAL |= {"ws.PixelGraph", "ws.Report", "ws.Certificates", "ws.GroundFit", "ws.GroundScore"}


def public_calls() -> dict[str, Callable[..., Any]]:
    """What a user may call, by the name it has for him."""
    found: dict[str, Any] = {f"ws.{name}": value for name, value in vars(ws).items() if not isinstance(value, ModuleType)}
    for family in FAMILIES:
        found |= {f"ws.{_last(family)}.{name}": value for name, value in vars(family).items() if _belongs(value, family)}
    found |= {f"L.{name}": value for name, value in vars(Cometric).items()}
    makers = ("grid", "line", "volume", "from_edges")
    found |= {f"ws.PixelGraph.{name}": getattr(ws.PixelGraph, name) for name in makers}
    found |= {"metric.cometric": ws.Wasserstein.cometric}
    found |= {"metric.w1_constant": ws.Wasserstein.w1_constant}
    found |= {f"certificates.{name}": value for name, value in vars(ws.Certificates).items() if inspect.isfunction(value)}
    found |= {"ws.DirectionalPenalty.from_attack": ws.DirectionalPenalty.from_attack}
    found |= {f"{gradient_gap.__name__}.gap": gradient_gap.gap, f"{Run.__module__}.Run.at": Run.at}
    found |= {f"{Run.__module__}.Run.load_model": Run.load_model}
    found |= {f"{published_models.__name__}.load_published": published_models.load_published}
    return {name: call for name, call in found.items() if callable(call) and "._" not in name and name not in INTERNAL}


def spelled(name: str, call: Callable[..., Any]) -> str:
    """``name(first, second=default, *, third=default)``."""
    parts = []
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.name != "self":
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            parts.append(f"{parameter.name}{default}")
    return f"{name}({', '.join(parts)})"


def _last(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _belongs(value: object, family: ModuleType) -> bool:
    """Attacks and variations are gathered from several files, the other families are one; of engines, those one can give."""
    if family is ws.engines:
        return isinstance(value, type) and issubclass(value, ws.engines.Engine)
    home = getattr(value, "__module__", "")
    return home == family.__name__ or (family in (ws.attacks, ws.variations) and home.startswith("wassersmooth.robustness"))


def test_the_page_has_every_public_call_as_it_is_spelled() -> None:
    expected = {spelled(name, call) for name, call in public_calls().items()}
    written = set(re.findall(r"^\| `((?:ws|L|metric|certificates|wassersmooth)\.[^`]*)`", PAGE, re.MULTILINE))
    written -= {"certificates.classes"}  # a value, beside three others
    assert written == expected


def test_the_page_names_what_is_public_and_not_called() -> None:
    """Of the families that are gathered; the others hold constants of their own."""
    families = (ws.attacks, ws.variations)
    named = {f"ws.{_last(family)}.{name}": value for family in families for name, value in vars(family).items()}
    values = {name for name, value in named.items() if "._" not in name and not callable(value)}
    assert values == {"ws.variations.PARAMETERS"}
    assert all(f"`{name}`" in PAGE for name in values | {"ws.__version__"})


def test_the_parts_of_a_report_are_there() -> None:
    named = set(re.findall(r"`(?:report)?\.(\w+)(?:\(\))?`", PAGE))
    computed = {name for name, value in vars(ws.Report).items() if not name.startswith("_") and _is_method(value)}
    assert named == computed | {"curve", "fooled", "images", "masking", "seconds", "seen"}


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property)
