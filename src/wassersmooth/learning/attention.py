"""Attention decomposed into matrix products: the fused kernels have no second derivative and no forward mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wassersmooth.learning.losses import widened

_lock = threading.Lock()
_inside = 0  # how many contexts of unfused_attention() are open, in all threads
_choice = ExitStack()


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Let torch compute attention without its fused kernels.

    torch has one choice for all threads, and each ``sdpa_kernel`` restores what it found: two threads would undo each other's.
    So the first context that is entered makes the choice, and the last one that is left restores the one before.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _choice.enter_context(sdpa_kernel(SDPBackend.MATH))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _choice.close()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k' scale + mask) v. # shape: (..., L, E), (..., S, E), (..., S, V) -> (..., L, V)"""
    if enable_gqa:  # groups of heads share their keys and values
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    weights = _attention_weights(query, key, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale)
    return F.dropout(weights, dropout_p, dropout_p > 0) @ value


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward``, sequence first; rare options return NotImplemented."""
    rare = bias_k is not None or add_zero_attn or static_k is not None or static_v is not None or query.dim() != 3
    if rare:
        return NotImplemented  # type: ignore[no-any-return]
    projections: list[Any] = [q_proj_weight, k_proj_weight, v_proj_weight]
    if in_proj_weight is not None and not use_separate_proj_weight:
        projections = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        _split_heads(F.linear(x, weight, bias), num_heads)
        for x, weight, bias in zip((query, key, value), projections, biases, strict=True)
    )
    mask = _joined_mask(attn_mask, key_padding_mask, q, k)
    weights = _attention_weights(q, k, mask, q.shape[-1] ** -0.5)
    weights = F.dropout(weights, dropout_p, training and dropout_p > 0)
    heads = (weights @ v).permute(2, 0, 1, 3).flatten(2)  # (L, B, E)
    outputs = F.linear(heads, out_proj_weight, out_proj_bias)
    if not need_weights:
        return outputs, None
    return outputs, weights.mean(1) if average_attn_weights else weights


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """# shape: (L, B, E) -> (B, heads, L, E / heads)"""
    return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _joined_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as one that is added to the scores; True means excluded, as in multi-head attention."""
    masks = []
    if attn_mask is not None:
        per_head = attn_mask.dim() == 3
        masks.append(attn_mask.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2]) if per_head else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    added = [_minus_infinity_where(mask, q) if mask.dtype == torch.bool else mask for mask in masks]
    return sum(added[1:], added[0]) if added else None


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores + (_minus_infinity_where(~mask, q) if mask.dtype == torch.bool else mask)
    wide = widened(scores)
    exponentials = (wide - wide.detach().amax(-1, keepdim=True)).exp()
    return (exponentials / exponentials.sum(-1, keepdim=True)).to(q.dtype)


def _minus_infinity_where(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention,
}
