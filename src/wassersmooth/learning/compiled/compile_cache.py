"""A cache of compiled functions: runs that differ in seed, weights or eta have the same graph and compile it once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

MAX_ENTRIES = 32  # functions in use are kept alive by their users, so dropping one here is safe

_cache: dict[str, Callable[..., Any]] = {}  # in order of last use
_lock = threading.Lock()


def get_or_compile(graph: fx.GraphModule, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The function compiled before for an equal graph, or else the result of ``compile``.

    Arguments:
        graph: the traced step; equal graphs are the same function of images, labels, parameters and buffers.
        compile: takes from seconds to minutes. It runs outside the lock: two threads that need the same function may both
            compile it, and then share the one that was ready first.
    """
    key = _fingerprint(graph)
    with _lock:
        found = _cache.get(key)
    made = compile() if found is None else found
    with _lock:
        _cache[key] = made = _cache.pop(key, made)
        if len(_cache) > MAX_ENTRIES:
            del _cache[next(iter(_cache))]
    return made


def _fingerprint(graph: fx.GraphModule) -> str:
    """A hash of the code, the layout of all inputs, and the constants."""
    digest = hashlib.sha256(graph.code.encode())
    for node in graph.graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), Tensor):
            digest.update(repr((value.shape, value.stride(), value.dtype, value.device)).encode())
        elif node.op == "get_attr":
            constant = getattr(graph, node.target)
            digest.update(repr((constant.shape, constant.dtype, constant.device)).encode())
            digest.update(constant.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    precision = (torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)  # type: ignore[attr-defined]
    return digest.hexdigest() + repr(precision)
