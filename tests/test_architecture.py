"""The house of three floors, enforced by reading the source: imports go down only, and the lower floors stay quiet."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "wassersmooth"
FLOORS = {"": 0, "geometry": 1, "learning": 2, "robustness": 2, "study": 3}  # "" holds what every floor may use
DOORS = ("__init__.py", "__main__.py", "cli.py")  # the way in: may see every floor
ALWAYS_THERE = {"torch", "numpy"}
OPTIONAL = {"ot", "pyautoattack", "triton"}  # below the study: imported where they are used, never at the top of a file
# Nothing but Triton, and so as optional as Triton itself.
KERNELS = {"wassersmooth.geometry.box_kernels", "wassersmooth.learning.tracing.convolution_kernels"}
LONGEST_FILE = 310

MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).as_posix() not in DOORS)


def floor_of(module: str) -> str:
    """The folder of `wassersmooth.folder.module`, or "" for a module on the ground."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Every imported module, and whether the import stands at the top of the file."""
    top_level = {id(node) for node in ast.iter_child_nodes(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top_level) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that a reader sees the floor"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "wassersmooth" else [node.module]
            found += [(str(name), id(node) in top_level) for name in names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_imports_go_down_only(path: Path) -> None:
    here = floor_of("wassersmooth." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
    for module, _ in imports(ast.parse(path.read_text())):
        if module.split(".")[0] == "wassersmooth":
            there = floor_of(module)
            assert here == there or FLOORS[there] < FLOORS[here], f"{here or 'the ground'} must not import {module}"


@pytest.mark.parametrize("path", [p for p in MODULES if "study" not in p.parts], ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_below_the_study_only_torch_and_numpy_are_needed_and_nothing_is_read_or_printed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for module, at_top in imports(tree):
        package = module.split(".")[0]
        known = package in sys.stdlib_module_names or package in ALWAYS_THERE or package == "wassersmooth"
        is_kernels = path.stem in {name.rpartition(".")[2] for name in KERNELS}
        lazy = not at_top or (is_kernels and package == "triton")
        assert known or (package in OPTIONAL and lazy), f"{module} must be optional and imported where it is used"
        assert module not in KERNELS or not at_top, f"{module} needs Triton and must be imported where it is used"
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"print", "open", "input"}


def test_files_stay_short_and_have_telling_names() -> None:
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= LONGEST_FILE, f"{path.name} is too long to be read in one go"
        assert path.stem not in {"utils", "helpers", "common", "misc"}


def test_every_module_says_what_it_is() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


def test_the_way_in_only_lists_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    assert all(isinstance(node, ast.ImportFrom | ast.Expr) for node in tree.body)
