"""Every private function and attribute of torch that this package uses. If another version of torch breaks, look here first.

``aten`` operators whose names begin with an underscore are not among them: they are what torch's own graphs consist of.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

pytree = _pytree  # maps and flattens nested tuples, lists and dictionaries of tensors
OPERATORS = (OpOverload, OpOverloadPacket)  # torch 2.9 compiles isinstance with a tuple, but not with a union
_tracing = threading.RLock()  # a tracer patches torch for the whole process: one thread at a time
TESTED_VERSIONS = ("2.9", "2.13", "2.15")  # the tests pass with these; pyproject.toml allows the first and all that follow


def constant_while_compiling(function: Callable[..., bool]) -> Callable[..., bool]:
    """torch.compiler.assume_constant_result without importing the compiler, which takes longer than importing torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_compiling  # The compiler guards on the active transforms but cannot trace this call.
def in_transform() -> bool:
    """Whether this runs inside ``torch.func.grad``, ``vmap`` or another transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def transformed(*tensors: Tensor) -> bool:
    """Whether one of the tensors belongs to a ``torch.func`` transform, so that it has no single value."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def is_tracing() -> bool:
    """Whether ``make_fx`` is recording operations."""
    # The module is slow to import. If it was never imported, nothing is tracing.
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values, and only goes together with others like it."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # slow to import
    return module is not None and isinstance(tensor, module.FakeTensor)


def trace(
    function: Callable[..., Any], examples: Sequence[Any], decomposed: Sequence[Any], for_compiler: bool = False
) -> fx.GraphModule:
    """The function as a graph of core operators, below autograd; the operators in ``decomposed`` are taken apart as well.

    Arguments:
        for_compiler: also take apart what the compiler would, so that :func:`compile_graph` takes the graph as it is.

    Tensors that the function holds, rather than takes, become attributes of the graph: the tensors themselves, not copies.
    Python code of the graph, which takes a tenth of a trace, is made when it is run or read, and not after every change.
    """
    from torch._decomp import core_aten_decompositions, get_decompositions  # slow to import
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    table: dict[Any, Callable[..., Any]] = get_decompositions(decomposed)
    if for_compiler:
        from torch._inductor.decomposition import select_decomp_table

        # Some decompositions, as that of max-pooling, expect this module to be imported.
        importlib.import_module("torch._inductor.lowering")
        # Without the table of core operators: clamp is taken apart into clamp_min here, and clamp_min into clamp there.
        table = {**table, **select_decomp_table()}
    else:
        table = {**core_aten_decompositions(), **table}
    with _tracing, _use_lazy_graph_module(True):
        return make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def start_compile_workers() -> None:
    """Start the processes in which the compiler makes kernels, as ``torch.compile`` does. That takes seconds, and until they
    are ready kernels are made one after the other."""
    from torch._inductor import async_compile  # slow to import

    if hasattr(async_compile, "maybe_warm_pool"):  # torch 2.9 does it at import
        async_compile.maybe_warm_pool()


def compile_graph(graph: fx.GraphModule, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph of flat arguments that :func:`trace` made for the compiler, and change it meanwhile.

    ``torch.compile``, and ``torch._inductor.compile`` too, would trace the graph once more, which takes as long as everything
    before, also where the compiled kernels are in the cache on disk.
    """
    from torch._guards import TracingContext, tracing  # slow to import
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with _tracing, tracing(TracingContext(fakes[0].fake_mode)), config.patch(options):
        graph = joint_graph_passes(graph)
        output = graph.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = list(range(len(results)))  # whose strides are kept
        compiled = compile_fx_inner(graph, fakes, is_inference=True)
    return lambda *arguments: compiled(list(arguments))


def refuse_graph_breaks() -> AbstractContextManager[None]:
    """Make the compiler raise where it would otherwise compile a function in parts; fullgraph=True is the caller's choice."""
    return torch._dynamo.error_on_graph_break(True)


def functions_shown_to_modes() -> set[Any]:
    """The compiler's set of functions that a TorchFunctionMode intercepts; the compiler sees changes made to it."""
    from torch._dynamo.variables.torch import get_overridable_functions

    return get_overridable_functions()


def realize_operator() -> Any:
    """The identity operator whose result the compiler writes to memory instead of recomputing it; torch has it for tests."""
    import torch._inductor.test_operators

    return torch.ops._inductor_test.realize.default


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors of one dtype in one launch."""
    torch._foreach_copy_(targets, sources)


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The ``reduction`` that the deprecated arguments of a loss stand for."""
    return torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)


def foreach_lerp(targets: list[Tensor], sources: list[Tensor], share: float) -> None:
    """Move many tensors towards others by a share of the way, with few launches."""
    torch._foreach_lerp_(targets, sources, share)


def parametrizations_are_cached() -> bool:
    """Whether this runs inside ``torch.nn.utils.parametrize.cached()``."""
    return nn.utils.parametrize._cache_enabled > 0


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is a batch norm of any dimension, whose common base class is private."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def submodules(module: nn.Module) -> Iterable[nn.Module | None]:
    """The direct submodules, like ``children()`` but faster: called for every module in every step."""
    return module._modules.values()


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters and buffers without those of its submodules; faster than the public iterators."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's dictionary of buffers, to put one back without ``__setattr__``, which other code may override."""
    return module._buffers


def without_compile(module: nn.Module) -> nn.Module:
    """The module inside torch.compile(module); any other module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def was_compiled(module: nn.Module) -> bool:
    """Whether this module, apart from its submodules, was compiled, by torch.compile(module) or module.compile()."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def result_dtypes(node: object) -> list[torch.dtype]:
    """The dtypes of what an autograd node computed in the forward pass; none where it does not tell."""
    return [result.dtype for result in getattr(node, "_input_metadata", ())]


def writes_to_arguments(operator: object) -> bool:
    """Whether an operator of a graph changes one of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its ``forward``; so does ``torch.nn.utils.weight_norm``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def module_hook_ids(module: nn.Module) -> tuple[int, ...]:
    """One number for each hook of the module and of its parameters; not for global hooks or those of autograd nodes."""
    own = module.__dict__
    found: tuple[int, ...] = ()
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        if hooks := own.get(kind):
            found += tuple(hooks)
    for parameter in module._parameters.values():
        if parameter is not None:
            found += parameter_hook_ids(parameter)
    return found


def parameter_hook_ids(parameter: Tensor) -> tuple[int, ...]:
    """One number for each hook of the parameter's gradient, before or after it is accumulated."""
    return (*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ()))


def sync_ddp_buffers(model: DistributedDataParallel) -> None:
    """Do with the buffers what a forward pass of the wrapper would do: broadcast them unless the last step did not sync."""
    if model._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        model._sync_buffers()  # type: ignore[no-untyped-call]
    model.require_forward_param_sync = model.require_backward_grad_sync


def ddp_hooks(model: DistributedDataParallel) -> bool:
    """Whether a communication hook for gradients or buffers is registered."""
    built_in = model._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    return bool(model._comm_hooks) or hasattr(model, "buffer_hook") or bool(built_in)
