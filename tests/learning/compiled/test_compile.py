"""The whole step of the forward-mode engine as one compiled graph, and clear errors where an engine cannot."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import flat, gradients_of
from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import PixelGraph, Wasserstein
from wassersmooth._torch_internals import compile_graph, trace
from wassersmooth.learning.objectives import DirectionalPenalty, GradientPenalty
from wassersmooth.learning.tikhonov import Tikhonov

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))

# "aot_eager" runs the captured graph without generating code: the same tracing, at a fraction of the time.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(objective, backend=BACKEND):
    def terms(model, images, labels):
        return objective(model, images, labels)

    return torch.compile(terms, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("residual_train", "forward_mode"),
        ("functional_norms", "forward_mode"),
        ("vision_transformer", "forward_mode"),
        ("batch_norm_train", "finite_difference"),
    ],
)
def test_compiled_as_one_graph_it_is_the_same_objective(name, engine, device):
    model, (images, labels) = make(name, device), batch(device=device)
    twin = make(name, device)
    expected = GradientPenalty(METRIC, 0.5)(twin, images, labels)
    received = compiled(GradientPenalty(METRIC, 0.5, engine=engine))(model, images, labels)
    assert_matches(received.loss, expected.loss, 1e-10)
    assert_matches(received.penalty, expected.penalty, 1e-10)
    tolerance = 1e-8 if engine == "forward_mode" else 1e-4
    assert_matches(flat(gradients_of(received.total, model)), flat(gradients_of(expected.total, twin)), tolerance)
    for (name, buffer), (_, other) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        assert_matches(buffer, other, 1e-12), name


@pytest.mark.slow
def test_inductor_and_a_ramp_without_a_new_compilation(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Softplus(), nn.Linear(4, 3)).to(device)
    images, labels = batch(device=device, dtype=torch.float32)
    metric, eta = Wasserstein(PixelGraph.grid(8, 8, radius=1)), torch.tensor(0.5, device=device)
    step = compiled(GradientPenalty(metric, eta, engine="forward_mode"), "inductor")
    torch._dynamo.utils.counters.clear()
    for value in (0.5, 1.0):
        eta.fill_(value)
        expected = GradientPenalty(metric, value)(model, images, labels)
        received = step(model, images, labels)
        assert_matches(received.total, expected.total, 1e-5)
        assert_matches(flat(gradients_of(received.total, model)), flat(gradients_of(expected.total, model)), 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class LinearInItsWeight(nn.Module):
    """Two kinds of dropout around one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.register_buffer("tokens", torch.randn(1, 8, 8, dtype=torch.float64))

    def forward(self, x):
        values = F.dropout(x[:, 0], 0.5) @ self.weight
        keys = self.tokens.expand_as(values)
        return F.scaled_dot_product_attention(keys, keys, values, dropout_p=0.5)[:, 0, :3]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "tolerance"), [("forward_mode", 1e-10), ("finite_difference", 1e-6)])
def test_dropout_has_one_mask_in_all_passes_of_a_compiled_step(engine, tolerance, device):
    """The penalty is homogeneous of degree two in the weight, so W . dq/dW = 2 q (Euler); with two masks it would not be."""
    torch.manual_seed(0)
    model, (images, labels) = LinearInItsWeight().to(device), batch(device=device)
    step = compiled(GradientPenalty(METRIC, 1.0, of="logits", engine=engine))
    first, second = step(model, images, labels), step(model, images, labels)
    assert first.penalty != second.penalty  # the masks differ from step to step
    for terms in (first, second):
        (gradient,) = torch.autograd.grad(terms.penalty, model.weight)
        assert_matches((gradient * model.weight).sum(), 2 * terms.penalty, tolerance)


def test_errors_name_the_engine_that_compiles(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    with pytest.raises(RuntimeError, match="use engine='forward_mode'"):
        compiled(GradientPenalty(METRIC, 0.5))(model, images, labels)
    for objective in (Tikhonov(METRIC, 0.5), DirectionalPenalty(lambda m, x, y: x)):
        with pytest.raises(RuntimeError, match="cannot trace this objective; leave it out of the compiled function"):
            compiled(objective)(model, images, labels)


def test_a_model_compiled_by_itself(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    alone = torch.compile(model, backend=BACKEND)
    for engine in ("double_backward", "forward_mode"):
        with pytest.raises(RuntimeError, match="compile the whole step with engine='forward_mode'"):
            GradientPenalty(METRIC, 0.5, engine=engine)(alone, images, labels)
    rough = GradientPenalty(METRIC, 0.5, engine="finite_difference")(alone, images, labels)
    exact = GradientPenalty(METRIC, 0.5)(model, images, labels)
    assert_matches(flat(gradients_of(rough.total, model)), flat(gradients_of(exact.total, model)), 1e-4)


@pytest.mark.slow
def test_without_fullgraph_double_backward_falls_back_to_eager(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    objective = GradientPenalty(METRIC, 0.5)
    terms = torch.compile(lambda: objective(model, images, labels), backend=BACKEND)()
    assert_matches(terms.total, objective(model, images, labels).total, 1e-12)


class Broken(nn.Module):
    """A model that no compiler takes as one graph."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, images):
        torch._dynamo.graph_break()
        return self.inside(images)


@pytest.mark.slow
def test_without_fullgraph_a_break_inside_is_an_error_and_no_lost_gradient(device):
    """Of parts that are compiled one by one the penalty had the right value, and a gradient of zero."""
    inside, (images, labels) = smooth_net(device), batch(device=device)
    objective = GradientPenalty(METRIC, 0.5, engine="forward_mode")
    with pytest.raises(Exception, match=r"graph_break|graph break"):
        torch.compile(lambda: objective(Broken(inside), images, labels).penalty, backend=BACKEND)()

    def broken_outside():
        torch._dynamo.graph_break()
        return objective(inside, images, labels).penalty

    penalty, expected = torch.compile(broken_outside, backend=BACKEND)(), objective(inside, images, labels).penalty
    assert_matches(flat(gradients_of(penalty, inside)), flat(gradients_of(expected, inside)), 1e-9)


@pytest.mark.slow
def test_a_step_is_compiled_once_and_found_on_disk_by_the_next_process(tmp_path, monkeypatch):
    """The compiler bypasses its cache without a word where it lacks a context, and every process then compiles for minutes."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = trace(lambda x, y: [torch.tanh(x) @ y], (torch.rand(3, 3), torch.rand(3, 3)), (), for_compiler=True)
    for misses, hits in ((1, 0), (0, 1)):
        counters.clear()
        x, y = torch.rand(3, 3), torch.rand(3, 3)
        (found,) = compile_graph(copy.deepcopy(graph), {})(x, y)
        torch.testing.assert_close(found, torch.tanh(x) @ y)
        assert counters["inductor"]["fxgraph_cache_bypass"] == 0
        assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (misses, hits)
