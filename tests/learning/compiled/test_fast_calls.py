"""How fast gradients are called: accumulation, batch shapes, progress, and clear words about what cannot be done."""

import copy
import io
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.steps import assert_same_step, eager, gradients, traced
from tests.learning.zoo import CLASSES, batch, make, smooth_net
from wassersmooth import FastGradients, PixelGraph, Wasserstein
from wassersmooth.learning.compiled import compile_cache, prepared_step
from wassersmooth.learning.objectives import GradientPenalty, Plain

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
PENALTY = GradientPenalty(METRIC, 0.7)


@pytest.fixture(autouse=True)
def nothing_compiled_before(monkeypatch):
    monkeypatch.setattr(compile_cache, "_cache", {})


def accumulated(model, objective, batches):
    model.zero_grad()
    for images, labels in batches:
        objective(model, images, labels).total.backward()
    return flat(gradients(model))


@pytest.mark.slow
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_gradients_add_up(cuda_graph, device):
    """Also those of a captured step, which overwrites its memory, and of a batch of another shape, which runs eagerly."""
    model, batches = make("batch_norm_train", device), [batch(size, device, seed=seed) for seed, size in enumerate((6, 6, 4))]
    twin, fast = copy.deepcopy(model), FastGradients(PENALTY, model, compile=False, cuda_graph=cuda_graph)
    for first in (False, True, False):  # whatever gradients were there are replaced, or counted
        before = flat(gradients(model)) if first else 0
        for i, (images, labels) in enumerate(batches):
            fast(images, labels, accumulate=first or i > 0)
        assert_matches(flat(gradients(model)), before + accumulated(twin, PENALTY, batches), 1e-9)


def test_parameters_without_a_gradient_keep_what_they_have_while_accumulating():
    model, (images, labels) = nn.ModuleDict({"used": smooth_net(), "unused": nn.Linear(2, 2)}).double(), batch()
    model.forward = lambda x: model["used"](x)
    fast, kept = traced(Plain(), model), torch.ones(2, dtype=torch.float64)
    model["unused"].bias.grad = kept
    fast(images, labels, accumulate=True)
    assert model["unused"].bias.grad is kept
    fast(images, labels)
    assert model["unused"].bias.grad is None


@pytest.mark.slow
def test_four_shapes_are_prepared_each_at_its_second_appearance(device):
    model = make("batch_norm_train", device)
    twin, stages = copy.deepcopy(model), []
    fast = FastGradients(PENALTY, model, compile=False, cuda_graph=False, progress=stages.append)

    def prepared_by(size):
        images, labels = batch(size, device)
        before = len(stages)
        assert_same_step(fast(images, labels), eager(PENALTY, twin, images, labels), model, twin, 1e-9)
        return len(stages) > before

    assert prepared_by(8)
    assert [prepared_by(8) for _ in range(2)] == [False, False]
    for size in (7, 6, 5):
        assert [prepared_by(size) for _ in range(3)] == [False, True, False]
    with pytest.warns(UserWarning, match="prepared for 4 batch shapes already; all others run eagerly"):
        assert not prepared_by(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [prepared_by(size) for size in (4, 4, 3, 3, 8, 5)] == [False] * 6
    assert repr(fast).endswith(
        "prepared for (8, 1, 8, 8) (traced), (7, 1, 8, 8) (traced), (6, 1, 8, 8) (traced), (5, 1, 8, 8) (traced))"
    )


def test_the_repr_says_what_is_prepared_and_progress_what_is_done(device, monkeypatch):
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, examples: graph.forward)
    model, (images, labels), stages = smooth_net(device), batch(device=device), []
    fast = FastGradients(Plain(), model, compile=True, progress=stages.append)
    assert repr(fast) == "FastGradients(Plain(loss='cross_entropy'), Sequential, not prepared yet)"
    fast(images, labels)
    captured = ["capturing"] if device == "cuda" else []
    estimate = r" \d+ operators: about \d+ s, or \d+ s if the compiler's cache has them" if device == "cuda" else ""
    assert re.fullmatch("compiling" + estimate, stages.pop(1))
    assert stages == ["tracing", "launching", "comparing", *captured]
    assert repr(fast).endswith(f"prepared for (4, 1, 8, 8) (compiled{' and captured' if captured else ''}))")


