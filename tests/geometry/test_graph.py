"""PixelGraph: relations, weights, node volumes, and being a value."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import wassersmooth as ws
from tests import oracles
from tests.compare import assert_matches
from tests.operator_case import WASSERSTEIN_CASES, OperatorCase, over
from wassersmooth.geometry import laplacian_maps
from wassersmooth.geometry.device_cache import DeviceCache
from wassersmooth.geometry.neighbor_sum import Disk, relation_sum


@pytest.mark.parametrize("neighborhood", ["square", "disk"])
@pytest.mark.parametrize("radius", [1, 2, 3, 4, 8])
def test_relations_are_the_representatives_in_row_order(radius: int, neighborhood: str) -> None:
    graph = ws.PixelGraph.grid(32, 32, radius, neighborhood=neighborhood)
    assert isinstance(graph.relations, tuple)
    assert [(dy, dx) for dy, dx, _ in graph.relations] == oracles.representatives(radius, neighborhood)
    assert all(float(weight) == 1.0 for _, _, weight in graph.relations)


@pytest.mark.parametrize(("radius", "count"), [(2, 12), (4, 40), (8, 144)])
def test_number_of_relations_of_the_paper(radius: int, count: int) -> None:
    assert len(ws.PixelGraph.grid(32, 32, radius).relations) == count


@pytest.mark.parametrize("neighborhood", ["square", "disk"])
def test_gaussian_weight_has_half_the_radius_as_its_deviation(neighborhood: str) -> None:
    for dy, dx, weight in ws.PixelGraph.grid(9, 9, 4, neighborhood=neighborhood, weight="gaussian").relations:
        assert float(weight) == pytest.approx(np.exp(-(dy**2 + dx**2) / (2 * 2.0**2)), rel=1e-12)


def test_weight_function_is_called_at_representatives_only() -> None:
    called = []

    def weight(dy: int, dx: int) -> float:
        called.append((dy, dx))
        return oracles.lopsided_weight(dy, dx)

    graph = ws.PixelGraph.grid(8, 8, 2, weight=weight)
    assert set(called) == set(oracles.representatives(2, "square"))
    for dy, dx, value in graph.relations:
        assert float(value) == pytest.approx(oracles.lopsided_weight(dy, dx), rel=1e-12)


def test_weight_tensor_is_taken_in_the_order_of_the_relations() -> None:
    weights = torch.arange(1.0, 13.0, dtype=torch.float64)
    graph = ws.PixelGraph.grid(8, 8, 2, weight=weights)
    assert [float(weight) for *_, weight in graph.relations] == weights.tolist()


@over([case for case in WASSERSTEIN_CASES if not case.aware])  # with features they are those of an image
def test_node_volumes(case: OperatorCase) -> None:
    volumes = torch.as_tensor(case.graph().node_volumes)
    expected = oracles.node_volumes(case.omega()).reshape(case.shape[2:])
    assert_matches(volumes, expected, 1e-6 if volumes.dtype == torch.float32 else 1e-12)
    assert float(volumes.double().sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("radius", [4, 5, 50])
def test_radius_beyond_the_image_gives_the_complete_graph(radius: int) -> None:
    volumes = ws.PixelGraph.grid(4, 5, radius).node_volumes
    assert_matches(volumes, np.full((4, 5), 1 / 20), 1e-6)


def test_attributes() -> None:
    graph = ws.PixelGraph.grid(6, 7, radius=2, neighborhood="disk")
    assert (graph.height, graph.width, graph.radius, graph.neighborhood) == (6, 7, 2, "disk")
    assert tuple(graph.node_volumes.shape) == (6, 7)


def test_repr_shows_the_arguments() -> None:
    text = repr(ws.PixelGraph.grid(6, 7, radius=3, neighborhood="disk", weight="gaussian"))
    for part in ("PixelGraph", "6", "7", "3", "disk", "gaussian"):
        assert part in text
    assert len(text) < 200, "a repr is a label, not a dump of all relations"


@pytest.mark.parametrize("attribute", ["height", "radius", "relations", "neighborhood", "node_volumes"])
def test_graph_is_immutable(attribute: str) -> None:
    graph = ws.PixelGraph.grid(6, 7, 2)
    with pytest.raises(AttributeError):
        setattr(graph, attribute, 1)


@pytest.mark.parametrize("weight", ["constant", "gaussian", "function", "tensor"])
@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copies_are_the_same_graph(weight: str, clone: object) -> None:
    case = OperatorCase(weight=weight, radius=2, neighborhood="disk")
    graph = case.graph()
    twin = clone(graph)  # type: ignore[operator]
    assert repr(twin) == repr(graph)
    assert [(dy, dx, float(w)) for dy, dx, w in twin.relations] == [(dy, dx, float(w)) for dy, dx, w in graph.relations]
    x, v = case.images(), case.covectors()
    torch.testing.assert_close(ws.Wasserstein(twin).cometric(x).mv(v), ws.Wasserstein(graph).cometric(x).mv(v))


def test_a_graph_made_from_a_lambda_can_be_pickled() -> None:
    """The function is called when the graph is made and need not survive it."""
    graph = ws.PixelGraph.grid(5, 5, 1, weight=lambda dy, dx: 1.0 / (dy**2 + dx**2))
    twin = pickle.loads(pickle.dumps(graph))
    assert [float(w) for *_, w in twin.relations] == [float(w) for *_, w in graph.relations]


def test_deep_copy_of_learned_weights_stays_learnable() -> None:
    weights = torch.full((4,), 1.0, dtype=torch.float64, requires_grad=True)
    twin = copy.deepcopy(ws.PixelGraph.grid(4, 4, 1, weight=weights))
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value = ws.Wasserstein(twin, scale="paper").cometric(x).quad(x**2)
    assert value.requires_grad
    value.sum().backward()
    assert weights.grad is None, "a deep copy shares nothing with the original"


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("neighborhood", ["square", "disk"])
def test_learned_weights_are_followed_when_an_optimizer_changes_them(neighborhood: str, gradients: bool) -> None:
    """An optimizer writes into the tensor. Nothing cached before the step may be used after it."""
    case = OperatorCase(weight="tensor", radius=2, neighborhood=neighborhood, scale="paper")
    x, v = case.images(), case.covectors()
    weights = torch.nn.Parameter(case.weight_tensor())
    graph = case.graph(weights)

    def answers(g: ws.PixelGraph) -> list[torch.Tensor]:
        cometric = ws.Wasserstein(g, scale="paper").cometric(x)
        sample = cometric.sample(generator=torch.Generator().manual_seed(0))
        return [cometric.quad(v), cometric.mv(v), cometric.diagonal(), cometric.as_matrix(), sample, g.node_volumes]

    with torch.set_grad_enabled(gradients):
        answers(graph)
        with torch.no_grad():
            weights.mul_(torch.linspace(0.5, 3.0, len(weights)))
        for actual, expected in zip(answers(graph), answers(case.graph(weights.detach().clone())), strict=True):
            assert_matches(actual, expected, 1e-10)


def test_weights_that_are_frozen_and_unfrozen_are_followed() -> None:
    """Learned, frozen and used, then learned again and frozen: also a shallow copy that was made in between."""
    case = OperatorCase(weight="tensor", radius=2, scale="paper")
    x, v = case.images(), case.covectors()
    weights = torch.nn.Parameter(case.weight_tensor())
    graph = case.graph(weights)
    weights.requires_grad_(False)
    twin, before = copy.copy(graph), ws.Wasserstein(graph).cometric(x).quad(v)
    weights.requires_grad_(True)
    with torch.no_grad():
        weights[0] = 50.0
    weights.requires_grad_(False)
    for method in ("quad", "mv"):
        expected, actual = (
            getattr(ws.Wasserstein(g).cometric(x), method)(v) for g in (case.graph(weights.detach().clone()), graph)
        )
        assert_matches(actual, expected, 1e-12)
    assert_matches(graph.node_volumes, case.graph(weights.detach().clone()).node_volumes, 1e-12)
    assert_matches(ws.Wasserstein(twin).cometric(x).quad(v), before, 1e-12)
    assert twin.relations[0][2] != 50.0


def test_weights_that_are_learned_only_after_the_graph_was_built() -> None:
    case = OperatorCase(weight="tensor", radius=2)
    x, v = case.images(), case.covectors()
    graph, expected = case.graph(), case.graph(case.weight_tensor().requires_grad_())
    ws.Wasserstein(graph).cometric(x).quad(v)
    graph.weights.requires_grad_()
    for g in (graph, expected):
        ws.Wasserstein(g).cometric(x).quad(v).sum().backward()
    assert_matches(graph.weights.grad, expected.weights.grad, 1e-12)


@pytest.mark.parametrize("made_inside", [False, True], ids=["made before", "made inside"])
@pytest.mark.parametrize("weight", ["constant", "gaussian", "function", "tensor"])
def test_a_graph_used_in_inference_mode_can_be_differentiated_afterwards(weight: str, made_inside: bool, device: str) -> None:
    case = OperatorCase(weight=weight, radius=2)
    metric = case.metric()

    def total(x: torch.Tensor) -> torch.Tensor:
        cometric = metric.cometric(x)
        sample = cometric.sample(generator=torch.Generator().manual_seed(0))
        return cometric.diagonal().sum() + sample.square().sum() + cometric.quad(x**2).sum()

    with torch.inference_mode():
        metric = case.metric() if made_inside else metric
        total(case.images(device=device))
    x = case.images(device=device).requires_grad_()
    total(x).backward()
    seen, metric = x.grad, case.metric()
    x.grad = None
    total(x).backward()
    assert_matches(seen, x.grad, 1e-12)


def test_what_is_kept_for_a_device_works_in_every_mode() -> None:
    cache: DeviceCache[torch.Tensor] = DeviceCache()
    like = torch.ones(2)
    with torch.inference_mode():
        kept = cache.get(like, lambda: torch.arange(3.0), "key")
    assert not kept.is_inference()
    assert cache.get(like, lambda: torch.zeros(3), "key") is kept
    assert cache.get(like.to("meta"), lambda: torch.zeros(3), "key") is not kept
    make_fx(lambda x: x + cache.get(x, lambda: torch.zeros(2), "traced"))(like)  # what a tracer saw belongs to its graph
    assert torch.equal(cache.get(like, lambda: torch.ones(2), "traced"), torch.ones(2))


@pytest.mark.parametrize("value", [-0.25, 0.0, float("nan")])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_an_optimizer_has_made_negative_are_refused(value: float, frozen: bool) -> None:
    weights = torch.nn.Parameter(torch.ones(4))
    metric, x = ws.Wasserstein(ws.PixelGraph.grid(4, 4, 1, weight=weights)), torch.rand(1, 1, 4, 4)
    with torch.no_grad():
        weights[2] = value
    weights.requires_grad_(not frozen)
    for ask in (metric.cometric, metric.check_images):
        with pytest.raises(ValueError, match=rf"weight must be positive and finite; got .*{value:g}; .*\.exp\(\)"):
            ask(x)


def test_a_tensor_that_is_not_learned_is_copied() -> None:
    """A graph is immutable, also when the tensor it was made from is not."""
    case = OperatorCase(weight="tensor", radius=2)
    x, weights = case.images(), case.weight_tensor()
    graph = case.graph(weights)
    relations, matrix = graph.relations, ws.Wasserstein(graph).cometric(x).as_matrix()
    weights[0] = 50.0
    assert graph.relations == relations
    assert_matches(ws.Wasserstein(graph).cometric(x).as_matrix(), matrix, 1e-14)


# The same matrix as every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighborhood", ["square", "disk"])
@pytest.mark.parametrize("radius", [1, 2, 7])
@pytest.mark.parametrize("named", ["constant", "gaussian"])
def test_named_weights_are_the_same_operator_as_function_and_tensor(named: str, radius: int, neighborhood: str) -> None:
    case = OperatorCase(radius=radius, neighborhood=neighborhood, weight=named, height=5, width=6)
    function = case.weight_function()
    graph = case.graph()
    tensor = torch.tensor([function(dy, dx) for dy, dx, _ in graph.relations], dtype=torch.float64)
    x = case.images()
    matrices = [
        ws.Wasserstein(case.graph(weight)).cometric(x).as_matrix()
        for weight in (named, lambda dy, dx: function(dy, dx), tensor)
    ]
    assert_matches(matrices[1], matrices[0], 1e-12)
    assert_matches(matrices[2], matrices[0], 1e-12)


@pytest.mark.parametrize(("height", "width", "radius"), [(70, 45, 5), (3, 40, 6), (40, 2, 3), (33, 33, 1)])
def test_disks_are_summed_as_by_a_loop_over_their_relations(height: int, width: int, radius: int) -> None:
    """Over several tiles, and where the image is narrower than the disk."""
    draw = torch.Generator().manual_seed(0)
    u, v = (torch.rand(2, 1, height, width, dtype=torch.float64, generator=draw) for _ in range(2))
    graph = ws.PixelGraph.grid(height, width, radius, neighborhood="disk")
    assert isinstance(graph.stencil, Disk)
    assert_matches(graph.neighbor_sum(u), relation_sum(graph.weighted_relations(u), u), 1e-12)
    assert_matches(laplacian_maps.apply(graph, u, v), laplacian_maps.apply_by_edges(graph, u, v), 1e-12)
    assert_matches(laplacian_maps.carre_du_champ(graph, u, v), laplacian_maps.carre_du_champ_by_edges(graph, u, v), 1e-12)


@pytest.mark.parametrize("kind", ["function", "tensor", "disk", "learned"])
def test_tables_of_weights_are_summed_as_by_a_loop_over_their_relations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large fields are summed without a convolution, part by part, unless something must be differentiated."""
    weights = torch.rand(112) + 0.1
    given = {"weight": "gaussian" if kind == "disk" else oracles.lopsided_weight if kind == "function" else weights}
    graph = ws.PixelGraph.grid(60, 50, 7, "disk" if kind == "disk" else "square", **given)  # type: ignore[arg-type]
    if kind == "learned":
        graph = ws.PixelGraph.grid(60, 50, 7, weight=weights.requires_grad_())
    field, probe = torch.randn(2, 35, 2, 60, 50, dtype=torch.float64).unbind()

    def expected(values: torch.Tensor) -> torch.Tensor:
        return relation_sum(graph.weighted_relations(values), values)

    with torch.no_grad():
        monkeypatch.setattr(F, "conv2d", None)
        assert_matches(graph.neighbor_sum(field), expected(field), 1e-13)
        assert_matches(graph.neighbor_sum(field.float()), expected(field), 1e-7)
        monkeypatch.undo()
        assert len(make_fx(lambda values: graph.neighbor_sum(values))(field).graph.nodes) < 100  # not one for every neighbor
        assert_matches(torch.vmap(graph.neighbor_sum)(field), expected(field), 1e-13)
    if kind != "learned":
        _, tangent = torch.func.jvp(graph.neighbor_sum, (field,), (probe,))
        assert_matches(tangent, expected(probe), 1e-13)
        (gradient,) = torch.autograd.grad((graph.neighbor_sum(field.requires_grad_()) * probe).sum(), field)
        assert_matches(gradient, expected(probe), 1e-13)


