"""Each written rule against torch's own forward-mode rule of the same operator."""

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compare import assert_matches
from wassersmooth.learning.compiled import jvp_rules as rules
from wassersmooth.learning.compiled.jvp_interpreter import JvpInterpreter

aten = torch.ops.aten


def positive(*shape):
    return torch.rand(*shape, dtype=torch.float64) + 0.5


CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
ANY = lambda: torch.linspace(-1.5, 1.5, 24, dtype=torch.float64).view(2, 3, 4)  # noqa: E731  # of both signs, none at a kink
X, W, D = (lambda: positive(2, 3, 5, 4)), (lambda: positive(4, 3, 3, 3)), (lambda: positive(2, 4, 5, 4))

# operator -> (arguments, keywords); a callable makes a tensor, and every one of them moves in turn
CASES = {
    aten.mm.default: ((lambda: positive(3, 4), lambda: positive(4, 2)), {}),
    aten.bmm.default: ((lambda: positive(2, 3, 4), lambda: positive(2, 4, 2)), {}),
    aten.convolution.default: ((X, W, None, *CONV), {}),
    rules.input_gradient: ((D, X, W, None, *CONV), {}),
    rules.weight_gradient: ((D, X, W, None, *CONV), {}),
    rules.bias_gradient: ((D, X, W, None, *CONV), {}),
    aten.permute.default: ((X, [1, 0, 3, 2]), {}),
    aten.t.default: ((lambda: positive(3, 4),), {}),
    aten.transpose.int: ((X, 1, 2), {}),
    aten.view.default: ((X, [6, 20]), {}),
    aten._unsafe_view.default: ((X, [6, 20]), {}),
    aten.expand.default: ((lambda: positive(3, 1), [3, 4]), {}),
    aten.clone.default: ((X,), {}),
    aten.alias.default: ((X,), {}),
    aten.detach.default: ((X,), {}),
    aten._to_copy.default: ((X,), {"dtype": torch.float64}),
    aten.squeeze.dims: ((lambda: positive(3, 1, 2), [1]), {}),
    aten.squeeze.dim: ((lambda: positive(3, 1, 2), 1), {}),
    aten.unsqueeze.default: ((X, 2), {}),
    aten.slice.Tensor: ((X, 2, 1, 4), {}),
    aten.select.int: ((X, 1, 2), {}),
    aten.sum.dim_IntList: ((X, [0, 2], True), {}),
    aten.mean.dim: ((X, [1, 3]), {}),
    aten.neg.default: ((X,), {}),
    aten.mul.Scalar: ((X, 3.0), {}),
    aten.div.Scalar: ((X, 3.0), {}),
    aten.add.Tensor: ((X, lambda: positive(4)), {}),
    aten.sub.Tensor: ((X, lambda: positive(5, 1)), {}),
    aten.mul.Tensor: ((X, lambda: positive(3, 1, 1)), {}),
    aten.div.Tensor: ((X, lambda: positive(4)), {}),
    aten.where.self: ((torch.tensor([True, False, True, False]), X, lambda: positive(4)), {}),
    aten.var_mean.correction: ((X, [0, -1]), {"correction": 0, "keepdim": True}),
    aten.exp.default: ((X,), {}),
    aten.log.default: ((X,), {}),
    aten.log1p.default: ((X,), {}),
    aten.rsqrt.default: ((X,), {}),
    aten.sqrt.default: ((X,), {}),
    aten.tanh.default: ((X,), {}),
    aten.sigmoid.default: ((X,), {}),
    aten.slice_scatter.default: ((X, lambda: positive(2, 3, 2, 4), 2, 1, 5, 2), {}),
    aten.constant_pad_nd.default: ((X, [1, 2, -1, 0], 3.0), {}),
    aten.clamp.default: ((ANY, -0.3, 0.5), {}),
    aten.leaky_relu.default: ((ANY, 0.2), {}),
    aten.relu.default: ((ANY,), {}),
    aten.erf.default: ((ANY,), {}),
}
SHAPES_ONLY = {rules.input_gradient: {1}, rules.weight_gradient: {2}, rules.bias_gradient: {1, 2}}


def test_every_rule_is_compared():
    alone = {aten.index_put.default, operator.getitem, aten.copy.default, aten.cat.default}  # each has a test of its own
    assert set(CASES) == {*rules.BILINEAR, *rules.LINEAR, *rules.RULES} - alone


def test_the_tangent_of_a_copy_is_that_of_what_was_copied():
    a, b, tangent = positive(2, 3), positive(3), positive(3)
    y, rule = aten.copy(a, b), rules.RULES[aten.copy.default]
    assert rule(y, a, b, tangents=[positive(2, 3), tangent]).equal(tangent.expand(2, 3))
    assert rule(y, a, b, tangents=[positive(2, 3), None]).equal(torch.zeros(2, 3, dtype=a.dtype))


