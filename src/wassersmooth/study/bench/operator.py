"""The cost of L(x) alone: `quad` and `mv`, forward and backward, beside the time of copying what they read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wassersmooth.geometry.cometric import WeightedLaplacian
from wassersmooth.geometry.graph import NamedWeight, Neighborhood, PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.geometry.neighbor_sum import edge_ends
from wassersmooth.study.bench.timing import Progress, Work, captured, timings

Shape = tuple[int, int, int, int]

RADII = (2, 4, 8)
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cuda": ((512, 3, 32, 32), (64, 3, 224, 224)),
    "cpu": ((128, 3, 32, 32), (8, 1, 224, 224)),
}
QUICK_SHAPES: tuple[Shape, ...] = ((16, 3, 32, 32),)
# (radius, neighborhood, weight); on CUDA only constant weights in a square have special kernels
CASES: tuple[tuple[int, Neighborhood, NamedWeight], ...] = (
    *((radius, "square", "constant") for radius in RADII),
    (4, "square", "gaussian"),
    (4, "disk", "constant"),
)
REPETITIONS = 20  # calls in one graph, since one call is too short to be timed
SLOW_REPETITIONS = 2  # of a call without a special kernel, which takes far longer


def operator_rows(
    device: torch.device, progress: Progress | None = None, repeats: int = 9, shapes: tuple[Shape, ...] | None = None
) -> list[dict[str, Any]]:
    """One row for each shape, graph, operation and pass, in milliseconds per call.

    Backward is the gradient in v of a recorded forward pass. ``copy_ms`` is the time to clone every field that is read or
    written: u, v, and the result of ``mv`` or the gradient; ``quad`` writes only one number per image.
    """
    rows: list[dict[str, Any]] = []
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    for shape in shapes or SHAPES[device.type]:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(shape, generator=generator).to(device)
        v, g = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        works: dict[Any, Work] = {2: _cloning(x, v), 3: _cloning(x, v, g)}
        for case in CASES:
            radius, neighborhood, weight = case
            graph = PixelGraph.grid(*shape[-2:], radius=radius, neighborhood=neighborhood, weight=weight)
            with torch.cuda.stream(stream):
                laplacian = Wasserstein(graph).evaluate(x)
                works |= {(*case, *key): work for key, work in _passes(laplacian, v, g).items()}
        prepared: dict[Any, Work] = {}
        uncaptured: list[Work] = []
        for key, work in works.items():
            if progress is not None:
                progress(f"{shape[0]} images of {shape[-1]} pixels")
            prepared[key] = _captured(work, device, _repetitions(key, device), stream, uncaptured)
        found = {key: timing.ms / _repetitions(key, device) for key, timing in timings(prepared, repeats, device).items()}
        for key, time in found.items():
            if not isinstance(key, tuple):
                continue
            radius, neighborhood, weight, op, direction = key
            copy = found[2 if (op, direction) == ("quad", "forward") else 3]
            row = {"shape": list(shape), "radius": radius, "op": op, "pass": direction}
            row |= {"neighborhood": neighborhood, "weights": weight}
            row |= {"captured": device.type == "cuda" and works[key] not in uncaptured}
            rows.append(row | {"ms": time, "copy_ms": copy, "ratio": time / copy})
    return rows


def parts(shapes: tuple[Shape, ...]) -> int:
    """How often :func:`operator_rows` reports progress."""
    return len(shapes) * (2 + 4 * len(CASES))


def quad_by_edges(laplacian: WeightedLaplacian, v: Tensor) -> Tensor:
    """Algorithm 1 of the paper, corrected: one pass over the image per neighbor relation, by sliced differences."""
    total = torch.zeros(len(v), dtype=v.dtype, device=v.device)
    graph = laplacian.graph
    for relation, weight in zip(graph.edge_relations, graph.weights.tolist(), strict=True):
        (u_i, u_j), (v_i, v_j) = edge_ends(laplacian.u, relation), edge_ends(v, relation)
        total = total + (weight * (v_i - v_j) ** 2 * (u_i + u_j) / 2).sum((1, 2, 3))
    return total


def _repetitions(key: Any, device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return REPETITIONS if not isinstance(key, tuple) or key[1:3] == ("square", "constant") else SLOW_REPETITIONS


def _captured(
    work: Work, device: torch.device, repetitions: int, stream: torch.cuda.Stream | None, uncaptured: list[Work]
) -> Work:
    """The work as one CUDA graph; where capture fails, the plain calls, and the work is added to ``uncaptured``."""
    try:
        return captured(work, device, repetitions, stream)
    except RuntimeError:  # for example where weights are copied from the host
        torch.cuda.synchronize(device)
        uncaptured.append(work)
        return lambda: [work() for _ in range(repetitions)]


def _cloning(*fields: Tensor) -> Work:
    return lambda: [field.clone() for field in fields]


def _passes(laplacian: WeightedLaplacian, v: Tensor, g: Tensor) -> dict[tuple[str, str], Work]:
    v = v.detach().requires_grad_()
    quad, mv, ones = laplacian.quad(v), laplacian.mv(v), v.new_ones(len(v))
    return {
        ("quad", "forward"): lambda: laplacian.quad(v.detach()),
        ("quad", "backward"): lambda: torch.autograd.grad(quad, v, ones, retain_graph=True),
        ("mv", "forward"): lambda: laplacian.mv(v.detach()),
        ("mv", "backward"): lambda: torch.autograd.grad(mv, v, g, retain_graph=True),
    }
