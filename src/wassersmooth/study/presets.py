"""Studies as data: the presets that come with the package, and the user's own TOML files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from wassersmooth.study.config import AnyStudy, with_values
from wassersmooth.study.data import NAMES
from wassersmooth.study.errors import StudyError


def names() -> list[str]:
    """Of the presets, in alphabetical order."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def with_preset(study: AnyStudy, name: str) -> AnyStudy:
    """The study with the values of a preset."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        remedy = f"perhaps you meant {near[0]}" if near else "a file of your own goes with --config"
        raise StudyError(f"preset must be one of {', '.join(names())}; got {name!r}; {remedy}")
    return with_values(study, tomllib.loads((_folder() / f"{name}.toml").read_text()), f"preset {name}")


def with_file(study: AnyStudy, path: Path) -> AnyStudy:
    """The study with the values of a TOML file; its keys are the names of the flags."""
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise StudyError(f"--config {path} does not exist; expected a TOML file; check the path") from None
    except (OSError, ValueError) as error:
        raise StudyError(f"--config {path} cannot be read as TOML ({error})") from None
    values = {key.replace("-", "_"): value for key, value in found.items()}
    return with_values(study, values | _beside(path, values), f"--config {path}")


def with_both(study: AnyStudy, preset: str, config: Path | None) -> AnyStudy:
    """The study with the values of a preset, and over them those of a file where there is one."""
    found = with_preset(study, preset)
    return found if config is None else with_file(found, config)


def _beside(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """data_dir for data that are not where the user stands, but beside the file that names them.

    The name of the data set stays as it is written: it is a part of a run's configuration, wherever a command is given.
    """
    folder, dataset, data_dir = path.resolve().parent, values.get("dataset"), values.get("data_dir")
    own = dataset if data_dir is None and dataset not in NAMES else None
    for named, place in ((data_dir, folder / str(data_dir)), (own, folder)):
        if isinstance(named, str) and not Path(named).exists() and (folder / named).exists():
            return {"data_dir": str(place)}
    return {}


def _folder() -> Any:
    return resources.files("wassersmooth") / "presets"
