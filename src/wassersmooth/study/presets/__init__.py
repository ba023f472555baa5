"""Studies as data: the presets that come with the package, and the user's own TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from wassersmooth.study import durable
from wassersmooth.study.config import AnyStudy, with_values
from wassersmooth.study.data import NAMES
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.stored_json import one_line

PACKAGED = resources.files(__name__)


def names(folder: Traversable = PACKAGED) -> list[str]:
    """The names of the presets, in alphabetical order."""
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def with_preset(study: AnyStudy, name: str, folder: Traversable = PACKAGED) -> AnyStudy:
    """The study with the values of a preset; an experiment keeps its presets in its own folder."""
    known = names(folder)
    if name not in known:
        remedy = did_you_mean(name, known) or "give your own file with --config"
        raise StudyError(f"preset must be one of {', '.join(known)}; got {name!r}; {remedy}")
    return with_values(study, tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8")), f"preset {name}")


def with_file(study: AnyStudy, path: Path) -> AnyStudy:
    """The study with the values of a TOML file; its keys are the names of the flags."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StudyError(f"--config {path} does not exist; expected a TOML file; check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StudyError(f"--config {path} cannot be read as TOML ({one_line(error)}); correct it") from None
    values = {key.replace("-", "_"): value for key, value in found.items()}
    return with_values(study, values | _beside(path, values), f"--config {path}")


def with_both(study: AnyStudy, preset: str, config: Path | None, folder: Traversable = PACKAGED) -> AnyStudy:
    """The study with the values of a preset, overridden by those of a file if there is one."""
    found = with_preset(study, preset, folder)
    return found if config is None else with_file(found, config)


def _beside(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """A data_dir for data that are not in the working directory but beside the file that names them.

    The name of the data set stays as written: it is a part of the run's configuration, whatever the working directory.
    """
    folder, dataset, data_dir = path.resolve().parent, values.get("dataset"), values.get("data_dir")
    path_of_data = dataset if data_dir is None and dataset not in NAMES else None
    for named, place in ((data_dir, folder / str(data_dir)), (path_of_data, folder)):
        if isinstance(named, str) and not durable.exists(Path(named)) and durable.exists(folder / named):
            return {"data_dir": str(place)}
    return {}
