"""The cost of L(x): `quad` and `mv` against the literal loop over neighbor relations, for radii and image sizes.

Forward passes without gradients, square neighborhoods with constant weights, float32. The cases are timed in turn, so read
the ratios: absolute times depend on the machine and on its load.

A second table is that of ``wassersmooth bench``: forward and backward passes and noise, for all kinds of weights and for
coherent motion, next to the time of cloning every field that is read or written. On CUDA its times are of the device alone, of
passes replayed from a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wassersmooth as ws
from wassersmooth.geometry.cometric import WeightedLaplacian
from wassersmooth.study.bench.operator import operator_rows, quad_by_edges
from wassersmooth.study.bench.tables import TABLES
from wassersmooth.study.bench.timing import timings

SMALL = (128, 3, 32, 32)
LARGE = (8, 1, 224, 224)  # about as many pixels: 401,408 against 393,216
RADII = (2, 4, 8)
MOST_ROUNDS = {"cpu": 5, "cuda": 9}  # of the second table, whose slowest cases take a second each on a CPU
OTHER_WEIGHTS: dict[str, dict[str, Any]] = {"gaussian": {"weight": "gaussian"}, "disk": {"neighborhood": "disk"}}


def build_cases(device: torch.device) -> dict[str, Callable[[], object]]:
    """Each operation on random images, by name."""
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, Callable[[], object]] = {}
    for shape in (SMALL, LARGE):
        x = torch.rand(shape, generator=generator).to(device)
        v = torch.randn(shape, generator=generator).to(device)
        for radius in RADII:
            metric = ws.Wasserstein(ws.PixelGraph.grid(*shape[-2:], radius=radius))
            laplacian = metric.cometric(x)
            size = f"{shape[-1]}px r={radius}"
            if shape is SMALL:
                assert isinstance(laplacian, WeightedLaplacian)
                cases[f"loop over relations, {size}"] = partial(quad_by_edges, laplacian, v)
            cases[f"quad, {size}"] = partial(laplacian.quad, v)
            cases[f"mv, {size}"] = partial(laplacian.mv, v)
            cases[f"cometric + quad, {size}"] = partial(_both, metric, x, v)
        for name, options in OTHER_WEIGHTS.items():
            laplacian = ws.Wasserstein(ws.PixelGraph.grid(*shape[-2:], 8, **options)).cometric(x)
            cases[f"quad, {shape[-1]}px r=8, {name}"] = partial(laplacian.quad, v)
            cases[f"mv, {shape[-1]}px r=8, {name}"] = partial(laplacian.mv, v)
    return cases


def _both(metric: ws.Wasserstein, x: Tensor, v: Tensor) -> Tensor:
    return metric.cometric(x).quad(v)


def peak_memory(device: torch.device) -> dict[str, float]:
    """MiB: on CUDA what one `quad` at radius 8 adds to what is allocated; on the CPU the peak of the whole process."""
    if device.type != "cuda":
        try:
            import resource
        except ImportError:  # on Windows
            return {}
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB on Linux
        return {"process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    x, v = torch.rand(SMALL, device=device), torch.randn(SMALL, device=device)
    laplacian = ws.Wasserstein(ws.PixelGraph.grid(32, 32, radius=8)).cometric(x)
    laplacian.quad(v)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    laplacian.quad(v)
    added = torch.cuda.max_memory_allocated(device) - before
    return {"quad_r8_added_mib": added / 2**20, "one_input_mib": x.numel() * x.element_size() / 2**20}


def measure_operator(device: torch.device, repeats: int) -> dict[str, Any]:
    """Times in milliseconds, the ratios that have goals, peak memory, and the rows of the second table."""
    with torch.no_grad():
        times = {name: timing.ms for name, timing in timings(build_cases(device), repeats, device).items()}
    pixels = torch.Size(SMALL).numel() / torch.Size(LARGE).numel()
    ratios = {
        "loop / quad, 32px r=8 (goal: at least 12)": times["loop over relations, 32px r=8"] / times["quad, 32px r=8"],
        "quad r=8 / quad r=2, 32px (goal: at most 1.6)": times["quad, 32px r=8"] / times["quad, 32px r=2"],
    }
    for r in RADII:
        per_pixel = times[f"quad, 224px r={r}"] / times[f"quad, 32px r={r}"] * pixels
        ratios[f"per pixel 224px / 32px, r={r} (goal: at most 1.5)"] = per_pixel
    for size, op in ((size, op) for size in ("32px", "224px") for op in ("quad", "mv")):
        other, constant = times[f"{op}, {size} r=8, gaussian"], times[f"{op}, {size} r=8"]
        ratios[f"gaussian / constant, {op}, {size} r=8 (goal: at most 3)"] = other / constant
    report: dict[str, Any] = {"milliseconds": times, "ratios": ratios, "memory": peak_memory(device)}
    return report | {"operator": operator_rows(device, repeats=min(repeats, MOST_ROUNDS[device.type]))}


def operator_lines(report: dict[str, Any]) -> list[str]:
    """The report as two tables, the second one in Markdown."""
    lines = [f"{'case':32} {'ms':>9}", *(f"{name:32} {ms:9.3f}" for name, ms in report["milliseconds"].items())]
    lines += ["", f"{'ratio':52} {'value':>7}", *(f"{name:52} {ratio:7.2f}" for name, ratio in report["ratios"].items())]
    lines += [f"{name}: {size:.1f}" for name, size in report["memory"].items()]
    rows = report["operator"]
    table = TABLES["operator"](rows, {"cuda": any(row["captured"] for row in rows)})
    return [*lines, "", *table.to_markdown().splitlines()]
