"""The Triton kernels for tables of weights against the loop over edges, like ``test_box_ops``."""

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches
from tests.triton_interpreter import INTERPRETED, assert_passes_in_the_interpreter
from wassersmooth.geometry import box_ops, laplacian_maps, table_ops
from wassersmooth.geometry.neighbor_sum import edge_ends, spread_to_ends

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA or Triton's interpreter")

WEIGHTS = {
    "gaussian": {"weight": "gaussian"},
    "disk": {"neighborhood": "disk"},
    "function": {"weight": lambda dy, dx: 1.0 + 0.3 * dy + 0.1 * dx**2 + 0.05 * dx},
}
SMALL = [((3, 7), 2), ((2, 12), 5), ((1, 18), 3), ((4, 1), 2), ((3, 5), 6)]
LARGE = [((32, 32), 4), ((32, 32), 8), ((33, 70), 3), ((224, 224), 8), ((40, 41), 16)]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or the kernels run as they are")
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels on the CPU, too, where only the interpreter can run them; in short strips, so that there are several."""
    if INTERPRETED:
        monkeypatch.setattr(box_ops, "_on_device", lambda field: True)
        monkeypatch.setattr(table_ops, "_SUMMED_ROWS", 4)


def fields(height: int, width: int, images: int = 2, channels: int = 1, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (images, channels, height, width)
    u = torch.rand(shape, generator=generator)
    return [u.to(DEVICE), *(torch.randn(shape, generator=generator).to(DEVICE) + 3 for _ in range(number - 1))]


def by_edges(graph: ws.PixelGraph, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A(u) v, carre(u, v) and v' A(u) v in float64."""
    u, v = u.double(), v.double()
    carre = laplacian_maps.carre_du_champ_by_edges(graph, v, v)
    return (
        laplacian_maps.apply_by_edges(graph, u, v),
        laplacian_maps.carre_du_champ_by_edges(graph, u, v),
        (u * carre).sum((1, 2, 3)),
    )


@runs_kernels
@pytest.mark.parametrize(
    ("size", "radius", "weights"),
    [  # the interpreter is slow: it takes one kind of weights for each size
        (*size_and_radius, weights)
        for i, size_and_radius in enumerate(SMALL + ([] if INTERPRETED else LARGE))
        for weights in (list(WEIGHTS)[i % 3 :][:1] if INTERPRETED else WEIGHTS)
    ],
    ids=str,
)
def test_against_the_loop_over_edges(size: tuple[int, int], radius: int, weights: str) -> None:
    graph = ws.PixelGraph.grid(*size, radius, **WEIGHTS[weights])
    u, v, _ = fields(*size, channels=2)
    table = graph.weight_table(u), graph.degrees(u)
    applied, carre, quad = by_edges(graph, u, v)
    assert_matches(table_ops.apply(u, v, *table), applied, 1e-6)
    assert_matches(table_ops.carre_du_champ(u, v, *table), carre, 3e-6)  # products of two signs cancel
    assert_each_matches(table_ops.quad(u, v, *table), quad, 3e-7)
    assert_each_matches((u * table_ops.carre_du_champ(v, v, *table)).double().sum((1, 2, 3)), quad, 3e-7)
    factor = torch.tensor([2.0, -0.5], device=DEVICE)
    assert_matches(table_ops.apply(u, v, *table, factor), factor[:, None, None, None] * applied, 1e-6)


@runs_kernels
@pytest.mark.parametrize("kind", ["offset", "heavy tails"] + ([] if INTERPRETED else ["ramp", "tiny"]))
def test_float32(kind: str) -> None:
    """Constants cost no digits, and neither do slopes: as accurate as the loop over edges."""
    size, radius = (6, 2) if INTERPRETED else (224, 8)
    graph = ws.PixelGraph.grid(size, size, radius, weight="gaussian")
    u, white, _ = fields(size, size, images=1)
    t = torch.linspace(0, 1, size, device=DEVICE)
    v = {"offset": white + 1e2, "ramp": (t + 0.3 * t[:, None]).expand_as(u), "heavy tails": (white - 3) ** 7}.get(
        kind, 1e-15 * white
    )
    table = graph.weight_table(u), graph.degrees(u)
    applied, _, quad = by_edges(graph, u, v)
    assert_each_matches(table_ops.quad(u, v, *table), quad, 3e-7)
    assert_matches(table_ops.apply(u, v, *table), applied, 5e-6)


