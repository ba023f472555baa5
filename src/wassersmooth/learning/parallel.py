"""Models in wrappers: which of them can be differentiated twice, and how to reach the module inside."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel, whose parameters carry the hooks that average gradients, or inside a
    DataParallel, as long as it has not more than one device to spread a batch over."""
    spread = isinstance(model, nn.DataParallel) and len(model.device_ids) > 1
    if isinstance(model, DistributedDataParallel | nn.DataParallel) and not spread:
        inner: nn.Module = model.module
        return inner
    return model


def refuse_spread_batches(model: nn.Module) -> None:
    """Further passes must see the batch as the first one did, which DataParallel on several devices does not allow."""
    if isinstance(unwrapped(model), nn.DataParallel):
        raise ValueError(
            "a model in DataParallel on several devices can be penalized with engine='double_backward' only; "
            "use that, or DistributedDataParallel"
        )


def refuse_static_graph(model: nn.Module) -> None:
    """And FSDP: the other wrapper that no penalty works with.

    DDP's static graph counts the uses of each parameter in the first step and is silently wrong for penalties. FSDP, old and
    new, frees the gathered weights in the inner backward pass, and the outer one fails somewhere inside torch.
    """
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        raise ValueError(
            "a model in DistributedDataParallel(static_graph=True) gets wrong gradients from a penalty, without an error; "
            "wrap it with static_graph=False (the default)"
        )
    if any(_is_sharded(module) for module in model.modules()):
        raise ValueError(
            "penalties of a model under FSDP are not supported, as it frees weights that second derivatives need; use "
            "DistributedDataParallel, which gives the gradients of one process on the joined batch"
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether some part of the model was compiled by itself, by torch.compile(model) or model.compile()."""
    return any(_compiled(module) for module in model.modules())


def without_compilation(model: nn.Module) -> nn.Module:
    """What torch.compile(model) wraps."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _is_sharded(module: nn.Module) -> bool:
    """By FullyShardedDataParallel around it, or by fully_shard, which gives it a class of its own."""
    return any(kind.__module__.startswith("torch.distributed.fsdp.") for kind in type(module).__mro__)


def _compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
