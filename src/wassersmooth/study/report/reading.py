"""Reading a study folder without trusting it: a file that is missing or broken costs one line, not the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from wassersmooth.study import exhibits
from wassersmooth.study.config import FREE_TO_CHANGE
from wassersmooth.study.kinds import heading_of
from wassersmooth.study.regularizers import readable
from wassersmooth.study.report.data import Group, Record, Run, Study, find, number, section

FILES = ("config.json", "metrics.jsonl", "provenance.json", "evaluation.json", "exhibits.safetensors")
REMEDIES = {
    "config.json": "the run is left out",
    "metrics.jsonl": "its training curve is left out",
    "provenance.json": "its cost and provenance are left out",
    "evaluation.json": "its errors are left out; measure them with: wassersmooth evaluate",
    "exhibits.safetensors": "its pictures are left out",
}

KINDS = ("none", "euclidean", "wasserstein")  # the paper's three, in its order; everything else comes after them
POINT = ("regularizer", "eta", "radius", "mass", "epsilon")  # what a study varies on purpose
NOT_THE_EXPERIMENT = FREE_TO_CHANGE | {"seed"}  # runs that differ in these alone are one experiment, repeated


def read_study(folder: Path) -> Study:
    """Reads every run folder; ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f"a study is a folder of run folders; got {folder}, which is not a folder")
    complaints: list[str] = []
    places = sorted(place for place in folder.iterdir() if _is_run(place, complaints))
    if not places:
        raise ValueError(f"{folder} holds no run folder (one with a config.json); train first: wassersmooth reproduce")
    runs = [run for place in places if (run := _read_run(place, complaints)) is not None]
    return Study(folder.resolve().name, _grouped(runs), tuple(complaints))


def _is_run(place: Path, complaints: list[str]) -> bool:
    try:
        return place.is_dir() and any((place / name).exists() for name in FILES)
    except OSError as broken:
        complaints.append(f"{place.name}: not readable ({_one_line(broken)}); it is left out")
        return False


def _read_run(place: Path, complaints: list[str]) -> Run | None:
    def complain(name: str, what: str) -> None:
        complaints.append(f"{place.name}/{name}: {what}; {REMEDIES[name]}")

    def record(name: str) -> Record | None:
        try:
            found = json.loads((place / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            complain(name, "missing")
        except (OSError, ValueError, RecursionError) as broken:
            complain(name, f"not readable as JSON ({_one_line(broken)})")
        else:
            if isinstance(found, dict):
                return found
            complain(name, f"holds a {type(found).__name__} where an object is expected")
        return None

    config = record("config.json")
    if config is None:
        return None
    if not isinstance(find(config, "regularizer"), str):
        complain("config.json", "names no regularizer")
        return None
    evaluation = record("evaluation.json")
    if evaluation is not None and not section(evaluation, "errors"):
        complain("evaluation.json", "holds no errors")
    return Run(
        name=place.name,
        config=config,
        epochs=_read_epochs(place / "metrics.jsonl", complain),
        provenance=record("provenance.json"),
        evaluation=evaluation,
        exhibits=_read_exhibits(place / "exhibits.safetensors", complain),
    )


def _read_epochs(path: Path, complain: Callable[[str, str], None]) -> tuple[Record, ...]:
    epochs: list[Record] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        complain(path.name, "missing")
        return ()
    except (OSError, ValueError) as broken:
        complain(path.name, f"not readable ({_one_line(broken)})")
        return ()
    for place, line in enumerate(lines, 1):
        try:
            epoch = json.loads(line)
            if not isinstance(epoch, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as broken:
            complaint = (
                f"line {place} of {len(lines)} is broken ({_one_line(broken)}), the {len(epochs)} epochs before it are shown"
            )
            complain(path.name, complaint)
            break
        epochs.append(epoch)
    if not lines:
        complain(path.name, "empty, no epoch was finished")
    return tuple(epochs)


def _read_exhibits(path: Path, complain: Callable[[str, str], None]) -> exhibits.Exhibits | None:
    try:
        return exhibits.load(path)
    except FileNotFoundError:
        complain(path.name, "missing")
    except Exception as broken:  # safetensors raises types of its own, and a foreign file fails anywhere
        complain(path.name, f"not readable ({_one_line(broken)})")
    return None


def _grouped(runs: list[Run]) -> tuple[Group, ...]:
    buckets: dict[str, list[Run]] = {}
    for run in runs:
        identity = {key: value for key, value in run.config.items() if key not in NOT_THE_EXPERIMENT}
        buckets.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(run)

    def order(bucket: list[Run]) -> tuple[int, str, float, float, str]:
        kind, first = _kind(bucket[0]), bucket[0]
        rank = KINDS.index(kind) if kind in KINDS else len(KINDS)
        return rank, kind, number(first.setting("radius")) or 0.0, number(first.setting("eta")) or 0.0, first.name

    apart = _what_differs(runs)
    groups: list[Group] = []
    for bucket in sorted(buckets.values(), key=order):
        kind = _kind(bucket[0])
        preferred = KINDS.index(kind) if kind in KINDS else len(KINDS)
        taken = {group.series for group in groups}
        series = preferred if preferred not in taken else max({len(KINDS) - 1} | taken) + 1
        seeds = sorted(bucket, key=lambda run: (number(run.setting("seed")) or 0.0, run.name))
        groups.append(Group(kind, heading_of(kind), _detail(bucket[0], apart), series, tuple(seeds)))
    return tuple(groups)


def _kind(run: Run) -> str:
    return str(run.setting("regularizer", "unknown")).lower()


def _what_differs(runs: list[Run]) -> list[str]:
    """Settings beyond the regularizer in which the runs of a study are not alike."""
    keys = sorted({key for run in runs for key in run.config} - NOT_THE_EXPERIMENT - set(POINT))
    return [key for key in keys if len({json.dumps(run.config.get(key), default=str) for run in runs}) > 1]


def _detail(run: Run, apart: list[str]) -> str:
    """The strength of a penalty, and what else sets this group apart from the others."""
    eta, radius, mass, epsilon = (number(run.setting(key)) for key in POINT[1:])
    parts = [f"η = {readable(eta)}"] if eta else []
    parts += [f"radius {radius:g}"] if radius else []
    parts += [f"mass {readable(mass)}"] if mass else []
    parts += [f"ε = {readable(epsilon)}"] if epsilon else []
    parts += [f"{key.replace('_', ' ')} {run.config.get(key)}" for key in apart]
    return ", ".join(parts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
