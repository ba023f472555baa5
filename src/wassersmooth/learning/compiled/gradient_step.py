"""Steps that are penalized by a function of input gradients, and the plain step.

Let F be the sum over the batch of a function of the outputs f, the field, and ``g = grad_x F``. The step minimizes
``J = mean loss(f) + mean phi(g, f)``. With ``v = dJ/dg`` and ``c = dJ/df`` held constant,

    grad_theta J = grad_theta (D_v F + c . f),

where D_v F is the derivative of F along v. So the joint graph is that of ``F + e . f`` at e = 0: with the images moving along v
and e along c, the tangent of its parameter gradient is the gradient of J. That takes 6 sweeps over the network, whatever phi,
loss and field are, and 5 more for each further field (all but the forward pass).

A gradient penalty has the loss as field and ``phi = eta^2 g' L g``. Its metric is one operator of the graph
(:mod:`.metric_op`); any other phi is traced. The curvature of the loss in the logits, ``sum_cd l''_cd grad f_c' L grad f_d``,
has the field ``R(f) z . f`` with R z held constant, for a root R of l'' and random signs z: R z is itself a gradient in the
logits (:func:`wassersmooth.learning.tikhonov.root_of_curvature`), and tangents pass through ``detach``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth import _model_checks
from wassersmooth.learning import losses
from wassersmooth.learning.compiled.joint_graph import JointGraph, StepArguments, clone_shared, trace_joint_graph
from wassersmooth.learning.compiled.jvp_interpreter import JvpInterpreter
from wassersmooth.learning.compiled.jvp_rules import add_all
from wassersmooth.learning.compiled.metric_op import squares_and_directions
from wassersmooth.learning.step_spec import FunctionTerm, GradientTerm, StepSpec


def trace_loss_graph(spec: StepSpec, model: nn.Module, inputs: Any, labels: Any, outputs: Tensor, probe: Any) -> JointGraph:
    """The joint graph with the loss as field."""
    assert spec.loss is not None
    return trace_joint_graph(model, losses.resolve(spec.loss), inputs, labels)


def trace_field_graph(spec: StepSpec, model: nn.Module, inputs: Any, labels: Any, outputs: Tensor, probe: Any) -> JointGraph:
    """The joint graph with ``field(f) + e . f``, which takes the covector e and the probe as further arguments."""
    term = spec.penalty
    assert isinstance(term, GradientTerm | FunctionTerm)
    loss = None if spec.loss is None else losses.resolve(spec.loss)

    def field(outputs: Tensor, labels: Any, covector: Tensor, *probe: Tensor) -> Tensor:
        if term.of is None:
            assert loss is not None
            values = losses.evaluate(loss, outputs, labels, images=len(outputs))
        else:
            values = losses.evaluate(term.of, outputs, labels, *probe, images=len(outputs), what="of")
        return values + _product(covector, outputs).to(values.dtype)

    return trace_joint_graph(model, field, inputs, labels, [torch.zeros_like(outputs), *probe])


def plain_step(spec: StepSpec, joint: JointGraph, example: StepArguments) -> Callable[..., Any]:
    """The step without a penalty."""

    def step(*given: Any) -> tuple[Any, ...]:
        arguments = StepArguments(*given)
        values = JvpInterpreter(joint.graph.graph, arguments.inputs_of_graph).values
        loss = values[joint.values].mean()
        gradients = [values[node] for node in joint.parameter_gradients.values()]
        return loss, torch.zeros_like(loss), clone_shared(gradients), [values[node] for node in joint.buffers], []

    return step


def gradient_step(spec: StepSpec, joint: JointGraph, example: StepArguments) -> Callable[..., Any]:
    """The step with a :class:`GradientTerm` or a :class:`FunctionTerm`.

    Arguments:
        joint: of :func:`trace_field_graph`.
    """
    covector, *probe_nodes = joint.field_arguments

    def step(*given: Any) -> tuple[Any, ...]:
        arguments = StepArguments(*given)
        images, probes = arguments.images, arguments.probes
        zero = images.new_zeros(covector.meta["val"].shape, dtype=covector.meta["val"].dtype)
        first = JvpInterpreter(joint.graph.graph, [*arguments.inputs_of_graph, zero, *probes[0]])
        jvps = [first, *(first.with_inputs(dict(zip(probe_nodes, probe, strict=True))) for probe in probes[1:])]
        outputs = first.values[joint.outputs]
        batch = joint.layout.inputs(images, arguments.constants), joint.layout.labels(arguments.labels)
        loss, c = _loss(spec, outputs, batch[1], len(images))
        # The graph has gradients of means: those of sums are as many times larger as there are images.
        gradients = [len(images) * jvp.values[joint.image_gradient] for jvp in jvps]
        penalties, directions = [], []
        for g, probe in zip(gradients, probes, strict=True):
            value, v, change = _penalty(spec, g, outputs, batch, arguments, probe)
            penalties.append(value)
            directions.append(len(images) * v)
            c = c if change is None else c + change
        for jvp, v in zip(jvps, directions, strict=True):
            jvp.propagate({joint.images: v, **({covector: len(images) * c} if jvp is first else {})})
        found = [add_all([jvp.tangent(node) for jvp in jvps]) for node in joint.parameter_gradients.values()]
        buffers_after = [first.values[node] for node in joint.buffers]
        return loss, add_all(penalties), clone_shared(found), buffers_after, gradients if spec.learned else []

    return step


def _loss(spec: StepSpec, outputs: Tensor, labels: Any, images: int) -> tuple[Tensor, Tensor]:
    """The mean loss, and its derivative in the outputs."""
    if spec.loss is None:
        return outputs.new_zeros((), dtype=losses.widened(outputs).dtype), torch.zeros_like(outputs)
    loss = losses.resolve(spec.loss)
    c, value = torch.func.grad_and_value(lambda f: losses.evaluate(loss, f, labels, images=images).mean())(outputs)
    return value, c


def _penalty(
    spec: StepSpec, g: Tensor, outputs: Tensor, batch: tuple[Any, Any], arguments: StepArguments, probe: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The mean penalty of a gradient, and its derivatives in that gradient and in the outputs."""
    term, images = spec.penalty, arguments.images
    assert term is not None
    factor = term.factor(arguments.eta.to(images.dtype))
    if isinstance(term, FunctionTerm):
        function = term.function

        def mean_penalty(g: Tensor, outputs: Tensor) -> Tensor:
            penalties = function(g, *batch, outputs, *probe)
            _model_checks.per_image_penalties(penalties, len(images))
            return factor * penalties.mean()

        (v, change), value = torch.func.grad_and_value(mean_penalty, (0, 1))(g, outputs)
        return value, v, change
    squares, directions = squares_and_directions(images, g, arguments.metric)
    return factor * squares.mean(), 2 * factor / len(images) * directions, None


def _product(covector: Tensor, outputs: Tensor) -> Tensor:
    """The product of each row. # shape: (B, ...), both -> (B,)"""
    product = covector.conj() * outputs
    product = product.real if product.is_complex() else product
    return product.reshape(len(outputs), -1).sum(1)
