"""The report of a bench, with made-up numbers."""

from __future__ import annotations

from typing import Any

from wassersmooth.study.bench.steps import CASES, MEMORY_CASES, SWEEPS


def fake_report(**changes: Any) -> dict[str, Any]:
    """Made-up numbers, none of them ever measured."""
    step = {name: 2.0 + number for number, name in enumerate(CASES)}
    ratio = {"wasserstein_r4/plain": 2.5, "wasserstein_r8/euclidean": 2.0, "pgd7/wasserstein_r4": 1.4}
    settings = {"network": "made-up", "batch": 3, "image": [3, 32, 32], "precision": "tf32", "memory_format": "channels_last"}
    settings |= {"optimizer": "SGD", "repeats": 1}
    row = {"shape": [2, 3, 32, 32], "radius": 4, "op": "mv", "pass": "forward", "neighborhood": "square", "weights": "constant"}
    row |= {"captured": True}
    memory = {"mib": {name: 100.0 * (k + 1) for k, name in enumerate(MEMORY_CASES)}, "ratio": {"wasserstein_r4/plain": 2.0}}
    at_once = {"case": "wasserstein_r4", "runs": 8, "ms_per_step_per_run": 1.25}
    at_once |= {
        "table": [{"runs": 8, "ms_per_step_per_run": 1.25}],
        "study": {"runs": 2, "of": ["a", "b"], "ms_per_step_per_run": 9},
    }
    report = {"hardware": "no machine", "torch": "0.fake", "commit": "abc", "command": "made up", "settings": settings}
    report |= {"step": step, "ratio": ratio, "limit": {name: SWEEPS[name] / 3 for name in CASES}, "memory": memory}
    report |= {"engine": {name: {"engine": "by hand", "captured": True} for name in CASES}, "throughput": at_once}
    report |= {"operator": [row | {"ms": 0.5, "copy_ms": 0.25, "ratio": 2.0}]}
    report |= {"training": {"study": "s", "runs": 3, "epochs": 200, "seconds": 610.0, "ms_per_step_per_run": None}}
    report["training"] |= {"training_seconds": 590.0, "evaluation_seconds": 20.0}
    report |= {"accuracy": {"precision": "tf32", "fast": [3e-4], "double_backward": [1e-4], "ratio": 3.0}}
    report |= {"profile": {name: {"convolutions": {"ms": k + 0.5, "kernels": 7.0}} for k, name in enumerate(("plain", "pgd7"))}}
    return report | changes
