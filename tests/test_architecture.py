"""The layers, enforced by reading the source: imports go down only, experiments on top, and the lower layers stay quiet."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from wassersmooth import _torch_internals

ROOT = Path(__file__).parent.parent
SOURCE, EXPERIMENTS = ROOT / "src" / "wassersmooth", ROOT / "experiments"
FLOORS = {"": 0, "geometry": 1, "learning": 2, "robustness": 2, "study": 3}  # "" holds what every floor may use
DOORS = ("__init__.py", "__main__.py", "_interrupt.py", "cli.py")  # the way in: may see every floor
ALWAYS_THERE = {"torch", "numpy"}
# Below the study: imported where they are used, never at the top of a file.
OPTIONAL = {"jinja2", "matplotlib", "ot", "triton"}
# Nothing but Triton, and so as optional as Triton itself.
KERNELS = {f"wassersmooth.geometry.{kind}_kernels" for kind in ("box", "table", "edge_aware", "motion")}
KERNELS |= {"wassersmooth.convolution_kernels"}
# Folders with one entrance: from outside, only this module of the folder is imported.
ENTRANCES = {"wassersmooth.learning.compiled": "wassersmooth.learning.compiled.fast_gradients"}

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
            of_package = node.module in ("wassersmooth", "experiments")
            names = [f"{node.module}.{alias.name}" for alias in node.names] if of_package else [node.module]
            found += [(str(name), id(node) in top_level) for name in names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_imports_go_down_only(path: Path) -> None:
    here = floor_of("wassersmooth." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
    for module, _ in imports(ast.parse(path.read_text())):
        if module.split(".")[0] == "wassersmooth":
            there = floor_of(module)
            assert here == there or FLOORS[there] < FLOORS[here], f"{here or 'the ground'} must not import {module}"


def test_the_package_never_imports_an_experiment() -> None:
    for path in SOURCE.rglob("*.py"):
        for module, _ in imports(ast.parse(path.read_text())):
            assert module.split(".")[0] not in ("experiments", "tests"), f"{path.name}: {module} is not in the wheel"


def test_experiments_do_not_import_each_other() -> None:
    """They may share a module that lies beside their folders."""
    for path in EXPERIMENTS.rglob("*.py"):
        own = path.relative_to(EXPERIMENTS).parts[0]
        for module, _ in imports(ast.parse(path.read_text())):
            package, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            assert package != "tests"
            assert package != "experiments" or other == own or (EXPERIMENTS / f"{other}.py").is_file(), f"{path}: {module}"


def test_each_experiment_has_a_readme_a_command_and_tests() -> None:
    folders = [path for path in EXPERIMENTS.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} >= {"paper", "frontier", "speed"}
    for folder in folders:
        assert {"README.md", "__main__.py", "commands.py"} <= {path.name for path in folder.iterdir()}
        assert list((ROOT / "tests" / "experiments" / folder.name).glob("test_*.py"))
        assert f"python -m experiments.{folder.name} " in (folder / "README.md").read_text()


@pytest.mark.parametrize("path", [p for p in MODULES if "study" not in p.parts], ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_below_the_study_only_torch_and_numpy_are_needed_and_nothing_is_read_or_printed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for module, at_top in imports(tree):
        package = module.split(".")[0]
        known = package in sys.stdlib_module_names or package in ALWAYS_THERE or package == "wassersmooth"
        is_kernels = path.stem in {name.rpartition(".")[2] for name in KERNELS}
        lazy = not at_top or (is_kernels and package == "triton")
        assert known or (package in OPTIONAL and lazy), f"{module} must be optional and imported where it is used"
        assert module not in KERNELS or not at_top or is_kernels, f"{module} needs Triton and must be imported where it is used"
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"print", "open", "input"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_a_folder_with_an_entrance_is_entered_there(path: Path) -> None:
    here = "wassersmooth." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for folder, entrance in ENTRANCES.items():
            inside = [name for name in names if name == folder or name.startswith(f"{folder}.")]
            assert here.startswith(folder) or all(name == entrance or name.startswith(f"{entrance}.") for name in inside)


def test_files_have_telling_names() -> None:
    for path in [*MODULES, *EXPERIMENTS.rglob("*.py")]:
        assert path.stem not in {"utils", "helpers", "common", "misc"}


def test_every_module_says_what_it_is() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


def test_the_package_only_lists_names_and_its_version() -> None:
    *names, version = ast.parse((SOURCE / "__init__.py").read_text()).body
    assert all(isinstance(node, ast.ImportFrom | ast.Expr) for node in names)
    assert isinstance(version, ast.Assign)
    assert ast.unparse(version.targets[0]) == "__version__"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_private_names_of_torch_are_used_in_one_module_alone(path: Path) -> None:
    """Objects of this package may use each other's private names where they are of one class, as `self` and `other` are."""
    if path.name == "_torch_internals.py":
        return
    tree = ast.parse(path.read_text())
    names = [module for module, _ in imports(tree)]
    for node in ast.walk(tree):  # also a private submodule: from torch.utils import _pytree
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        assert not name.startswith("torch.") or not ("._" in name or "experimental" in name), f"{name} is private"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            assert owner in {"self", "cls", "other", "aten"}, f"{owner}.{node.attr} is private; see _torch_internals.py"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr"}:
            name = ast.unparse(node.args[1]).strip("'")
            assert not name.startswith("_") or name.startswith("__"), f"{name} is private; see _torch_internals.py"


def test_the_oldest_torch_that_is_allowed_is_one_that_was_tested() -> None:
    pyproject = (SOURCE.parent.parent / "pyproject.toml").read_text()
    assert f'"torch>={_torch_internals.TESTED_VERSIONS[0]}"' in pyproject
