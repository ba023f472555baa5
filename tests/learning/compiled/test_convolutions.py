"""The Triton kernels of convolutions against plain torch, and their place in a traced graph.

Without a CUDA device they run in Triton's interpreter. It has to be chosen before Triton is imported and is of no use to the
compiler, so that this file then runs once more, in a separate process.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_matches
from tests.learning.steps import step_graph
from tests.triton_interpreter import INTERPRETED, assert_passes_in_the_interpreter
from wassersmooth import convolutions as ours
from wassersmooth.learning.compiled import replace_convolutions as graphs

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TOLERANCE = 1e-3 if DEVICE == "cuda" else 1e-5  # tf32, or exact

aten, DENSE = torch.ops.aten, (False, [0, 0], 1)  # not transposed, no output padding, one group

runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA or Triton's interpreter")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")

# images, in, out, size, window, stride, padding, dilation
ODD = [
    (1, 3, 5, (7, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 16, 16, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 16, 24, (9, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    (3, 3, 7, (7, 5), (5, 5), (2, 2), (2, 2), (1, 1)),
    (2, 5, 3, (6, 5), (1, 1), (2, 2), (0, 0), (1, 1)),
    (2, 4, 33, (9, 8), (3, 3), (2, 1), (2, 1), (2, 2)),
    (1, 70, 20, (5, 4), (3, 2), (1, 2), (0, 1), (1, 1)),
    (1, 1, 1, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
]
# The layers of a ResNet-20, which the blocks were chosen for.
LAYERS = [(3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1)]
REAL = [(128, c, k, (side, side), (3, 3), (s, s), (1, 1), (1, 1)) for c, k, side, s in LAYERS]
CASES = [*ODD, *(REAL if DEVICE == "cuda" else [])]


class Case:
    def __init__(self, case: Any, dtype: torch.dtype = torch.float32) -> None:
        images, c, k, size, window, stride, padding, dilation = case
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype, memory_format=torch.channels_last)

        self.settings = (list(stride), list(padding), list(dilation))
        self.weight = random(k, c, *window)
        self.inputs = [random(images, c, *size) for _ in range(2)]
        out = ours.shape_of(self.inputs[0], self.weight, *self.settings).out_size
        self.gradients = [random(images, k, *out) for _ in range(2)]

    def arguments(self, pairs: int = 2) -> dict[str, tuple[Any, ...]]:
        return {
            "weight_gradient": (self.inputs[:pairs], self.gradients[:pairs], list(self.weight.shape), *self.settings),
            "forward": (self.inputs[0], self.weight, *self.settings),
            "input_gradient": (self.gradients[0], self.weight, list(self.inputs[0].shape), *self.settings),
        }


def plain_weight_gradient(inputs: list[Tensor], gradients: list[Tensor], size: list[int], *settings: list[int]) -> Tensor:
    like = torch.empty(size, dtype=inputs[0].dtype, device=inputs[0].device)
    pairs = zip(inputs, gradients, strict=True)
    return sum(aten.convolution_backward(d, a, like, None, *settings, *DENSE, [False, True, False])[1] for a, d in pairs)


def plain_forward(a: Tensor, weight: Tensor, *settings: list[int]) -> Tensor:
    return aten.convolution(a, weight, None, *settings, *DENSE)


def plain_input_gradient(d: Tensor, weight: Tensor, input_size: list[int], *settings: list[int]) -> Tensor:
    return aten.convolution_backward(d, d.new_empty(input_size), weight, None, *settings, *DENSE, [True, False, False])[0]


# The slow twins of the kernels, by name.
PLAIN = {"weight_gradient": plain_weight_gradient, "forward": plain_forward, "input_gradient": plain_input_gradient}


def double(arguments: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.double(), arguments)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or the kernels run as they are")
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


# The kernels ---------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("pairs", [1, 2])
def test_plain_torch(case: Any, pairs: int) -> None:
    for name, arguments in Case(case).arguments(pairs).items():
        result, expected = getattr(ours, name)(*arguments), PLAIN[name](*double(arguments))
        assert_matches(result, expected, TOLERANCE)
        assert result.is_contiguous(memory_format=torch.channels_last)
        fake = torch.library.opcheck(getattr(ours, name), arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(fake.values()) == {"SUCCESS"}


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=needs_cuda)], ids=str)
@pytest.mark.parametrize("case", [*ODD[:2], *(REAL if DEVICE == "cuda" else [])], ids=str)
def test_half_precision(case: Any, dtype: torch.dtype) -> None:
    """Sums are in float32: what is left is the rounding of the result. The interpreter multiplies no bfloat16."""
    for name, arguments in Case(case, dtype).arguments().items():
        result = getattr(ours, name)(*arguments)
        assert result.dtype == dtype
        assert_matches(result, PLAIN[name](*double(arguments)), 4e-3)


@runs_kernels
@pytest.mark.parametrize("case", [ODD[2], *(REAL if DEVICE == "cuda" else [])], ids=str)
def test_many_times_the_same(case: Any) -> None:
    for name, arguments in Case(case).arguments().items():
        first = getattr(ours, name)(*arguments)
        for _ in range(20 if DEVICE == "cuda" else 1):
            assert torch.equal(getattr(ours, name)(*arguments), first)


@runs_kernels
def test_memory_layout_does_not_matter() -> None:
    case = Case(ODD[0])
    for name, arguments in case.arguments().items():
        dense = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.contiguous(), arguments)
        assert torch.equal(getattr(ours, name)(*dense), getattr(ours, name)(*arguments))


@needs_cuda
@pytest.mark.parametrize("case", REAL, ids=str)
def test_no_bias_from_bits_that_are_cut_off(case: Any) -> None:
    """A factor that is the same everywhere would add up from layer to layer; without its correction it is 7e-4."""
    for name, arguments in Case(case).arguments().items():
        result, expected = getattr(ours, name)(*arguments).double(), PLAIN[name](*double(arguments))
        assert abs(float((result * expected).sum() / expected.square().sum()) - 1) < 1e-4


class Layer:
    """A convolution with constant weights and its twin in float64."""

    def __init__(self, case: Any, bias: bool) -> None:
        images, c, k, size, window, stride, padding, dilation = case
        torch.manual_seed(0)
        self.plain = nn.Conv2d(c, k, window, stride, padding, dilation, bias=bias).requires_grad_(False)
        self.fast = copy.deepcopy(self.plain).to(DEVICE, memory_format=torch.channels_last)
        self.fast.__class__ = ours.Convolution2d
        self.fast.anywhere = True
        self.images = torch.rand(images, c, *size).to(DEVICE, memory_format=torch.channels_last).requires_grad_()
        self.d = torch.randn_like(self.plain(self.images.cpu())).to(DEVICE)


@runs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_with_constant_weights(case: Any, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(case, bias)
    launched: list[bool] = []
    launch = ours._launch
    monkeypatch.setattr(ours, "_launch", lambda *args, **more: launched.append(more["gradient"]) or launch(*args, **more))
    result = layer.fast(layer.images)
    (g,) = torch.autograd.grad(result, layer.images, layer.d)
    assert launched == [False, True]
    exact = layer.images.detach().double().cpu().requires_grad_()
    expected = layer.plain.double()(exact)
    assert_matches(result.detach(), expected.detach().to(DEVICE), TOLERANCE)
    assert_matches(g, torch.autograd.grad(expected, exact, layer.d.double().cpu())[0].to(DEVICE), TOLERANCE)


@runs_kernels
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.Softplus(), nn.SiLU()], ids=str)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("case", [ODD[1], ODD[2], *(REAL if DEVICE == "cuda" else [])], ids=str)
def test_block_in_one_kernel(case: Any, added: bool, activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(case, bias=activation is not None)
    block = ours.ConvolutionBlock(layer.fast, activation)
    images, exact = layer.images.detach(), layer.plain.double()
    more = 5 * layer.d if added else None  # large and small values of both signs
    expected = exact(images.cpu().double()) + (0 if more is None else more.cpu().double())
    expected = expected if activation is None else activation(expected)
    launched: list[int] = []
    launch = ours._launch
    monkeypatch.setattr(ours, "_launch", lambda *args, **kind: launched.append(kind["activation"]) or launch(*args, **kind))
    with torch.no_grad():
        result = block(images, more)
    assert launched == [ours.activation_of(activation)]
    assert_matches(result, expected.to(DEVICE), TOLERANCE)
    monkeypatch.setattr(ours, "_launch", launch)
    assert_matches(block(layer.images, more).detach(), expected.to(DEVICE), TOLERANCE)
    assert block(layer.images, more).requires_grad


@runs_kernels
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.Softplus(), nn.SiLU()], ids=str)
def test_nan_is_not_hidden(activation: Any) -> None:
    layer = Layer(ODD[1], True)
    with torch.no_grad():
        layer.images[1, 3, 4, 5] = torch.nan
        result = ours.ConvolutionBlock(layer.fast, activation)(layer.images)
    assert result[0].isfinite().all()
    assert result[1, :, 4, 5].isnan().all()


@runs_kernels
def test_an_empty_batch() -> None:
    for name, arguments in Case((0, *ODD[1][1:])).arguments().items():
        result, expected = getattr(ours, name)(*arguments), PLAIN[name](*double(arguments))
        assert result.shape == expected.shape
        assert not result.any()


@runs_kernels
def test_block_whose_sum_broadcasts_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(ODD[1], True)
    block = ours.ConvolutionBlock(layer.fast, nn.ReLU())
    monkeypatch.setattr(
        ours, "_launch", lambda *_, activation=0, **__: pytest.fail("one kernel") if activation else torch.ones(2, 16, 8, 8)
    )
    with torch.no_grad():
        assert torch.equal(block(layer.images, torch.full((16, 1, 1), 2.0)), torch.full((2, 16, 8, 8), 3.0))


def test_activations_that_the_kernel_knows() -> None:
    known = [None, nn.ReLU(), nn.ReLU(inplace=True), nn.Softplus(), nn.SiLU()]
    assert [ours.activation_of(module) for module in known] == [0, 1, 1, 2, 3]
    for other in (nn.GELU(), nn.Softplus(beta=2), nn.Softplus(threshold=5), nn.ReLU6()):
        assert ours.activation_of(other) == -1


def test_layer_is_torch_s_where_the_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_launch", lambda *_, **__: pytest.fail("no kernel should run"))

    def check(**change: Any) -> None:
        images = torch.rand(2, 4, 6, 5).to(change.pop("device", "cpu")).to(memory_format=torch.channels_last)
        layer = nn.Conv2d(4, 6, 3, **change).to(images.device, memory_format=torch.channels_last)
        expected = layer(images)
        layer.__class__ = ours.Convolution2d
        layer.anywhere = images.is_cuda or bool(change)
        assert torch.equal(layer.requires_grad_(False)(images), expected)

    check()  # on a CPU
    check(groups=2)
    check(padding=1, padding_mode="reflect")
    check(padding="same")
    if DEVICE == "cuda":
        check(groups=2, device="cuda")


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_leaves_slow_input_gradients_to_torch(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(case, True)
    monkeypatch.setattr(ours, "layer_is_faster", lambda *_, gradient=False: False)
    result = layer.fast(layer.images)
    layer.fast.anywhere = False
    assert result.grad_fn.by_kernel  # type: ignore[union-attr]
    result.grad_fn.by_kernel = False  # type: ignore[union-attr]
    monkeypatch.setattr(ours, "_launch", lambda *_, **__: pytest.fail("torch should compute it"))
    (g,) = torch.autograd.grad(result, layer.images, layer.d)
    exact = layer.images.detach().double().cpu().requires_grad_()
    expected = torch.autograd.grad(layer.plain.double()(exact), exact, layer.d.double().cpu())[0]
    assert_matches(g, expected.to(DEVICE), TOLERANCE)
    assert g.is_contiguous(memory_format=torch.channels_last)


@runs_kernels
def test_layer_with_weights_that_are_trained_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_launch", lambda *_, **__: pytest.fail("its weights would get no gradient"))
    layer = Layer(ODD[1], True)
    layer.fast.requires_grad_(True)
    layer.fast(layer.images).sum().backward()
    assert layer.fast.weight.grad is not None


# In a graph ----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Every kind of convolution that is replaced, one that is not (groups), and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.grouped = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.grouped(x)).mean((2, 3)))


METRIC = ws.Wasserstein(ws.PixelGraph.grid(6, 5, radius=1))


def step(penalized: bool = True) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = Small().to(DEVICE, memory_format=torch.channels_last)
    images = torch.rand(3, 3, 6, 5).to(DEVICE, memory_format=torch.channels_last)
    labels = torch.tensor([0, 2, 1], device=DEVICE)
    penalty = ws.GradientPenalty(METRIC, 0.1)
    return step_graph(penalty if penalized else ws.Plain(), model, images, labels)


def operators(graph: torch.fx.GraphModule) -> dict[str, int]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return {name: names.count(name) for name in sorted(set(names)) if "convolution" in name}


def assert_same_step(results: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for result, value in zip(results[:2], expected[:2], strict=True):
        assert_matches(result, value, TOLERANCE)
    for result, value in zip(results[2], expected[2], strict=True):
        assert_matches(result, value, 5 * TOLERANCE)
        assert result.stride() == value.stride()


def test_all_convolutions_are_found() -> None:
    graph, _ = step()
    assert graphs.replace_convolutions(graph) == 0 or DEVICE == "cuda"
    graph, _ = step()
    # Of two layers: both passes, and once more along a direction, but for the end of the last; two weight gradients each.
    assert graphs.replace_convolutions(graph, anywhere=True) == 2 * 2 + 2 * 2 - 1 + 2 * 2
    assert operators(graph) == {
        "aten.convolution.default": 2,
        "aten.convolution_backward.default": 4,
        "wassersmooth.convolution_forward.default": 4,
        "wassersmooth.convolution_input_gradient.default": 3,
        "wassersmooth.convolution_weight_gradient.default": 2,
    }
    graph.graph.lint()
    assert graphs.replace_convolutions(graph, anywhere=True) == 0


def test_kernels_are_launched_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = step()
    graphs.replace_convolutions(graph, anywhere=True)
    launched: list[str] = []

    def launch(kernel: Any, like: Any) -> None:
        launched.append(str(kernel))
        raise RuntimeError("is reported by the step itself")

    monkeypatch.setattr(graphs, "_launch_once", launch)
    with graphs.kernels_made_meanwhile(graph):
        graph.graph.eliminate_dead_code()
    assert sorted({*launched}) == [name for name in sorted(operators(graph)) if name.startswith("wassersmooth")]
    assert len(launched) < sum(count for name, count in operators(graph).items() if name.startswith("wassersmooth"))


def test_a_plain_step_has_single_weight_gradients() -> None:
    graph, _ = step(penalized=False)
    assert graphs.replace_convolutions(graph, anywhere=True) >= 2 * 2 + 1
    assert operators(graph)["wassersmooth.convolution_weight_gradient.default"] == 2


@runs_kernels
@pytest.mark.parametrize("penalized", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_same_step(penalized: bool, compiled: bool) -> None:
    graph, arguments = step(penalized)
    expected = graph(*arguments)
    graphs.replace_convolutions(graph, anywhere=True)
    torch.compiler.reset()
    assert graph.code  # makes the code that torch.compile reads
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    function = torch.compile(graph, fullgraph=True, dynamic=False, backend=backend) if compiled else graph
    assert_same_step(function(*arguments), expected)


@needs_cuda
def test_in_a_cuda_graph() -> None:
    graph, arguments = step()
    graphs.replace_convolutions(graph, anywhere=True)
    graph(*arguments)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = graph(*arguments)
    arguments[0].mul_(0.5)
    captured.replay()
    assert_same_step(results, graph(*arguments))


def test_what_the_kernels_are_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.rand(2, 4, 6, 5, device=DEVICE).to(memory_format=torch.channels_last)
    assert ours.kernels_support(a)
    assert ours.kernels_support(a.half(), a.half())
    assert not ours.kernels_support(a, a.half())
    assert not ours.kernels_support(a.double())
    assert not ours.kernels_support(a.contiguous())
    assert not ours.kernels_support(a[0])
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert not ours.kernels_support(a)
        assert ours.kernels_support(a.bfloat16())
    monkeypatch.setattr(ours, "_TRITON", False)
    assert not ours.kernels_support(a)


def test_gpus_without_tensor_cores_for_tf32_keep_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would multiply exactly, and correct an error that is not there."""
    images = SimpleNamespace(dim=lambda: 4, numel=lambda: 1, device=torch.device("cuda"), dtype=torch.float32)
    images.is_contiguous = lambda memory_format: True
    for capability, supported in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert ours.kernels_support(images) == supported  # type: ignore[arg-type]


def test_where_they_are_faster() -> None:
    def faster(channels: int, out: int, side: int, stride: int = 1, window: int = 3) -> bool:
        a = torch.empty(128, channels, side, side, device="meta")
        at = ([stride, stride], [window // 2, window // 2], [1, 1])
        return ours.is_faster(ours.shape_of(a, [out, channels, window, window], *at), 128)

    def layer_faster(channels: int, out: int, side: int, stride: int = 1, images: int = 500, gradient: bool = False) -> bool:
        a = torch.empty(images, channels, side, side, device="meta")
        shape = ours.shape_of(a, [out, channels, 3, 3], [stride, stride], [1, 1], [1, 1])
        return ours.layer_is_faster(shape, images, gradient)

    assert all(layer_faster(*layer) for layer in LAYERS)
    assert [layer_faster(*layer, gradient=True) for layer in LAYERS] == [True, True, False, True, False, False]
    assert not layer_faster(64, 64, 8, images=600)
    assert all(faster(*layer) for layer in LAYERS)
    assert not faster(128, 64, 8)
    assert not faster(64, 64, 56)
    assert not faster(64, 64, 8, window=1)