@runs_kernels
def test_memory_layouts_constants_and_nan() -> None:
    graph = ws.PixelGraph.grid(4, 8, 1, weight="gaussian")
    u, v, _ = fields(4, 8, channels=3)
    table = graph.weight_table(u), graph.degrees(u)
    expected = table_ops.apply(u, v, *table)
    other = table_ops.apply(u.to(memory_format=torch.channels_last), v.mT.contiguous().mT, *table)
    assert_matches(other, expected, 1e-6)
    assert not table_ops.apply(u, torch.full_like(v, 0.3), *table).any()
    assert not table_ops.quad(u, torch.full_like(v, 0.3), *table).any()
    v[1, 0, 3, 4] = torch.nan
    assert table_ops.quad(u, v, *table).isnan().tolist() == [False, True]


@runs_kernels
@pytest.mark.parametrize("neighborhood", ["square", "disk"])
@pytest.mark.parametrize(("size", "radius"), [((5, 7), 1), ((3, 8), 2), ((2, 6), 4)] + ([] if INTERPRETED else LARGE), ids=str)
def test_relation_sums(size: tuple[int, int], radius: int, neighborhood: str) -> None:
    graph = ws.PixelGraph.grid(*size, radius, neighborhood)
    a, p, q = fields(*size, channels=2)
    for second in (q, p):
        found = graph.representatives(table_ops.relation_sums(a, p, second, *graph.reach))
        expected = []
        for relation in graph.edge_relations:
            (a_i, a_j), (p_i, p_j), (q_i, q_j) = (edge_ends(t.double(), relation) for t in (a, p, second))
            expected.append(((a_i + a_j) / 2 * (p_i - p_j) * (q_i - q_j)).sum())
        assert_matches(found, torch.stack(expected), 1e-6)


@runs_kernels
@pytest.mark.parametrize("neighborhood", ["disk"] if INTERPRETED else ["square", "disk"])
def test_learned_weights_to_second_order(neighborhood: str) -> None:
    """Derivatives of quad and mv in weights, image and covector against the loop over edges in float64."""
    x, v, c = fields(2, 5)
    number = len(ws.PixelGraph.grid(2, 5, 2, neighborhood).offsets)
    given = torch.linspace(0.5, 2.0, number)

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        weights, a, b = (t.detach().to(DEVICE, dtype).clone().requires_grad_() for t in (given, x, v))
        direction = c.to(dtype)
        found: list[Tensor] = []
        for name in ("quad", "mv"):
            metric = ws.Wasserstein(ws.PixelGraph.grid(2, 5, 2, neighborhood, weights))
            value = getattr(metric.cometric(a), name)(b)
            value = value.square().sum() if name == "quad" else (value * direction).square().sum()
            first = torch.autograd.grad(value, [weights, a, b], create_graph=True)
            changes = torch.linspace(-1, 1, number, device=DEVICE, dtype=dtype), direction, direction
            along = sum((g * change).sum() for g, change in zip(first, changes, strict=True))
            found += [value, *first, *torch.autograd.grad(along, [weights, a, b])]
        return found

    for actual, expected in zip(derivatives(torch.float32), derivatives(torch.float64), strict=True):
        assert actual.dtype == torch.float32
        assert_matches(actual, expected, 1e-5)


@runs_kernels
@pytest.mark.parametrize("scale", [1.0, 3e-39, 1e30, 5e-324, 1e-310])
def test_learned_weights_are_unpacked(scale: float) -> None:
    """Bit for bit as in plain torch, in units of the weights, and others as they are."""
    weights = (torch.linspace(1, 7, 12, dtype=torch.float64) * scale).to(DEVICE).requires_grad_()
    graph = ws.PixelGraph.grid(4, 6, 2, weight=weights)
    like = fields(4, 6)[0]
    for others in (None, torch.linspace(-1, 1, 12, device=DEVICE)):
        table = graph.table_of(graph.weights_like(like).detach() if others is None else others)
        found = table_ops.table_and_degrees(graph, others, like)
        assert torch.equal(found[0], table)
        assert_matches(found[1], graph.degrees_of(table), 2e-7)


@runs_kernels
def test_where_torch_makes_float64_by_default() -> None:
    """Tables of kernels are float32 all the same."""
    x, v, _ = fields(4, 6)
    weights = torch.linspace(1, 7, 12, device=DEVICE).requires_grad_()
    metrics = [lambda: ws.Wasserstein(ws.PixelGraph.grid(4, 6, 2, weight=weights)), lambda: ws.Deformations(4, 6, 1.0)]
    expected = [make().cometric(x).quad(v) for make in metrics]
    torch.set_default_dtype(torch.float64)
    try:
        found = [make().cometric(x).quad(v) for make in metrics]
        table = table_ops.table_and_degrees(metrics[0]().graph, None, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in table} == {torch.float32}
    for f, e in zip(found, expected, strict=True):
        assert_matches(f, e, 0)


