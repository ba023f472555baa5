"""What is computed once for each device, such as a copy of the weights there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from wassersmooth import visibility

Made = TypeVar("Made")


class DeviceCache(Generic[Made]):
    """Tensors made once for each device.

    They are made outside of inference mode, since an inference tensor could not be used elsewhere. What is made while the
    compiler, a tracer or a CUDA graph records belongs to that recording and is not kept.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, ...], Made] = {}

    def get(self, like: Tensor, make: Callable[[], Made], *key: Hashable) -> Made:
        """What ``make`` returns, or has returned for this key and the device of ``like``."""
        key = (like.device, *key)
        if key in self._made:
            return self._made[key]
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        if not visibility.recording(like):
            self._made[key] = made
        return made