def test_the_estimate_counts_operators():
    graph = torch.fx.symbolic_trace(lambda x: sum(torch.sin(x + i) for i in range(1000)))
    assert prepared_step._estimate(graph) == " 3,000 operators: about 60 s, or 9 s if the compiler's cache has them"


ACTIVATIONS = (F.relu6, F.hardswish, F.hardsigmoid, F.hardtanh, F.elu, F.leaky_relu, F.mish, F.gelu, F.logsigmoid, F.softshrink)


class ManyOperators(nn.Module):
    """What torch's compiler takes apart in its own way."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.second(F.interpolate(F.max_pool2d(self.first(x), 2), scale_factor=2, mode="bilinear"))
        x = sum(activation(x) for activation in ACTIVATIONS) + x.clamp_min(0.1) + x.abs().clamp(0.2, 0.7)
        x = F.adaptive_avg_pool2d(F.group_norm(x, 2), 2).flatten(2).transpose(1, 2)
        x = F.normalize(F.scaled_dot_product_attention(x, x, x), dim=-1) + F.layer_norm(F.pad(x, (1, 1))[..., 1:-1], (4,))
        return self.last(x.amax(1) + x.std(1) + x.logsumexp(1))


def test_what_is_handed_to_the_compiler_is_the_eager_step(device, monkeypatch):
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, on_cuda: graph.forward)
    torch.manual_seed(0)
    model, (images, labels) = ManyOperators().double().to(device), batch(device=device)
    twin = copy.deepcopy(model)
    fast = FastGradients(PENALTY, model, compile=True, cuda_graph=False)
    assert_same_step(fast(images, labels), eager(PENALTY, twin, images, labels), model, twin, 1e-9)


@pytest.mark.slow
def test_the_first_step_of_a_process_is_traced_for_the_compiler():
    """Where nothing else has imported the parts of the compiler that this needs."""
    code = """
from tests.learning.compiled import test_fast_calls as module
module.prepared_step._compiled = lambda graph, on_cuda: graph.forward
module.FastGradients(module.PENALTY, module.ManyOperators().double(), compile=True)(*module.batch())
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_backward_after_a_fast_call_is_one_clear_line():
    model, (images, labels) = smooth_net(), batch()
    fast = traced(PENALTY, model)
    for size in (4, 3):  # prepared and eager
        terms = fast(images[:size], labels[:size])
        with pytest.raises(
            RuntimeError, match=r"^the gradients are in parameter.grad already, .*; call optimizer.step\(\) without"
        ):
            terms.total.backward()
        for term in (terms.loss, terms.penalty):
            with pytest.raises(RuntimeError, match=r"^the gradients are in parameter.grad already"):
                term.backward()


def test_a_step_that_a_user_compiles(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    twin = copy.deepcopy(model)
    fast, alone = (
        FastGradients(GradientPenalty(Wasserstein(PixelGraph.grid(8, 8, 1)), 0.5), m, compile=False) for m in (model, twin)
    )

    @torch.compile(backend="aot_eager")  # which cannot differentiate twice
    def step(images):
        return fast(images / 2, labels).total * 3

    for _ in range(2):
        assert step(images) == 3 * alone(images / 2, labels).total
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-12)
    torch.compiler.reset()


def test_terms_can_be_saved_and_copied():
    """``torch.load`` refused them, since they named the function that explains ``backward``."""
    terms = traced(PENALTY, smooth_net())(*batch())
    file = io.BytesIO()
    torch.save(terms._asdict(), file)
    file.seek(0)
    copies = torch.load(file), pickle.loads(pickle.dumps(terms._asdict())), copy.deepcopy(terms._asdict())
    for name, term in terms._asdict().items():
        assert all(copied[name] == term and type(copied[name]) is torch.Tensor for copied in copies)


def test_float16_is_refused_with_the_remedy():
    model, (images, labels) = smooth_net(dtype=torch.float32), batch(dtype=torch.float32)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ValueError, match=r"float16; use torch.autocast\('cpu', torch.bfloat16\)"),
    ):
        traced(PENALTY, model)(images, labels)


