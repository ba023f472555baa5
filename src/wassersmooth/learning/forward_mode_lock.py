"""Forward-mode differentiation by one thread at a time: torch has one level of it for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.autograd.forward_ad as forward_ad

lock = threading.RLock()


@contextmanager
def exclusive_forward_mode() -> Iterator[None]:
    """Wait until no other thread of this library differentiates in forward mode, then keep the others out."""
    with lock:
        try:
            with forward_ad.dual_level():
                pass
        except RuntimeError as error:  # a level that is not this library's, of this thread or another
            raise ValueError(
                "forward mode needs torch's only level of forward-mode AD; got one that is already active "
                "(torch.autograd.forward_ad.dual_level); leave it first, or use engine='double_backward'"
            ) from error
        yield
