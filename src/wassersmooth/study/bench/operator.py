"""The cost of L(x) alone: `quad`, `mv` and `sample`, forward and backward, beside copying what they read and write."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wassersmooth.geometry.coherent_motion import Deformations
from wassersmooth.geometry.cometric import Cometric, WeightedLaplacian
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Metric, Wasserstein
from wassersmooth.geometry.neighbor_sum import edge_ends
from wassersmooth.study.bench.timing import Progress, Work, captured, timings

Shape = tuple[int, int, int, int]

RADII = (2, 4, 8)
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cuda": ((512, 3, 32, 32), (64, 3, 224, 224)),
    "cpu": ((64, 3, 32, 32), (4, 1, 224, 224)),  # derivatives of learned weights keep gigabytes
}
QUICK_SHAPES: tuple[Shape, ...] = ((16, 3, 32, 32),)
REPETITIONS = 20  # calls in one graph, since one call is too short to be timed
CHECKED_IMAGES = 4  # on which results are compared with float64


@dataclass(frozen=True)
class Case:
    """A metric. Motion has its smoothness as radius."""

    radius: int
    neighborhood: str  # square, disk or motion
    weights: str  # constant, gaussian, learned, edge-aware, or the kind of motion

    def metric(self, height: int, width: int, device: torch.device) -> Metric:
        if self.neighborhood == "motion":
            return Deformations(height, width, float(self.radius), self.weights)  # type: ignore[arg-type]
        weight: Any = self.weights if self.weights == "gaussian" else "constant"
        features = _colors if self.weights == "edge-aware" else None
        graph = PixelGraph.grid(height, width, self.radius, self.neighborhood, weight, features)  # type: ignore[arg-type]
        if self.weights == "learned":
            lengths = torch.tensor([float(dy * dy + dx * dx) for dy, dx in graph.offsets])
            learned = torch.exp(-lengths / self.radius**2).to(device).requires_grad_()
            graph = PixelGraph.grid(height, width, self.radius, weight=learned)
        return Wasserstein(graph)


CASES: tuple[Case, ...] = (
    *(Case(radius, "square", "constant") for radius in RADII),
    *(
        Case(radius, *kind)
        for kind in (("square", "gaussian"), ("disk", "constant"), ("square", "learned"))
        for radius in (4, 8)
    ),
    *(Case(radius, "square", "edge-aware") for radius in (4, 8)),
    *(Case(smoothness, "motion", kind) for kind in ("transport", "advection") for smoothness in (2, 4)),
)
# At radius 8 the normal numbers of large images take 6 GB.
SAMPLED = tuple(Case(4, "square", weights) for weights in ("constant", "gaussian", "edge-aware"))


def _colors(images: Tensor) -> Tensor:
    """As features: a difference of 0.3 in each of three channels halves a weight twice."""
    return images / 0.3


def operator_rows(
    device: torch.device, progress: Progress | None = None, repeats: int = 9, shapes: tuple[Shape, ...] | None = None
) -> list[dict[str, Any]]:
    """One row for each shape, metric, operation and pass, in milliseconds per call.

    Backward is the gradient in v of a recorded forward pass, and in the weights if they are learned; backward in x is the
    gradient in the image. Where L is linear in x, the forward pass of ``quad`` has kept its gradient, and only products are
    left. ``copy_ms`` is the time to clone every field that is read or written (:func:`_fields`). For ``sample`` it is the time
    to draw as many normal numbers. ``error`` is the largest difference from float64, as a part of the largest value. An
    operation that fails has a row with its ``failure``, and no times.
    """
    rows: list[dict[str, Any]] = []
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    for shape in shapes or SHAPES[device.type]:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(shape, generator=generator).to(device)
        v, g = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        works: dict[Any, Work] = {2: _cloning(x, v), 3: _cloning(x, v, g), 4: _cloning(x, v, g, -g)}
        errors: dict[Any, float] = {}
        failures: dict[Any, str] = {}  # by case, operation and pass
        for case in CASES:
            try:
                with torch.cuda.stream(stream):
                    metric = case.metric(*shape[-2:], device)
                    found = _passes(metric, x, v, g)
                    found |= _sampling(metric, x) if case in SAMPLED else {}
                    works |= {(case, *key): work for key, work in found.items()}
                    errors |= {(case, op): error for op, error in _errors(metric, x, v).items()}
            except Exception as error:  # a kernel that a device cannot compile is a result of its own
                failures[case, "all", "forward"] = _first_line(error)
        prepared: dict[Any, Work] = {}
        uncaptured: list[Work] = []
        for key, work in works.items():
            if progress is not None:
                progress(f"{shape[0]} images of {shape[-1]} pixels")
            try:
                prepared[key] = _captured(work, device, _repetitions(key, device), stream, uncaptured)
            except Exception as error:
                failures[key] = _first_line(error)
        times = {key: timing.ms / _repetitions(key, device) for key, timing in timings(prepared, repeats, device).items()}
        for key, ms in times.items():
            if not isinstance(key, tuple) or key[1] == "normals":
                continue
            case, op, direction = key
            baseline: Any = (case, "normals", "forward") if op == "sample" else _fields(case, op, direction)
            if baseline not in times:  # its failure has a row
                continue
            row = {"op": op, "pass": direction, "captured": device.type == "cuda" and works[key] not in uncaptured}
            row |= {"error": errors[case, op]} if (case, op) in errors and direction == "forward" else {}
            row |= {"ms": ms, "copy_ms": times[baseline], "ratio": ms / times[baseline]}
            rows.append({"shape": list(shape), **dataclasses.asdict(case), **row})
        for (case, op, direction), failure in failures.items():
            row = {"op": op, "pass": direction, "captured": False, "failure": failure}
            row |= dict.fromkeys(("ms", "copy_ms", "ratio"), 0.0)
            rows.append({"shape": list(shape), **dataclasses.asdict(case), **row})
    return rows


def parts(shapes: tuple[Shape, ...]) -> int:
    """How often :func:`operator_rows` reports progress."""
    return len(shapes) * (3 + 6 * len(CASES) + 2 * len(SAMPLED))


def _fields(case: Case, op: str, direction: str) -> int:
    """How many fields a pass reads or writes. The numbers per image that ``quad`` returns, or whose gradients it takes, do not
    count: forward, ``quad`` has x and v, and ``mv`` its result too; backward, v or what is in its place, x and the gradient."""
    if direction == "backward in x":
        linear = case.neighborhood != "motion"  # then x itself is not needed
        return (2 if op == "quad" else 3) + (not linear)
    return 2 if (op, direction) == ("quad", "forward") else 3


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def quad_by_edges(laplacian: WeightedLaplacian, v: Tensor) -> Tensor:
    """Algorithm 1 of the paper, corrected: one pass over the image per neighbor relation, by sliced differences."""
    total = torch.zeros(len(v), dtype=v.dtype, device=v.device)
    graph = laplacian.graph
    for relation, weight in zip(graph.edge_relations, graph.weights.tolist(), strict=True):
        (u_i, u_j), (v_i, v_j) = edge_ends(laplacian.u, relation), edge_ends(v, relation)
        total = total + (weight * (v_i - v_j) ** 2 * (u_i + u_j) / 2).sum((1, 2, 3))
    return total


def _repetitions(key: Any, device: torch.device) -> int:
    return 1 if device.type == "cpu" or (isinstance(key, tuple) and key[1] in ("sample", "normals")) else REPETITIONS


def _captured(
    work: Work, device: torch.device, repetitions: int, stream: torch.cuda.Stream | None, uncaptured: list[Work]
) -> Work:
    """The work as one CUDA graph; where capture fails, the plain calls, and the work is added to ``uncaptured``."""
    try:
        return captured(work, device, repetitions, stream)
    except RuntimeError:  # for example where weights are copied from the host
        torch.cuda.synchronize(device)
        work()  # raises again if it is not the capture that failed
        uncaptured.append(work)
        return lambda: [work() for _ in range(repetitions)]


def _cloning(*fields: Tensor) -> Work:
    return lambda: [field.clone() for field in fields]


def _passes(metric: Metric, x: Tensor, v: Tensor, g: Tensor) -> dict[tuple[str, str], Work]:
    cometric, constant, v = metric.evaluate(x), v, v.detach().requires_grad_()
    quad, mv, ones = cometric.quad(v), cometric.mv(v), v.new_ones(len(v))
    inputs = [v, *_learned(cometric)]
    image = x.detach().requires_grad_()
    there = metric.evaluate(image)
    quad_in_x, mv_in_x = there.quad(constant), there.mv(constant)

    @torch.no_grad()
    def forward(op: str) -> Tensor:
        result: Tensor = getattr(cometric, op)(v)
        return result

    return {
        ("quad", "forward"): lambda: forward("quad"),
        ("quad", "backward"): lambda: torch.autograd.grad(quad, inputs, ones, retain_graph=True),
        ("quad", "backward in x"): lambda: torch.autograd.grad(quad_in_x, image, ones, retain_graph=True),
        ("mv", "forward"): lambda: forward("mv"),
        ("mv", "backward"): lambda: torch.autograd.grad(mv, inputs, g, retain_graph=True),
        ("mv", "backward in x"): lambda: torch.autograd.grad(mv_in_x, image, g, retain_graph=True),
    }


def _learned(cometric: Cometric) -> list[Tensor]:
    weights = [cometric.graph.weights] if isinstance(cometric, WeightedLaplacian) else []
    return [tensor for tensor in weights if tensor.requires_grad]


def _sampling(metric: Metric, x: Tensor) -> dict[tuple[str, str], Work]:
    """A sample, and the normal numbers of all edges alone."""
    cometric = metric.evaluate(x)
    assert isinstance(cometric, WeightedLaplacian)
    sizes = [edge_ends(x, relation)[0].shape for relation in cometric.graph.edge_relations]
    return {
        ("sample", "forward"): lambda: cometric.sample(),
        ("normals", "forward"): lambda: [torch.randn(size, dtype=x.dtype, device=x.device) for size in sizes],
    }


@torch.no_grad()
def _errors(metric: Metric, x: Tensor, v: Tensor) -> dict[str, float]:
    x, v = x[:CHECKED_IMAGES], v[:CHECKED_IMAGES]
    here, exact = metric.evaluate(x), metric.evaluate(x.double())
    quad, mv = exact.quad(v.double()), exact.mv(v.double())
    return {
        "quad": float(((here.quad(v) - quad) / quad).abs().max()),
        "mv": float((here.mv(v) - mv).abs().max() / mv.abs().max()),
    }
