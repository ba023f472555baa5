"""Convolutions of a traced network joined with the additions and activations that follow them."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from wassersmooth.convolutions import Convolution2d, ConvolutionBlock, activation_of

ADDITIONS = (operator.add, torch.add)
FUNCTIONS = {torch.relu: nn.ReLU, nn.functional.relu: nn.ReLU, nn.functional.silu: nn.SiLU, nn.functional.softplus: nn.Softplus}


def with_blocks(model: nn.Module) -> nn.Module:
    """The network as a graph in which every convolution and what follows it is one :class:`ConvolutionBlock`; or the network
    itself, where it cannot be traced.

    The layers are those of the given network. A convolution is joined with what alone reads its output.
    """
    try:
        traced = _Tracer().trace(model)
    except Exception:  # the forward pass of a network can raise anything when it is called with what stands for a tensor
        return model
    found = fx.GraphModule(model, traced)
    for node in list(traced.nodes):
        if node.op == "call_module" and type(found.get_submodule(str(node.target))) is nn.Identity and node.args:
            node.replace_all_uses_with(node.args[0])
            traced.erase_node(node)
    for node in list(traced.nodes):
        layer = found.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, Convolution2d) and len(node.args) == 1 and not node.kwargs:
            _join(found, node, layer)
    found.recompile()
    return found if any(isinstance(module, ConvolutionBlock) for module in found.modules()) else model


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) is Convolution2d or super().is_leaf_module(m, module_qualified_name)


def _join(model: fx.GraphModule, node: fx.Node, layer: Convolution2d) -> None:
    """Put a block in place of a convolution and of an addition, an activation, or both, that alone read its output."""
    joined, added, activation = [node], None, None
    reader = _only_reader(node)
    if reader is not None and (added := _added_to(node, reader)) is not None:
        joined.append(reader)
        reader = _only_reader(reader)
    if reader is not None and (activation := _activation(model, reader)) is not None:
        joined.append(reader)
    if len(joined) == 1:
        return
    name = f"block_{node.name}"
    model.add_module(name, ConvolutionBlock(layer, activation))
    with model.graph.inserting_after(joined[-1]):
        block = model.graph.call_module(name, (*node.args, *([] if added is None else [added])))
    joined[-1].replace_all_uses_with(block)
    for part in reversed(joined):
        model.graph.erase_node(part)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _added_to(node: fx.Node, reader: fx.Node) -> fx.Node | None:
    """What the reader adds to the node, if it does nothing else. In place it adds to the node, which nothing else reads."""
    if reader.op != "call_function" or reader.kwargs or len(reader.args) != 2:
        return None
    if reader.target not in ADDITIONS and not (reader.target is operator.iadd and reader.args[0] is node):
        return None
    others = [argument for argument in reader.args if argument is not node]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _activation(model: fx.GraphModule, reader: fx.Node) -> nn.Module | None:
    """The reader as an activation that the kernel knows."""
    if len(reader.args) != 1 or reader.kwargs.keys() - {"inplace"}:
        return None
    if reader.op == "call_module":
        module = model.get_submodule(str(reader.target))
    elif reader.op == "call_function" and reader.target in FUNCTIONS:
        module = FUNCTIONS[reader.target]()
    else:
        return None
    return module if activation_of(module) > 0 else None
