"""The cost of L(x): `quad` and `mv` against the literal loop over neighbor relations, for radii and image sizes.

    python benchmarks/operator.py [--device cuda] [--repeats 15] [--output results/operator-cpu.json]

Forward passes without gradients, square neighborhoods with constant weights, float32. All cases take turns in one run, so
read the ratios: absolute times depend on the machine and on what else it does.

On CUDA a second table gives device time alone, of forward and backward passes replayed from a CUDA graph, next to the time
of cloning every input and output once.
"""

from __future__ import annotations

import sys

sys.path[0] += "/.."  # the project's root: this file's folder would hide Python's own module `operator`

import argparse
import resource
from collections.abc import Callable
from pathlib import Path

import torch

import wassersmooth as ws
from benchmarks import measure
from wassersmooth.study.bench.operator import operator_rows, quad_by_edges

SMALL = (128, 3, 32, 32)
LARGE = (8, 1, 224, 224)  # about as many pixels: 401,408 against 393,216
RADII = (2, 4, 8)


def build_cases(device: torch.device) -> dict[str, Callable[[], object]]:
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
                cases[f"loop over relations, {size}"] = lambda a=laplacian, v=v: quad_by_edges(a, v)
            cases[f"quad, {size}"] = lambda a=laplacian, v=v: a.quad(v)
            cases[f"mv, {size}"] = lambda a=laplacian, v=v: a.mv(v)
            cases[f"cometric + quad, {size}"] = lambda m=metric, x=x, v=v: m.cometric(x).quad(v)
    return cases


def peak_memory(device: torch.device) -> dict[str, float]:
    """MiB: on CUDA what one `quad` at radius 8 adds to what is allocated; on the CPU the peak of the whole process."""
    if device.type != "cuda":
        return {"process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    x, v = torch.rand(SMALL, device=device), torch.randn(SMALL, device=device)
    laplacian = ws.Wasserstein(ws.PixelGraph.grid(32, 32, radius=8)).cometric(x)
    laplacian.quad(v)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    laplacian.quad(v)
    added = torch.cuda.max_memory_allocated(device) - before
    return {"quad_r8_added_mib": added / 2**20, "one_input_mib": x.numel() * x.element_size() / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default results/operator-DEVICE.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)

    with torch.no_grad():
        times = measure.medians(build_cases(device), arguments.repeats, device)
    ratios = {
        "loop / quad, 32px r=8 (goal: at least 12)": times["loop over relations, 32px r=8"] / times["quad, 32px r=8"],
        "quad r=8 / quad r=2, 32px (goal: at most 1.6)": times["quad, 32px r=8"] / times["quad, 32px r=2"],
        **{
            f"per pixel 224px / 32px, r={r} (goal: at most 1.5)": times[f"quad, 224px r={r}"]
            / times[f"quad, 32px r={r}"]
            * (torch.Size(SMALL).numel() / torch.Size(LARGE).numel())
            for r in RADII
        },
    }
    memory = peak_memory(device)
    rows = operator_rows(device) if device.type == "cuda" else []

    print(f"{'case':32} {'ms':>9}")
    for name, time in times.items():
        print(f"{name:32} {time:9.3f}")
    print(f"\n{'ratio':52} {'value':>7}")
    for name, ratio in ratios.items():
        print(f"{name:52} {ratio:7.2f}")
    for name, size in memory.items():
        print(f"{name}: {size:.1f}")
    if rows:
        print(f"\n{'device time':44} {'us':>8} {'clones':>8} {'ratio (goal, constant: at most 2)'}")
    for row in rows:
        name = f"{row['op']} {row['pass']}, {row['shape'][-1]}px r={row['radius']} {row['neighborhood']} {row['weights']}"
        print(f"{name:44} {1e3 * row['ms']:8.1f} {1e3 * row['copy_ms']:8.1f} {row['ratio']:8.2f}")
    report = {**measure.provenance(device), "milliseconds": times, "ratios": ratios, "memory": memory}
    if rows:
        report["device"] = rows
    measure.write(report, arguments.output or Path("results") / f"operator-{device.type}.json")


if __name__ == "__main__":
    main()
