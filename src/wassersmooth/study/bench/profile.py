"""Where the time of a step goes: its kernels by kind, as the profiler of torch sees them on the device."""

from __future__ import annotations

import re
from typing import Any

import torch

from wassersmooth.study.bench.timing import Work

REPLAYS = 20

# The first that fits. Triton gives a kernel the name of its function; the compiler calls its own triton_.
KINDS = (
    ("pointwise and sums", r"^triton_"),
    ("convolutions", r"^(convolution|weight_gradient)$|conv|cudnn|cutlass|gemm|nvjet|wgrad|dgrad|implicit|sm\d\d_"),
    ("L(x)", r"^(bilinear|quadratic)"),
    ("update", r"multi_tensor|fused_sgd"),
    ("other", r""),
)


def kind_of(kernel: str) -> str:
    """What a kernel of this name does."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, kernel))


def kernel_times(work: Work, device: torch.device) -> dict[str, dict[str, float]]:
    """For each kind the milliseconds and the number of kernels in one call, on average. The call must be warm."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
        for _ in range(REPLAYS):
            work()
        torch.cuda.synchronize(device)
    return by_kind([(event.key, event.device_time_total, event.count) for event in watched.key_averages()], REPLAYS)


def by_kind(events: list[tuple[str, float, int]], calls: int) -> dict[str, dict[str, float]]:
    """From (name, microseconds, number) of all calls together; what took no time on the device is not a kernel."""
    found: dict[str, dict[str, Any]] = {kind: {"ms": 0.0, "kernels": 0.0} for kind, _ in KINDS}
    for name, microseconds, number in events:
        if microseconds > 0:
            row = found[kind_of(name)]
            row["ms"] += microseconds / 1000 / calls
            row["kernels"] += number / calls
    return found
