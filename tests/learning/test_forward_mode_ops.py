"""Written-out operators have the values of the native ones, with every option they take on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.zoo import batch
from wassersmooth import Euclidean, FastGradients, GradientObjective, GradientPenalty
from wassersmooth.learning import losses
from wassersmooth.learning.engines import ForwardMode
from wassersmooth.learning.forward_mode_ops import DECOMPOSITIONS, decomposed_operators


def uniform(*shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))) + 0.1


X, TOKENS = uniform(3, 4, 6, 6), uniform(2, 3, 5, 4)
W4, B4 = uniform(4), uniform(1, 4)[0]
CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
ROWS, TARGETS, CLASS_WEIGHTS = uniform(3, 5), torch.tensor([0, 4, 2]), uniform(5)
MAPS, LABEL_MAPS = uniform(2, 5, 3, 3), torch.arange(18).view(2, 3, 3) % 5

CALLS = {
    "batch_norm in training": lambda: F.batch_norm(X, None, None, W4, B4, True),
    "batch_norm in eval": lambda: F.batch_norm(X, B4, W4, W4, B4, False, eps=1e-3),
    "torch.batch_norm": lambda: torch.batch_norm(X, W4, B4, None, None, True, 0.1, 1e-5, False),
    "instance_norm": lambda: F.instance_norm(X, weight=W4, bias=B4),
    "instance_norm in eval": lambda: F.instance_norm(X, B4, W4, W4, B4, use_input_stats=False),
    "layer_norm": lambda: F.layer_norm(X, (6, 6), uniform(6, 6), None, 1e-3),
    "torch.layer_norm": lambda: torch.layer_norm(X, (6,)),
    "group_norm": lambda: F.group_norm(X, 2, W4, B4),
    "rms_norm": lambda: F.rms_norm(X, (6,), uniform(6)),
    "softmax": lambda: F.softmax(X, dim=1),
    "Tensor.softmax": lambda: X.softmax(-1),
    "torch.softmax with dtype": lambda: torch.softmax(X.float(), 1, dtype=torch.float64),
    "softmin": lambda: F.softmin(X, dim=1),
    "log_softmax": lambda: F.log_softmax(1000 * X, dim=1),
    "logsumexp": lambda: torch.logsumexp(1000 * X, 1, keepdim=True),
    "logsumexp over two": lambda: torch.logsumexp(X, (1, 2)),
    "logsumexp over two that stay": lambda: X.logsumexp((1, 3), keepdim=True),
    "torch.special.logsumexp": lambda: torch.special.logsumexp(X, 1),
    "torch.special.softmax": lambda: torch.special.softmax(X.float(), 1, dtype=torch.float64),
    "torch.special.log_softmax": lambda: torch.special.log_softmax(X, -1),
    "silu": lambda: F.silu(X - 1),
    "mish": lambda: F.mish(X - 1),
    "glu": lambda: F.glu(X - 1, 1),
    "hardsigmoid": lambda: F.hardsigmoid(10 * (X - 0.5)),
    "hardswish": lambda: F.hardswish(10 * (X - 0.5)),
    "cdist": lambda: torch.cdist(TOKENS[0], TOKENS[1]),
    "cdist, another norm": lambda: torch.cdist(TOKENS[0], TOKENS[1], p=1.0),
    "pdist": lambda: torch.pdist(ROWS),
    "F.pdist": lambda: F.pdist(ROWS),
    "normalize": lambda: F.normalize(X - 0.5),
    "normalize, short vectors": lambda: F.normalize(1e-3 * TOKENS, dim=-1, eps=2e-3),
    "normalize over two": lambda: F.normalize(X, dim=(2, 3)),
    "normalize, another norm": lambda: F.normalize(X, p=1.0),
    "cosine_similarity": lambda: F.cosine_similarity(X, X.flip(0)),
    "cosine_similarity that broadcasts": lambda: F.cosine_similarity(ROWS[:, None], ROWS[None], dim=-1),
    "cosine_similarity, short vectors": lambda: F.cosine_similarity(1e-9 * ROWS, ROWS),
    "cross_entropy": lambda: F.cross_entropy(ROWS, TARGETS),
    "cross_entropy summed": lambda: F.cross_entropy(ROWS, TARGETS, reduction="sum", label_smoothing=0.1),
    "cross_entropy with soft labels": lambda: F.cross_entropy(ROWS, ROWS.softmax(1), reduction="none", label_smoothing=0.2),
    "cross_entropy with weights": lambda: F.cross_entropy(ROWS, TARGETS, weight=CLASS_WEIGHTS),
    "cross_entropy with weights, smoothed": lambda: F.cross_entropy(ROWS, TARGETS, CLASS_WEIGHTS, label_smoothing=0.1),
    "cross_entropy with all options": lambda: F.cross_entropy(
        ROWS, TARGETS, CLASS_WEIGHTS, ignore_index=4, label_smoothing=0.1, reduction="none"
    ),
    "cross_entropy with weights and soft labels": lambda: F.cross_entropy(
        ROWS, ROWS.softmax(1), CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "cross_entropy that ignores": lambda: F.cross_entropy(ROWS, TARGETS, ignore_index=4),
    "cross_entropy that ignores, smoothed": lambda: F.cross_entropy(
        ROWS, TARGETS, CLASS_WEIGHTS, ignore_index=4, label_smoothing=0.1
    ),
    "cross_entropy that ignores -100": lambda: F.cross_entropy(ROWS, TARGETS - 102 * (TARGETS == 2), reduction="sum"),
    "cross_entropy with a class ruled out": lambda: F.cross_entropy(
        ROWS.masked_fill(torch.arange(5) == 1, -torch.inf), TARGETS
    ),
    "cross_entropy of one row": lambda: F.cross_entropy(ROWS[0], TARGETS[0], CLASS_WEIGHTS),
    "cross_entropy of maps": lambda: F.cross_entropy(MAPS, LABEL_MAPS, CLASS_WEIGHTS, ignore_index=1),
    "cross_entropy of soft maps": lambda: F.cross_entropy(MAPS, MAPS.softmax(1), CLASS_WEIGHTS),
    "cross_entropy by the old options": lambda: F.cross_entropy(ROWS, TARGETS, size_average=False),
    "attention": lambda: F.scaled_dot_product_attention(TOKENS, 2 * TOKENS, TOKENS**2),
    "attention, causal": lambda: F.scaled_dot_product_attention(TOKENS, TOKENS, TOKENS, is_causal=True, scale=0.3),
    "attention, shared keys": lambda: F.scaled_dot_product_attention(
        torch.cat([TOKENS, 2 * TOKENS], 1), TOKENS, TOKENS**2, enable_gqa=True
    ),
    "attention, boolean mask": lambda: F.scaled_dot_product_attention(TOKENS, TOKENS, TOKENS, attn_mask=CAUSAL),
    "attention, added mask": lambda: F.scaled_dot_product_attention(TOKENS, TOKENS, TOKENS, attn_mask=uniform(5, 5)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_values_are_the_native_ones(call):
    expected = call()
    with decomposed_operators():
        received = call()
    assert received.dtype == expected.dtype
    assert_matches(received, expected, 1e-12)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_images_between_pixels(mode, padding_mode, align_corners):
    """Values and derivatives; also far outside, at the borders, at pixels, and in images of one row or column."""
    generator = torch.Generator().manual_seed(0)
    for size in ((5, 7), (1, 3), (4, 1)):
        images = torch.rand(2, 3, *size, dtype=torch.float64, generator=generator).requires_grad_()
        grid = 1.5 * torch.randn(2, 6, 4, 2, dtype=torch.float64, generator=generator)
        grid[0, 0] = torch.tensor([[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0], [-1.0, 5.0]])
        v, inputs = torch.randn(2, 3, 6, 4, dtype=torch.float64, generator=generator), (images, grid.requires_grad_())
        expected = F.grid_sample(*inputs, mode, padding_mode, align_corners)
        with decomposed_operators():
            received = F.grid_sample(*inputs, mode, padding_mode, align_corners)
        assert_matches(received, expected, 1e-12)
        given = {"allow_unused": True, "materialize_grads": True}  # the nearest pixel does not depend on the place
        derivatives = [torch.autograd.grad((result * v).sum(), inputs, **given) for result in (received, expected)]
        for mine, theirs in zip(*derivatives, strict=True):
            assert_matches(mine, theirs, 1e-12)


class SpatialTransformer(nn.Module):
    """Moves the image as it sees fit."""

    def __init__(self):
        super().__init__()
        self.where = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
        self.last = nn.Sequential(nn.Conv2d(1, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(144, 3))
        nn.init.normal_(self.where[1].weight, std=0.02)
        self.where[1].bias.data = torch.tensor([1.0, 0.05, 0.03, 0.02, 0.95, -0.04])

    def forward(self, x):
        grid = F.affine_grid(self.where(x).view(-1, 2, 3), x.shape, align_corners=False)
        return self.last(F.grid_sample(x, grid, align_corners=False))


@pytest.mark.parametrize("fast", [True, False])
def test_a_spatial_transformer_is_exact(fast):
    torch.manual_seed(0)
    model, (images, labels) = SpatialTransformer().double(), batch()
    twin = copy.deepcopy(model)
    GradientPenalty(Euclidean(), 0.7)(twin, images, labels).total.backward()
    if fast:
        FastGradients(GradientPenalty(Euclidean(), 0.7), model)(images, labels)
    else:
        GradientPenalty(Euclidean(), 0.7, engine=ForwardMode(verify=False))(model, images, labels).total.backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_matches(mine.grad, theirs.grad, 1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_with_masks(need_weights, batch_first):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, batch_first=batch_first, kdim=3, vdim=6, dtype=torch.float64)
    itself = nn.MultiheadAttention(4, 2, batch_first=batch_first, bias=False, dtype=torch.float64)
    q, k, v = uniform(2, 2, 4), uniform(2, 2, 3), uniform(2, 2, 6)
    padding = torch.tensor([[False, True], [False, False]])
    for run in (
        lambda: layer(q, k, v, need_weights=need_weights),
        lambda: layer(q, k, v, key_padding_mask=padding, need_weights=need_weights, average_attn_weights=False),
        lambda: itself(q, q, q, attn_mask=torch.tensor([[False, True], [False, False]]), need_weights=need_weights),
        lambda: itself(q, q, q, attn_mask=uniform(4, 2, 2), key_padding_mask=padding, need_weights=need_weights),
    ):
        expected = run()
        with decomposed_operators():
            received = run()
        assert_matches(received[0], expected[0], 1e-12)
        assert (received[1] is None) == (expected[1] is None)
        if need_weights:
            assert_matches(received[1], expected[1], 1e-12)


def test_products_whose_operands_are_named():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(uniform(4, 5)), nn.Parameter(uniform(5, 3))

        def forward(self, x):
            hidden = torch.mm(input=x.flatten(1), mat2=self.first).tanh()
            return torch.matmul(hidden, other=self.second)

    torch.manual_seed(0)
    model, x, labels = Named(), uniform(2, 1, 2, 2) / 2, torch.tensor([0, 1])
    received, expected = (
        GradientPenalty(Euclidean(), 1.0, engine=engine)(model, x, labels).penalty
        for engine in ("forward_mode", "double_backward")
    )
    assert_matches(received, expected.item(), 1e-12)
    for mine, theirs in zip(*(torch.autograd.grad(p, list(model.parameters())) for p in (received, expected)), strict=True):
        assert_matches(mine, theirs, 1e-10)


def test_the_table_covers_what_is_known_to_be_wrong():
    for operator in (F.batch_norm, F.layer_norm, F.instance_norm, F.silu, F.softmax, F.scaled_dot_product_attention):
        assert operator in DECOMPOSITIONS


def test_losses_are_those_of_torch():
    _, labels = batch()
    outputs = 30 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = F.one_hot(labels, 3).double()
    binary = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
    assert_matches(losses.cross_entropy(outputs, labels), F.cross_entropy(outputs, labels, reduction="none"), 1e-12)
    assert_matches(losses.binary_cross_entropy(outputs, labels), binary, 1e-12)
    assert_matches(losses.square(outputs, labels), F.mse_loss(outputs, targets, reduction="none").mean(1), 1e-12)
    huge = losses.cross_entropy(torch.tensor([[1e4, 0.0, 0.0]]), torch.tensor([1]))
    assert torch.isfinite(huge).all()


IN_SOME_ORDER = {
    "group_norm": lambda x: F.group_norm(x, 2, W4, B4),
    "instance_norm": lambda x: F.instance_norm(x, weight=W4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, W4, B4, True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, 1, keepdim=True),
    "silu": F.silu,
    "glu": lambda x: F.glu(x, 1),
}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 2, 1), (1, 0, 3, 2)], ids=str)
@pytest.mark.parametrize("name", IN_SOME_ORDER)
def test_results_lie_in_memory_as_those_of_the_native_operator(name, order):
    """A dropout that follows fills its mask in that order: with another one it would drop other values."""
    x = X.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    native = IN_SOME_ORDER[name](x)
    with decomposed_operators():
        received = IN_SOME_ORDER[name](x)
    assert_matches(received, native, 1e-12)
    torch.manual_seed(0)
    expected = F.dropout(torch.ones_like(native), 0.5)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(torch.ones_like(received), 0.5), expected)


def test_running_statistics_stay_also_where_the_native_operator_is_looked_at():
    x, mean, var = X.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0), torch.zeros(4).double(), torch.ones(4).double()
    assert not x.is_contiguous()
    with decomposed_operators():
        F.batch_norm(x, mean, var, W4, B4, True)
        F.instance_norm(x, mean, var, W4, B4)
    assert torch.equal(mean, torch.zeros_like(mean))
    assert torch.equal(var, torch.ones_like(var))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "fast"])
def test_what_has_no_second_derivative_in_torch(engine, device):
    """Hard sigmoids, and distances, also from a point to itself, as in an energy of atoms."""
    torch.manual_seed(0)

    def total(x, w, own):
        points = (w * x).reshape(2, 6, 2)
        distances = own.cdist(points, points) + own.cdist(points, points.flip(0))
        return (own.hardsigmoid(points) * own.hardswish(2 * points)).sum() + distances.square().sum() + distances.sin().sum()

    class Own:
        hardsigmoid = staticmethod(lambda x: (x / 6 + 0.5).clamp(0, 1))
        hardswish = staticmethod(lambda x: x * (x / 6 + 0.5).clamp(0, 1))

        @staticmethod
        def cdist(a, b):
            squares = (a[:, :, None] - b[:, None]).square().sum(-1)
            return torch.where(squares > 0, squares.clamp_min(1e-30).sqrt(), 0)

    class Torch:
        hardsigmoid, hardswish, cdist = F.hardsigmoid, F.hardswish, torch.cdist

    class Energy(nn.Module):
        def __init__(self, operators):
            super().__init__()
            self.weight, self.operators = nn.Parameter(torch.full((12,), 1.3, dtype=torch.float64)), operators

        def forward(self, x):
            return torch.stack([total(one.flatten().repeat(2), self.weight.repeat(2), self.operators) for one in x])

    x = torch.randn(3, 1, 3, 4, dtype=torch.float64).to(device)
    found = []
    for operators, way in ((Own, "double_backward"), (Torch, engine)):
        model = Energy(operators).to(device)
        chosen = ForwardMode(verify=False) if way == "forward_mode" else "double_backward"
        objective = GradientObjective(lambda g, x, y, f: g.square().sum((1, 2, 3)), lambda f, y: f, None, chosen)
        if way == "fast":
            FastGradients(objective, model, compile=False)(x, None)
        else:
            objective(model, x, None).total.backward()
        found.append(model.weight.grad)
    assert found[0].norm() > 0
    assert_matches(found[1], found[0], 1e-10)


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "fast"])
def test_unit_vectors_and_cosines_of_padding(engine, device):
    """Both are linear around zero, so that the second derivative is zero there; torch's is NaN."""

    class CosineAttention(nn.Module):
        def __init__(self, written_out):
            super().__init__()
            torch.manual_seed(0)
            self.keys, self.values, self.written_out = nn.Linear(16, 8, bias=False), nn.Linear(16, 5), written_out

        def unit(self, x, eps):
            lengths = x.square().sum(-1, keepdim=True)
            return x / torch.where(lengths > eps**2, lengths.clamp_min(eps**2).sqrt(), eps)

        def forward(self, x):
            tokens = F.pad(x.reshape(len(x), 4, 16), (0, 0, 0, 2))  # the last two are zero
            keys, targets = self.keys(tokens), torch.ones(8, dtype=x.dtype, device=x.device)
            if self.written_out:
                cosines, units = (self.unit(keys, 1e-8) * self.unit(targets, 1e-8)).sum(-1), self.unit(keys, 1e-12)
            else:
                cosines, units = F.cosine_similarity(keys, targets, -1), F.normalize(keys, dim=-1)
            weights = (3 * units @ units.transpose(-1, -2)).softmax(-1)
            return (weights @ (cosines[..., None] * self.values(tokens))).sum(1)

    (images, labels), found = batch(device=device), []
    for written_out, way in ((True, "double_backward"), (False, engine)):
        model = CosineAttention(written_out).double().to(device)
        objective = GradientPenalty(Euclidean(), 0.5, engine="forward_mode" if way == "forward_mode" else "double_backward")
        if way == "fast":
            FastGradients(objective, model, compile=False)(images, labels)
        else:
            objective(model, images, labels).total.backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert_matches(found[1], found[0], 1e-10)