@runs_kernels
@pytest.mark.parametrize("size", [(5, 7), (1, 6)] if INTERPRETED else [(5, 7), (32, 32), (33, 70)], ids=str)
def test_flows_of_given_normal_numbers(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same sum by slices, in one piece and in several."""
    graph = ws.PixelGraph.grid(*size, 2, "disk", lambda dy, dx: 1.0 + dy + 0.5 * dx * dx)
    u, _, _ = fields(*size, channels=2)
    u[0, 0, 0, 0] = 0
    normals = torch.randn(len(graph.offsets), *u.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = torch.zeros_like(u, dtype=torch.float64)
    for (relation, weight), z in zip(graph.weighted_relations(u), normals.double(), strict=True):
        (u_i, u_j), (z_i, _) = edge_ends(u.double(), relation), edge_ends(z, relation)
        flow = (weight * (u_i + u_j) / 2).sqrt() * z_i
        expected = expected + spread_to_ends(flow, -flow, relation)
    for most in (table_ops.MOST_NORMALS, 2 * u.numel()):
        drawn = iter(normals.split(most // u.numel()))
        monkeypatch.setattr(table_ops, "MOST_NORMALS", most)
        monkeypatch.setattr(table_ops, "standard_normal", lambda shape, like, generator, drawn=drawn: next(drawn))
        assert_matches(table_ops.sample(graph, u, None), expected, 1e-6)


@runs_kernels
@pytest.mark.parametrize("weights", ["learned"] if INTERPRETED else ["gaussian", "function", "learned", "constant tensor"])
def test_fast_gradients(weights: str) -> None:
    """Tracers keep the kernels whole, and the table is a constant or an argument to them."""
    torch.manual_seed(0)
    given: dict[str, object] = {"gaussian": "gaussian", "function": lambda dy, dx: 1.0 + dy + dx * dx}
    given |= {"learned": torch.ones(12, requires_grad=True, device=DEVICE), "constant tensor": torch.linspace(1, 2, 12)}
    metric = ws.Wasserstein(ws.PixelGraph.grid(3, 4, 2, weight=given[weights]))  # type: ignore[arg-type]
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Softplus(), nn.Linear(4, 3)).to(DEVICE)
    x, labels = fields(3, 4)[0], torch.tensor([1, 2], device=DEVICE)
    objective = ws.GradientPenalty(metric, eta=2.0)
    trained = [*model.parameters(), *([metric.graph.weights] if weights == "learned" else [])]
    expected = torch.autograd.grad(objective(model, x, labels).total, trained)
    fast = ws.FastGradients(objective, model, compile=False)
    fast(x, labels)
    assert fast.prepared
    for tensor, e in zip(trained, expected, strict=True):
        assert tensor.grad is not None
        assert_matches(tensor.grad, e, 1e-4)


@runs_kernels
def test_the_library_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("apply", "carre_du_champ", "quad", "relation_sums"):
        kernel = getattr(table_ops, name)
        monkeypatch.setattr(table_ops, name, lambda *given, name=name, kernel=kernel: used.append(name) or kernel(*given))
    x, v, _ = fields(3, 5)
    cometric = ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, weight="gaussian")).cometric(x)
    cometric.mv(v), cometric.quad(v)
    assert used == ["apply", "quad"]
    weights = torch.ones(12, requires_grad=True, device=DEVICE)
    ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, weight=weights)).cometric(x).quad(v).sum().backward()
    assert used[2:] == ["carre_du_champ", "relation_sums"]


def test_the_table_holds_the_weights_and_their_degrees() -> None:
    graph = ws.PixelGraph.grid(4, 6, 2, "disk", lambda dy, dx: 1.0 + dy + 0.5 * dx * dx + 0.25 * dx)
    like = torch.zeros(1, dtype=torch.float64)
    table = graph.weight_table(like) * graph.weight_unit(like)
    for dy, dx, weight in graph.relations:
        assert table[3 + dy, 2 + dx] == table[3 - dy, 2 - dx] == weight
    assert float(table.sum()) == pytest.approx(2 * float(graph.weights.sum()))
    ones = torch.ones(1, 1, 4, 6, dtype=torch.float64)
    assert_matches(graph.degrees(like), graph.neighbor_sum(ones)[0, 0], 1e-14)


def test_supports_only_what_the_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_ops, "_on_device", lambda field: True)
    graph = ws.PixelGraph.grid(20, 20, 3, weight="gaussian")
    u, v, _ = fields(20, 20)
    assert table_ops.supports(graph, u, v)
    assert not table_ops.supports(graph, u.double(), v.double())
    assert not table_ops.supports(graph, u, v.clone().requires_grad_())
    assert not table_ops.supports(ws.PixelGraph.grid(20, 20, 17, weight="gaussian"), u, v)
    assert not table_ops.supports(ws.PixelGraph.volume(2, 10, 20, 1), u, v)
    monkeypatch.setattr(box_ops, "_TRITON", False)
    assert not table_ops.supports(graph, u, v)
