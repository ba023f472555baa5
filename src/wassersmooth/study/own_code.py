"""Code of a user's own that a study runs: models and metrics, given as ``module:factory``."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from typing import Any

from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import one_line


def made(path: str, what: str, signature: str, *arguments: object, **named: object) -> Any:
    """What the factory of ``module:factory``, importable from the working directory, returns for these arguments.

    Importing and calling run the user's code, which can raise anything, and may end in sys.exit, as a script does.

    Arguments:
        what: it is for, in errors.
        signature: of the factory, in errors.
    """
    module_name, _, factory_name = path.partition(":")
    here = os.getcwd()
    if here not in sys.path:  # unlike `python -m`, an installed command does not search the working directory
        sys.path.append(here)  # last: a file that lies there must not replace an installed module
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except SystemExit as error:
        raise StudyError(
            f"{what} {path}: {module_name} ends the program when it is imported; expected module:factory, importable from here;"
            ' put what a script does below if __name__ == "__main__"'
        ) from error
    except Exception as error:
        raise StudyError(f"{what} {path}: {error}; expected module:factory, importable from here") from error
    try:
        return factory(*arguments, **named)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise StudyError(f"{what} {path}: the factory failed ({reason}); it is called as {signature}") from error


def place_of(path: str) -> str:
    """Where the module of ``module:factory`` would be imported from, found without importing anything."""
    module = path.partition(":")[0]
    try:
        spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [*sys.path, os.getcwd()])
    except Exception:  # a path hook may raise anything
        spec = None
    if spec is None:
        return "not found here"
    return str(spec.origin or next(iter(spec.submodule_search_locations or ()), "unknown place"))
