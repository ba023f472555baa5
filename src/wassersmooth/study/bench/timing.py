"""Timing: the median over interleaved rounds of warm calls; on CUDA the device time of a replayed graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Work = Callable[[], object]
Progress = Callable[[str], None]  # called with what comes next

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the quartiles around it."""

    ms: float
    low: float
    high: float


def captured(work: Work, device: torch.device, repetitions: int = 1, stream: torch.cuda.Stream | None = None) -> Work:
    """On CUDA, a function that replays ``repetitions`` calls as one CUDA graph; elsewhere the work itself.

    Raises what the work raises if it cannot be captured. The backward pass of an earlier forward pass needs the ``stream``
    of that pass, since autograd runs on the streams of the forward pass.
    """
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device) if stream is None else stream  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # A separate stream: matrix products keep a workspace per stream, which concurrent graphs must not share.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repetitions):
            work()

    def replay(work: Work = work) -> None:  # keeps a reference: the kernels and tensors of the work must outlive the graph
        graph.replay()

    return replay


def timings(
    cases: Mapping[str, Work], repeats: int, device: torch.device, progress: Progress | None = None
) -> dict[str, Timing]:
    """Time each case once per round, so that a disturbance affects all of them."""
    if device.type == "cpu":
        keep_freed_memory()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats):
        if progress is not None:
            progress(f"round {number + 1} of {repeats}")
        for name, work in cases.items():
            samples[name].append(milliseconds(work, device))
    return {name: _timing(found) for name, found in samples.items()}


def keep_freed_memory() -> None:
    """Make the C library's allocator keep freed memory, as it does in a process that trains."""
    torch.empty(31 * 2**20, dtype=torch.uint8)  # freeing a large block raises the threshold of malloc


def milliseconds(work: Work, device: torch.device) -> float:
    """The time of one call after a warm-up call: between two CUDA events, or by the wall clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        work()  # while the device is busy with this call, the timed one is launched
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end))
    work()
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def _timing(samples: list[float]) -> Timing:
    low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else 3 * samples
    return Timing(median(samples), low, high)
