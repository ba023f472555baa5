"""Compiled functions, shared: runs that differ in seed, weights or eta have the same plain step and compile theirs once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

MOST = 32  # a session that goes through many models need not keep them all; those in use are kept by their users

_known: dict[str, Callable[..., Any]] = {}  # those asked for last are last
_turn = threading.Lock()  # of whoever looks into them or changes them


def shared(plain: fx.GraphModule, form: object, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What an equal plain step in an equal form was compiled to before, or else what ``compile`` makes of this one.

    Arguments:
        plain: the traced plain step; equal graphs are the same function of images, labels, parameters and buffers.
        form: all else that the compiled function depends on, told apart by its ``repr``.
        compile: differentiates and compiles, which takes from seconds to a minute. Threads do not wait for each other's: two
            that ask for the same at once may both compile, and then share what the first one has made.
    """
    key = _fingerprint(plain) + repr(form)
    with _turn:
        found = _known.get(key)
    made = compile() if found is None else found
    with _turn:
        _known[key] = made = _known.pop(key, made)
        if len(_known) > MOST:
            del _known[next(iter(_known))]
    return made


def _fingerprint(graph: fx.GraphModule) -> str:
    """Of the code, of the layout of all inputs, and of the constants in it."""
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
