"""Wrappers of models: which of them can be differentiated twice, and the module inside."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth._torch_internals import was_compiled


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel, or inside a DataParallel on at most one device.

    The parameters of the module keep the hooks of DistributedDataParallel that average gradients.
    """
    several_devices = isinstance(model, nn.DataParallel) and len(model.device_ids) > 1
    # A tuple, since torch 2.9 cannot compile isinstance with a union.
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)) and not several_devices:
        inner: nn.Module = model.module
        return inner
    return model


def refuse_data_parallel(model: nn.Module) -> None:
    """Refuse DataParallel on several devices: further passes could not split the batch as the first one did."""
    if isinstance(unwrap(model), nn.DataParallel):
        raise ValueError(
            "a model in DataParallel on several devices can be penalized with engine='double_backward' only; "
            "use that, or DistributedDataParallel"
        )


def refuse_unsupported_wrappers(model: nn.Module) -> None:
    """Refuse DDP with a static graph, and FSDP, with which no penalty works.

    DDP's static graph counts the uses of each parameter in the first step and is silently wrong for penalties. FSDP, old and
    new, frees the gathered weights in the inner backward pass, so the outer one fails inside torch.
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
    """Whether some part of the model was compiled, by torch.compile(model) or model.compile()."""
    return any(was_compiled(module) for module in model.modules())


def _is_sharded(module: nn.Module) -> bool:
    """Whether a module is in FullyShardedDataParallel, or was passed to fully_shard, which changes its class."""
    return any(kind.__module__.startswith("torch.distributed.fsdp.") for kind in type(module).__mro__)
