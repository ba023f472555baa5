"""How everything is timed: warm, cases taking turns, the median of many; on CUDA device time of a replayed graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Work = Callable[[], object]
Progress = Callable[[str], None]  # is told what comes next

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the quartiles around it."""

    ms: float
    low: float
    high: float


def captured(work: Work, device: torch.device, repetitions: int = 1, stream: torch.cuda.Stream | None = None) -> Work:
    """On CUDA the work, that many times, as one graph of kernels; whoever calls the result replays it. Else as it is.

    Raises whatever the work raises where it cannot be captured. A work that is the backward pass of something recorded
    before needs the ``stream`` of that: autograd goes back on the streams it came by.
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
    # A stream of its own, since matrix products keep a workspace per stream, which graphs at the same time must not share.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repetitions):
            work()

    def replay(work: Work = work) -> None:  # holds the work: its kernels and tensors must outlive the graph
        graph.replay()

    return replay


def timings(
    cases: Mapping[str, Work], repeats: int, device: torch.device, progress: Progress | None = None
) -> dict[str, Timing]:
    """Each case once per round, so that a disturbance hits all alike."""
    if device.type == "cpu":
        torch.empty(31 * 2**20, dtype=torch.uint8)  # the C library learns to keep freed memory, as in a process that trains
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats):
        if progress is not None:
            progress(f"round {number + 1} of {repeats}")
        for name, work in cases.items():
            samples[name].append(milliseconds(work, device))
    return {name: _timing(found) for name, found in samples.items()}


def milliseconds(work: Work, device: torch.device) -> float:
    """One call after an uncounted one: between two events on the device, or by the clock on the wall."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        work()  # while the device is busy with it, the counted call is launched
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
