"""Where the time of a step goes: its kernels by kind, as torch's profiler sees them on the device."""

from __future__ import annotations

import re
from typing import Any

import torch

from wassersmooth.study.bench.timing import Work

REPLAYS = 20

# The first match counts. Triton names a kernel after its function; the names of inductor's kernels begin with triton_.
KINDS = (
    ("pointwise and sums", r"^triton_"),
    ("convolutions", r"^(convolution|weight_gradient)$|conv|cudnn|cutlass|gemm|nvjet|wgrad|dgrad|implicit|sm\d\d_"),
    ("L(x)", r"^(bilinear|quadratic)"),
    ("update", r"multi_tensor|fused_sgd"),
    ("other", r""),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel))


def kernel_times(work: Work, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds and number of kernels of each kind in one warm call, on average."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(REPLAYS):
            work()
        torch.cuda.synchronize(device)
    return by_kind([(event.key, event.device_time_total, event.count) for event in profiled.key_averages()], REPLAYS)


def by_kind(events: list[tuple[str, float, int]], calls: int) -> dict[str, dict[str, float]]:
    """Sum (name, microseconds, number) over all calls; an event without device time is not a kernel."""
    found: dict[str, dict[str, Any]] = {kind: {"ms": 0.0, "kernels": 0.0} for kind, _ in KINDS}
    for name, microseconds, number in events:
        if microseconds > 0:
            row = found[kind_of(name)]
            row["ms"] += microseconds / 1000 / calls
            row["kernels"] += number / calls
    return found
