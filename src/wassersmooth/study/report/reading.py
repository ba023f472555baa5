"""Read a study folder without trusting it: a file that is missing or broken costs one line, not the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from wassersmooth.study import figure_data
from wassersmooth.study.config import FREE_TO_CHANGE, USUAL
from wassersmooth.study.regularizers import heading_of, strength_label
from wassersmooth.study.report.data import Group, RunRecord, StudyRecord, number
from wassersmooth.study.runs import CERTIFICATES, RunFiles, unverified_line, unverified_rows, with_new_fields
from wassersmooth.study.stored_json import UnreadableError

T = TypeVar("T")

LOST = {  # with each file
    "config.json": "the run is left out",
    "metrics.jsonl": "its training curve is left out",
    "provenance.json": "its cost and provenance are left out",
    "evaluation.json": "its errors are left out; measure them with: wassersmooth evaluate",
    figure_data.FILE: "its pictures are left out",
    CERTIFICATES: "its certified accuracy is left out",
}
PAPER_KINDS = ("none", "euclidean", "wasserstein")  # in the paper's order; all other kinds come after them
POINT = ("regularizer", "eta", "radius", "mass", "epsilon", "smoothness", "factory")  # varied on purpose
REPETITION = FREE_TO_CHANGE | {"seed"}  # runs that differ only in these repeat one experiment


def read_study(folder: Path) -> StudyRecord:
    """Read all run folders; ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"a study is a folder of run folders; got {folder}, which is not a folder")
    warnings: list[str] = []
    places = sorted(place for place in folder.iterdir() if _is_run(place, warnings))
    if not places:
        raise ValueError(f"{folder} holds no run folder (one with a config.json); train first: wassersmooth reproduce")
    runs = [run for place in places if (run := _read_run(RunFiles(place), warnings)) is not None]
    return StudyRecord(folder.resolve().name, _grouped(runs), tuple(warnings))


def _is_run(place: Path, warnings: list[str]) -> bool:
    try:
        return place.is_dir() and any((place / name).exists() for name in LOST)
    except OSError as broken:
        warnings.append(f"{place.name}: not readable ({broken}); it is left out")
        return False


def _read_run(files: RunFiles, warnings: list[str]) -> RunRecord | None:
    def warn(name: str, problem: str) -> None:
        warnings.append(f"{files.name}/{name}: {problem}; {LOST[name]}")

    def read(part: Callable[[], T]) -> T | None:
        try:
            return part()
        except UnreadableError as broken:
            warn(broken.path.name, broken.problem)
            return None

    def epochs() -> list[dict[str, object]]:
        try:
            rows = files.metrics(with_last_line=True)
        except UnreadableError as broken:
            warn(broken.path.name, broken.problem)
            return broken.rows
        if not rows:
            exists = (files.folder / "metrics.jsonl").exists()
            warn("metrics.jsonl", "empty, no epoch was finished" if exists else "missing")
        return rows

    config = read(files.stored_config)
    if config is None:
        return None
    if not isinstance(config.get("regularizer"), str):
        warn("config.json", "names no regularizer")
        return None
    config = USUAL | with_new_fields(config)
    evaluation = read(files.evaluation)
    if evaluation is not None and not evaluation.get("errors"):
        warn("evaluation.json", "holds no errors")
    elif evaluation is not None and (rows := unverified_rows(evaluation)):
        warnings.append(unverified_line(files, rows))
    certificates, rows_of_epochs = read(files.certificates), tuple(epochs())
    provenance = read(files.provenance) or {}
    return RunRecord(files.name, config, rows_of_epochs, provenance, evaluation or {}, read(files.pictures), certificates)


def _grouped(runs: list[RunRecord]) -> tuple[Group, ...]:
    buckets: dict[str, list[RunRecord]] = {}
    for run in runs:
        identity = {key: value for key, value in run.config.items() if key not in REPETITION}
        buckets.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(run)

    def order(bucket: list[RunRecord]) -> tuple[int, str, float, float, str]:
        kind, first = _kind(bucket[0]), bucket[0]
        rank = PAPER_KINDS.index(kind) if kind in PAPER_KINDS else len(PAPER_KINDS)
        return rank, kind, number(first.setting("radius")) or 0.0, number(first.setting("eta")) or 0.0, first.name

    differing = _differing_settings(runs)
    groups: list[Group] = []
    for bucket in sorted(buckets.values(), key=order):
        kind = _kind(bucket[0])
        preferred = PAPER_KINDS.index(kind) if kind in PAPER_KINDS else len(PAPER_KINDS)
        taken = {group.series for group in groups}
        series = preferred if preferred not in taken else max({len(PAPER_KINDS) - 1} | taken) + 1
        seeds = sorted(bucket, key=lambda run: (number(run.setting("seed")) or 0.0, run.name))
        groups.append(Group(kind, heading_of(kind), _detail(bucket[0], differing), series, tuple(seeds)))
    return tuple(groups)


def _kind(run: RunRecord) -> str:
    return str(run.setting("regularizer", "unknown")).lower()


def _differing_settings(runs: list[RunRecord]) -> list[str]:
    """Settings other than the regularizer in which the runs of a study differ."""
    keys = sorted({key for run in runs for key in run.config} - REPETITION - set(POINT))
    return [key for key in keys if len({json.dumps(run.config.get(key), default=str) for run in runs}) > 1]


def _detail(run: RunRecord, differing: list[str]) -> str:
    """The strength of a penalty, and the settings that other groups do not share."""
    eta, radius, mass, epsilon, smoothness = (number(run.setting(key)) for key in POINT[1:-1])
    parts = [f"η = {strength_label(eta)}"] if eta else []
    parts += [f"radius {radius:g}"] if radius else []
    parts += [f"mass {strength_label(mass)}"] if mass else []
    parts += [f"ε = {strength_label(epsilon)}"] if epsilon else []
    parts += [f"smoothness {strength_label(smoothness)}"] if smoothness else []
    parts += [str(factory)] if (factory := run.setting("factory")) else []
    parts += [f"{key.replace('_', ' ')} {run.config.get(key)}" for key in differing]
    return ", ".join(parts)