def test_the_tangent_of_a_concatenation_of_what_moves_and_of_constants():
    parts, directions = [positive(2, size) for size in (1, 3, 2)], [positive(2, 1), None, positive(2, 2)]
    graph = make_fx(lambda *parts: torch.cat(parts, 1))(*parts).graph
    jvp = JvpInterpreter(graph, parts)
    moving = zip(graph.find_nodes(op="placeholder"), directions, strict=True)
    jvp.propagate({node: direction for node, direction in moving if direction is not None})
    (node,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    first, _, last = directions
    assert jvp.tangent(node).equal(torch.cat([first, torch.zeros(2, 3, dtype=last.dtype), last], 1))


def test_the_tangent_of_a_part_put_into_a_constant_is_made_of_operators_that_the_compiler_knows():
    """It was not: a step with strided slices filled whole tensors with zeros by a kernel of its own."""
    graph = make_fx(lambda x: aten.slice_scatter(torch.zeros(5), x, 0, 0, 5, 2))(torch.rand(3)).graph

    def tangent(x, direction):
        jvp = JvpInterpreter(graph, [x])
        jvp.propagate({graph.find_nodes(op="placeholder")[0]: direction})
        return jvp.tangent(graph.find_nodes(op="call_function", target=aten.slice_scatter.default)[0])

    found = make_fx(tangent)(torch.rand(3), torch.rand(3)).graph
    assert not found.find_nodes(op="call_function", target=aten._new_zeros_with_same_feature_meta.default)


def test_the_tangent_of_values_put_in_place():
    a, values = positive(4, 2), positive(3, 2)
    index = [torch.tensor([0, 2, 0])]
    for moving in ((0,), (1,), (0, 1)):
        directions = [positive(4, 2), positive(3, 2)]
        for accumulate in (False, True):
            if not accumulate:
                index = [torch.tensor([0, 2, 1])]

            def function(t, moving=moving, accumulate=accumulate, directions=directions, index=index):
                moved = [x + t * d if i in moving else x for i, (x, d) in enumerate(zip((a, values), directions, strict=True))]
                return aten.index_put(moved[0], index, moved[1], accumulate)

            y, expected = torch.func.jvp(function, (torch.zeros((), dtype=a.dtype),), (torch.ones((), dtype=a.dtype),))
            given = [d if i in moving else None for i, d in enumerate(directions)]
            tangents = [given[0], None, given[1], None]
            assert_matches(
                rules.RULES[aten.index_put.default](y, a, index, values, accumulate, tangents=tangents), expected, 1e-12
            )


@pytest.mark.parametrize("limits", [(-0.3,), (-0.3, None), (None, 0.5), (-0.3, 0.5)])
def test_the_tangent_of_a_clamp(limits):
    x, direction = ANY(), torch.randn(2, 3, 4, dtype=torch.float64)
    y, expected = torch.func.jvp(lambda x: aten.clamp(x, *limits), (x,), (direction,))
    assert rules.RULES[aten.clamp.default](y, x, *limits, tangents=[direction, None, None]).equal(expected)


@pytest.mark.parametrize("together", [False, True], ids=["one moves", "all move"])
@pytest.mark.parametrize("target", CASES, ids=lambda target: target.__name__)
def test_rules_are_those_of_torch(target, together):
    torch.manual_seed(0)
    arguments, keywords = CASES[target]
    places = [i for i, argument in enumerate(arguments) if callable(argument) and i not in SHAPES_ONLY.get(target, set())]
    for moving in [places] if together else [[place] for place in places]:
        values = [argument() if callable(argument) else argument for argument in arguments]
        graph = fx.Graph()
        nodes = [graph.placeholder(f"a{i}") if isinstance(value, torch.Tensor) else value for i, value in enumerate(values)]
        source = graph.placeholder("t")
        shifted = list(nodes)  # a_i + t * direction_i, so that one source moves all of them
        directions = {i: torch.randn_like(values[i]) for i in moving}
        for i in moving:
            direction = graph.placeholder(f"d{i}")
            shifted[i] = graph.call_function(
                aten.add.Tensor, (nodes[i], graph.call_function(aten.mul.Tensor, (direction, source)))
            )
        result = graph.call_function(target, tuple(shifted), keywords)
        graph.output(result)
        module = fx.GraphModule(torch.nn.Module(), graph)
        zero = torch.zeros((), dtype=torch.float64)
        inputs = [v for v in values if isinstance(v, torch.Tensor)]
        jvp = JvpInterpreter(module.graph, [*inputs, zero, *directions.values()])
        jvp.propagate({source: torch.ones_like(zero)})

        def function(t, values=values, directions=directions):
            return target(*(v + t * directions[i] if i in directions else v for i, v in enumerate(values)), **keywords)

        tangent = torch.func.jvp(function, (zero,), (torch.ones_like(zero),))[1]
        if target is aten.detach.default:  # a saved value; what the user detaches, the comparison of the first step sees
            tangent = directions[0]
        for one, other in zip(_several(jvp.tangents[result]), _several(tangent), strict=True):
            assert_matches(one, other, 1e-12)


def test_getitem_and_operators_without_a_rule():
    """Torch's own rule steps in; whole numbers and random draws have no tangent."""
    x = positive(3, 4)
    graph = fx.Graph()
    a = graph.placeholder("a")
    pair = graph.call_function(aten.var_mean.correction, (a, [1]), {"correction": 1})
    variance = graph.call_function(operator.getitem, (pair, 0))
    bent = graph.call_function(aten.atan2.default, (a, graph.call_function(aten.cumsum.default, (a, 1))))
    order = graph.call_function(aten.argmax.default, (a, 1))
    drawn = graph.call_function(aten.rand_like.default, (a,))
    graph.output((variance, bent, order, drawn))
    jvp = JvpInterpreter(fx.GraphModule(torch.nn.Module(), graph).graph, [x])
    direction = torch.randn_like(x)
    jvp.propagate({jvp.graph.find_nodes(op="placeholder")[0]: direction})
    nodes = jvp.graph.output_node().args[0]
    functions = [lambda x: x.var(1), lambda x: torch.atan2(x, x.cumsum(1))]
    for node, function in zip(nodes[:2], functions, strict=True):
        assert_matches(jvp.tangents[node], torch.func.jvp(function, (x,), (direction,))[1], 1e-12)
    assert nodes[2] not in jvp.tangents
    assert nodes[3] not in jvp.tangents


def test_several_inputs_move_at_once_and_one_is_changed():
    """What does not depend on the input that is changed stays, random draws too."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    drawn = graph.call_function(aten.rand_like.default, (a,))
    kept = graph.call_function(aten.exp.default, (a,))
    product = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.mul.Tensor, (kept, b)), drawn))
    graph.output((product, drawn, kept))
    x, y, z, x_tangent, y_tangent = (positive(3) for _ in range(5))
    first = JvpInterpreter(fx.GraphModule(torch.nn.Module(), graph).graph, [x, y])
    for jvp, value in ((first, y), (first.with_inputs({b: z}), z)):
        assert jvp.values[drawn] is first.values[drawn]
        assert jvp.values[kept] is first.values[kept]
        assert_matches(jvp.values[product], x.exp() * value * first.values[drawn], 1e-12)
        jvp.propagate({a: x_tangent, b: y_tangent})
        assert_matches(jvp.tangent(product), x.exp() * (x_tangent * value + y_tangent) * first.values[drawn], 1e-12)
        assert jvp.tangent(drawn).equal(torch.zeros_like(x))
    assert first.values[b] is y


def _several(value):
    return value if isinstance(value, tuple | list) else (value,)


@pytest.mark.parametrize(
    ("window", "padding", "dilation"), [((3, 3), 1, 1), ((5, 3), (2, 1), 1), ((3, 3), 2, 2), ((2, 2), 1, 1), ((3,), 1, 1)]
)
@pytest.mark.parametrize("last", [False, True])
def test_weight_gradient_where_input_and_output_are_one_pixel(window, padding, dilation, last):
    """In the layout of the weight, whatever the strides of the pixel."""
    torch.manual_seed(0)
    dims = len(window)
    a, weight = torch.randn(5, 4, *[1] * dims, dtype=torch.float64), torch.randn(6, 4, *window, dtype=torch.float64)
    if last and dims == 2:
        weight = weight.contiguous(memory_format=torch.channels_last)
    paddings = [padding] * dims if isinstance(padding, int) else list(padding)
    settings = ([2] * dims, paddings, [dilation] * dims, False, [0] * dims, 1)
    d = torch.randn_like(aten.convolution(a, weight, None, *settings))
    expected = aten.convolution_backward(d, a, weight, None, *settings, [False, True, False])[1]
    graph = make_fx(lambda *given: rules.weight_gradient(*given, weight, None, *settings))(d, a)
    assert aten.convolution_backward.default not in {node.target for node in graph.graph.nodes}
    received = graph(d, a)
    assert_matches(received, expected, 1e-12)
    assert received.stride() == weight.stride()