def test_square_and_disk_are_the_same_operator_when_they_cover_the_image() -> None:
    x = torch.rand(2, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    square, disk = (
        ws.Wasserstein(ws.PixelGraph.grid(3, 4, 6, neighborhood=kind)).cometric(x).as_matrix() for kind in ("square", "disk")
    )
    assert_matches(square, disk, 1e-12)


def test_common_factor_of_the_weights_cancels_in_unit_scale_and_stays_in_paper_scale() -> None:
    """u = x/s loses a factor of omega, and omega u gets it back: L/S is invariant. S and L_paper grow with it."""
    x = torch.rand(1, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small, large = (
        ws.PixelGraph.grid(4, 5, 2, weight=lambda dy, dx, c=c: c * oracles.lopsided_weight(dy, dx)) for c in (1.0, 7.0)
    )
    unit = [ws.Wasserstein(graph).cometric(x).as_matrix() for graph in (small, large)]
    paper = [ws.Wasserstein(graph, scale="paper").cometric(x).as_matrix() for graph in (small, large)]
    assert_matches(unit[1], unit[0], 1e-12)
    assert_matches(paper[1], 7 * paper[0], 1e-12)


def test_a_graph_with_computed_weights_can_be_copied() -> None:
    """torch refuses to copy a tensor that has a history; an immutable graph may share it."""
    log_weights = torch.zeros(12, requires_grad=True)
    graph = ws.PixelGraph.grid(6, 6, radius=2, weight=log_weights.exp())
    copied = copy.deepcopy(ws.Wasserstein(graph)).graph
    assert copied.weights is graph.weights
    leaf = ws.PixelGraph.grid(6, 6, radius=2, weight=torch.ones(12, requires_grad=True))
    assert copy.deepcopy(leaf).weights is not leaf.weights


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-38, 3.0, 1e38, 1e200, 1e300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("learned", [False, True])
def test_unit_scale_does_not_depend_on_the_size_of_the_weights(size: float, dtype: torch.dtype, learned: bool) -> None:
    case = OperatorCase(radius=2, weight="tensor", mass=0.2)
    x, v, weights = case.images(dtype), case.covectors(dtype), case.weight_tensor()

    def results(weights: torch.Tensor) -> list[torch.Tensor]:
        graph = case.graph(weights)
        L = case.metric(weights).cometric(x)
        generator = torch.Generator().manual_seed(0)
        drift = ws.calculus.beltrami_drift(x, case.metric(weights))
        made = [L.mv(v), L.quad(v), L.diagonal(), L.as_matrix(), L.sample(generator), L.solve(v), L.logdet(), drift]
        return [*made, graph.node_volumes, L.kappa(v)]

    for scaled, plain in zip(results((size * weights).requires_grad_(learned)), results(weights), strict=True):
        assert_matches(scaled, plain, 1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("size", [1e-200, 1e-38, 1e38, 1e200])
def test_paper_scale_is_linear_in_the_weights_and_both_scales_have_their_derivatives(size: float) -> None:
    for scale, degree in (("paper", 1), ("unit", 0)):
        case = OperatorCase(radius=2, weight="tensor", scale=scale, batch=1)
        x, v, slopes = case.images(), case.covectors(), []
        for factor in (1.0, size):
            weights = (factor * case.weight_tensor()).requires_grad_()
            quad = case.metric(weights).cometric(x).quad(v) / factor**degree
            quad.backward()
            slopes.append((quad.detach(), weights.grad * factor))
        assert_matches(slopes[1][0], slopes[0][0], 1e-12)
        assert_matches(slopes[1][1], slopes[0][1], 1e-11)


@pytest.mark.parametrize("size", [1e-200, 1e38, 1e300])
@pytest.mark.parametrize("learned", [False, True])
def test_paper_scale_refuses_weights_with_which_it_is_no_number(size: float, learned: bool) -> None:
    case = OperatorCase(radius=2, weight="tensor", scale="paper")
    metric = case.metric((size * case.weight_tensor()).requires_grad_(learned))
    with pytest.raises(ValueError, match=r"must be within the range of torch.float32; got entries of about .*; use"):
        metric.cometric(case.images(torch.float32))
    assert bool(torch.isfinite(metric.cometric(case.images(torch.float64)).mv(case.covectors(torch.float64))).all())


def test_a_weight_that_is_not_a_number_is_the_one_that_the_error_shows() -> None:
    for bad in (float("inf"), float("nan"), -2.0, 0.0):
        with pytest.raises(ValueError, match=rf"weight must be positive and finite; got {bad:g};"):
            ws.PixelGraph.grid(2, 3, 1, weight=lambda dy, dx, bad=bad: bad if dx < 0 else 1.0)


def test_a_weight_function_that_fails_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^weight must be a function \(dx\) -> float of whole numbers; got Linear, whose call failed"
    ):
        ws.PixelGraph.line(4, weight=torch.nn.Linear(2, 2))