def test_nothing_is_compiled_on_a_cpu_unless_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, examples: asked.append(graph) or graph)
    images, labels = batch()
    FastGradients(Plain(), smooth_net())(images, labels)
    assert not asked
    FastGradients(Plain(), smooth_net(), compile=True)(images, labels)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="compile must be one of 'auto', False, True; got 'always'"):
        FastGradients(Plain(), smooth_net(), compile="always")


def test_a_compiler_that_fails_is_told_with_the_remedy(monkeypatch, device):
    def fails(graph, examples):
        raise AssertionError("LoweringException: something internal\nand a long trace")

    monkeypatch.setattr(prepared_step, "_compiled", fails)
    model, (images, labels) = smooth_net(device), batch(device=device)
    said = r"torch could not compile this step \(LoweringException: something internal\)"
    with pytest.raises(RuntimeError, match=said + "; use compile=False, or the objective itself$"):
        FastGradients(Plain(), model, compile=True)(images, labels)
    if device == "cuda":  # where compiling was not asked for, the step goes on without it
        twin, fast = copy.deepcopy(model), FastGradients(Plain(), model, cuda_graph=False)
        with pytest.warns(UserWarning, match=said + "; it runs uncompiled"):
            received = fast(images, labels)
        assert_same_step(received, eager(Plain(), twin, images, labels), model, twin, 1e-10)


def test_a_step_that_no_graph_can_hold_is_taken_without_one(monkeypatch):
    def fails(step, inputs, generator):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand a long trace")

    def step(images, constants, leaves):
        raise AssertionError("not called yet")

    monkeypatch.setattr(prepared_step, "CudaGraph", fails)
    said = r"cannot be captured in a CUDA graph \(CUDA error: operation not permitted when stream is capturing\); its kernels"
    with pytest.warns(UserWarning, match=said):
        assert prepared_step._captured(step, (torch.rand(2, 1, 3, 3), [], []), None) == (step, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_metric_that_copies_from_the_cpu_on_cuda():
    class Scaled:
        """Euclidean, with a factor that no CUDA graph can copy to the device."""

        def cometric(self, x):
            return self

        def mv(self, v):
            return v * torch.tensor([2.0], dtype=v.dtype).to(v.device)

        def quad(self, v):
            return (v * self.mv(v)).flatten(1).sum(1)

    model, (images, labels) = smooth_net("cuda"), batch(device="cuda")
    objective, twin = GradientPenalty(Scaled(), 0.7), copy.deepcopy(model)
    fast = FastGradients(objective, model, compile=False)
    with pytest.warns(UserWarning, match="cannot be captured"):
        received = fast(images, labels)
    assert_same_step(received, eager(objective, twin, images, labels), model, twin, 1e-10)


class BasicBlock(nn.Module):
    """The residual block of ResNet-18."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.activation = nn.SiLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        hidden = self.activation(self.norms[0](self.first(x)))
        skipped = x if self.downsample is None else self.downsample(x)
        return self.activation(self.norms[1](self.second(hidden)).add_(skipped))


def resnet18(width):
    """At 32 pixels its last stage works on single pixels."""
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
    blocks = [block for c, out, s in stages for block in (BasicBlock(c, out, s), BasicBlock(out, out, 1))]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.SiLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES))


def test_resnet18_at_32_pixels(device):
    """Compiled on CUDA with the width of the original, and in its batch size."""
    torch.manual_seed(0)
    width, size = (64, 256) if device == "cuda" else (4, 4)
    model = resnet18(width).to(device)
    model = model if device == "cuda" else model.double()
    dtype = next(model.parameters()).dtype
    images = torch.rand(size, 3, 32, 32, dtype=dtype, device=device)
    labels = torch.randint(CLASSES, (size,), device=device)
    objective, twin = GradientPenalty(Wasserstein(PixelGraph.grid(32, 32, radius=8), mass=0.25), 0.3), copy.deepcopy(model)
    received, expected = FastGradients(objective, model)(images, labels), eager(objective, twin, images, labels)
    assert_matches(received.total, expected.total, 1e-3 if device == "cuda" else 1e-9)
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 5e-2 if device == "cuda" else 1e-8)
