"""Image classifiers in a Hugging Face folder: read from local safetensors alone, and no code of the folder is run."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from torch import nn

from wassersmooth._checks import first_line
from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import parse

HF = "hf:"  # before the path of the folder
OFFLINE = {"local_files_only": True, "trust_remote_code": False}


def hf_folder(name: str) -> Path:
    """The folder that ``hf:FOLDER`` names."""
    folder = Path(os.path.expanduser(name.removeprefix(HF)))  # pathlib's own raises for a user who does not exist
    if not (folder / "config.json").is_file():
        raise StudyError(
            f"{name}: expected a folder with the config.json and the safetensors that save_pretrained writes; got "
            f"{'none there' if folder.is_dir() else 'no such folder'}; models are not downloaded: give the path of a local copy"
        )
    return folder.resolve()


def hf_model(name: str, trained: bool) -> nn.Module:
    """The network of the folder's configuration, with the folder's weights or with random ones."""
    folder, transformers = hf_folder(name), import_package("transformers", name)
    classifier = transformers.AutoModelForImageClassification
    try:
        model: nn.Module
        if trained:
            model = classifier.from_pretrained(folder, use_safetensors=True, **OFFLINE)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, **OFFLINE)
            model = classifier.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers can raise anything for another kind of folder
        raise StudyError(
            f"{name} cannot be loaded ({type(error).__name__}: {first_line(error, 160)}); expected an image classifier of "
            "transformers with its weights as safetensors, and no code of its own; write one with "
            "model.save_pretrained(FOLDER, safe_serialization=True)"
        ) from error
    return model


def hf_normalization(name: str) -> tuple[list[float], list[float]] | None:
    """Mean and std of the folder's ``preprocessor_config.json``; None if it does not exist or does not normalize."""
    path = hf_folder(name) / "preprocessor_config.json"
    try:
        found = parse(path.read_bytes())
        if found.get("do_normalize") is False:
            return None
        mean, std = ([float(value) for value in found[key]] for key in ("image_mean", "image_std"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StudyError(
            f"{path} holds no usable image_mean and image_std ({type(error).__name__}: {first_line(error)}); give --mean and "
            "--std"
        ) from None
    return mean, std


def hf_class_names(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's classes, in the order of its outputs; empty where it has none of its own."""
    names = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(names, dict) or any(name == f"LABEL_{index}" for index, name in names.items()):
        return ()
    return tuple(str(names[index]) for index in sorted(names))


def import_package(package: str, model: str) -> Any:
    """A package that some models need and this one does not bring along."""
    try:
        return importlib.import_module(package)
    except Exception as error:  # one that was built for another torch can raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise StudyError(f"model {model} needs the package {package}; install it with: pip install {package}") from None
        raise StudyError(
            f"model {model} needs the package {package}, which cannot be imported ({type(error).__name__}: "
            f"{first_line(error, 120)}); expected versions that fit together; install them with: pip install -U {package} torch"
        ) from error
