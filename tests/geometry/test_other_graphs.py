"""Lines, volumes and lists of edges: real examples, learning, attacks, certificates, and bad input. The laws of all operators
run over these graphs too (operator_case.py)."""

import copy
import pickle

import numpy as np
import pytest
import scipy.spatial
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches, to_numpy
from tests.operator_case import OperatorCase, over

OTHERS = [
    OperatorCase(layout="line", width=12, radius=2, channels=2, mass=0.1, batch=4),
    OperatorCase(layout="volume", height=3, width=4, channels=2, batch=4),
    OperatorCase(layout="edges", height=3, width=4, weight="tensor", batch=4),
    OperatorCase(layout="islands", height=3, width=4, weight="tensor", batch=4),
]


def electrocardiograms(count: int, length: int) -> Tensor:
    """Signals in [0, 1] with a tall peak per beat at a random phase, and a slow wave. # shape: (count, 1, length)"""
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(length, dtype=torch.float64)
    phase = 40 * torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    beat = (time - phase) % 40 - 20
    return 0.1 + 0.6 * torch.exp(-(beat**2) / 4) + 0.2 * torch.exp(-((beat - 8) ** 2) / 20)


def mesh(points: int) -> Tensor:
    """The edges of a triangulation of random points. # shape: (E, 2)"""
    triangles = scipy.spatial.Delaunay(np.random.default_rng(0).random((points, 2))).simplices
    sides = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [0, 2]]])
    return torch.tensor(np.unique(np.sort(sides, 1), axis=0))


def superpixels(labels: Tensor) -> Tensor:
    """Which regions of a label image touch. # shape: (H, W) -> (E, 2)"""
    pairs = torch.cat(
        [torch.stack(ends, -1).reshape(-1, 2) for ends in ((labels[:-1], labels[1:]), (labels[:, :-1], labels[:, 1:]))]
    )
    return torch.unique(pairs[pairs[:, 0] != pairs[:, 1]].sort(1).values, dim=0)


class TestExamples:
    def test_a_shift_of_a_smooth_signal_costs_its_square_times_the_mass(self, device: str) -> None:
        """In pixel scale, with L at the midpoint (docs/maths.md, section 7)."""
        time = torch.arange(200.0, dtype=torch.float64, device=device)
        before, after = (torch.exp(-((time - center) ** 2) / 128)[None, None] for center in (99.75, 100.25))
        for radius in (1, 3):
            metric = ws.Wasserstein(ws.PixelGraph.line(200, radius), scale="pixels")
            cost = metric.cometric((before + after) / 2 + 1e-9).norm_sq(after - before)
            assert_each_matches(cost / before.sum(), torch.tensor([0.25]), 2e-3)

    def test_a_shift_of_a_smooth_volume(self, device: str) -> None:
        axis = torch.arange(16.0, dtype=torch.float64, device=device) - 7.5
        z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
        before, after = (torch.exp(-(z**2 + y**2 + (x - h) ** 2) / 12.5)[None, None] for h in (-0.1, 0.1))
        metric = ws.Wasserstein(ws.PixelGraph.volume(16, 16, 16, 1), scale="pixels")
        cost = metric.cometric((before + after) / 2).norm_sq(after - before - (after - before).mean())
        assert_each_matches(cost / before.sum(), torch.tensor([0.04]), 0.03)

    def test_electrocardiograms(self, device: str) -> None:
        signals = electrocardiograms(4, 120).to(device)
        cometric = ws.Wasserstein(ws.PixelGraph.line(120, 4)).cometric(signals)
        xi = 0.1 * cometric.sample(torch.Generator(device=device).manual_seed(0))
        assert_matches(xi.sum(2), torch.zeros(4, 1), 1e-12, unit=float(xi.abs().sum()))
        assert_each_matches(cometric.quad(cometric.solve(xi)), cometric.norm_sq(xi), 1e-8)

    def test_on_a_tree_the_flow_is_the_sum_beyond_an_edge(self, device: str) -> None:
        """A path: |d|^2 = sum F^2 / c with F the cumulative sums of d."""
        x = torch.rand(1, 1, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device) + 0.1
        cometric = ws.Wasserstein(ws.PixelGraph.from_edges(30, torch.tensor([[i, i + 1] for i in range(29)]))).cometric(x)
        d = cometric.sample(torch.Generator(device=device).manual_seed(1))
        conductance = (cometric.u[0, 0, 0, 1:] + cometric.u[0, 0, 0, :-1]) / 2
        flow = d.cumsum(2)[0, 0, :-1]
        assert_each_matches(cometric.norm_sq(d), (flow**2 / conductance).sum()[None], 1e-10)
        line = ws.Wasserstein(ws.PixelGraph.line(30, 1)).cometric(x)
        assert_each_matches(line.norm_sq(d), cometric.norm_sq(d), 1e-10)

    @pytest.mark.parametrize("kind", ["mesh", "superpixels"])
    def test_meshes_and_superpixels(self, kind: str, device: str) -> None:
        rows, columns = torch.meshgrid(torch.arange(20), torch.arange(24), indexing="ij")
        edges = mesh(50) if kind == "mesh" else superpixels(rows // 4 * 6 + columns // 4)
        nodes = int(edges.max()) + 1
        x = torch.rand(3, 2, nodes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device) + 0.05
        metric = ws.Wasserstein(ws.PixelGraph.from_edges(nodes, edges, 0.5 + torch.rand(len(edges), dtype=torch.float64)))
        cometric, v = metric.cometric(x), torch.randn(3, 2, nodes, dtype=torch.float64, device=device)
        assert_matches(cometric.solve(cometric.mv(v)), v - v.mean(2, keepdim=True), 1e-8)
        assert_matches(cometric.mv(v).flatten(1), (cometric.as_matrix() @ v.flatten(1)[..., None])[..., 0], 1e-12)

    def test_nodes_may_be_renumbered(self, device: str) -> None:
        case = OTHERS[2]
        x, v = case.images(device=device), case.covectors(device=device)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        edges = order.argsort()[torch.tensor(case.edge_list())]
        other = ws.Wasserstein(ws.PixelGraph.from_edges(12, edges, case.weight_tensor()))
        assert_matches(other.cometric(x[..., order]).mv(v[..., order]), case.metric().cometric(x).mv(v)[..., order], 1e-12)

    def test_a_grid_as_a_list_of_edges(self, device: str) -> None:
        case = OperatorCase(radius=2, weight="gaussian")
        index, pairs, weights = torch.arange(20).reshape(4, 5), [], []
        for dy, dx, w in case.graph().relations:
            for row in range(4 - int(dy)):
                for column in range(max(0, -int(dx)), 5 - max(0, int(dx))):
                    pairs.append([int(index[row, column]), int(index[row + int(dy), column + int(dx)])])
                    weights.append(w)
        graph = ws.PixelGraph.from_edges(20, torch.tensor(pairs), torch.tensor(weights, dtype=torch.float64))
        x, v = case.images(device=device), case.covectors(device=device)
        listed = ws.Wasserstein(graph).cometric(x.flatten(2)).mv(v.flatten(2))
        assert_matches(listed.reshape(x.shape), case.metric().cometric(x).mv(v), 1e-12)


@over(OTHERS)
class TestEverywhere:
    def model(self, case: OperatorCase, device: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(case.size, 8), nn.SiLU(), nn.Linear(8, 3)).double().to(device)

    def batch(self, case: OperatorCase, device: str) -> tuple[Tensor, Tensor]:
        return case.images(device=device), torch.tensor([0, 1, 2, 0], device=device)

    def test_penalty_noise_and_fast_gradients(self, case: OperatorCase, device: str) -> None:
        model, (images, labels) = self.model(case, device), self.batch(case, device)
        x = images.clone().requires_grad_()
        g = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels, reduction="sum"), x)[0]
        flat = to_numpy(g.flatten(1))
        expected = 0.25 * np.mean(np.einsum("bi,bij,bj->b", flat, case.matrices(images), flat))
        metric = case.metric()
        for engine in ("double_backward", "forward_mode", "finite_difference"):
            penalty = float(ws.GradientPenalty(metric, 0.5, engine=engine)(model, images, labels).penalty.detach())  # type: ignore[arg-type]
            assert penalty == pytest.approx(float(expected), rel=1e-4 if engine == "finite_difference" else 1e-9)
        for objective in (
            ws.GradientPenalty(metric, 0.5),
            ws.GradientPenalty(metric, 0.5, power=1),
            ws.NoisyInputs(metric, 0.1),
            ws.GradientPenalty(ws.Euclidean(), 0.5),
            ws.Plain(),
        ):
            twin = copy.deepcopy(model)
            terms = objective(twin, images, labels, torch.Generator(device=device).manual_seed(0))
            terms.total.backward()
            ws.FastGradients(objective, model, compile=False)(images, labels, torch.Generator(device=device).manual_seed(0))
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert mine.grad is not None
                assert theirs.grad is not None
                assert_matches(mine.grad, theirs.grad, 1e-8)

    def test_tikhonov(self, case: OperatorCase, device: str) -> None:
        model, (images, labels) = self.model(case, device), self.batch(case, device)
        terms = ws.Tikhonov(case.metric(), 0.1, probes=None)(model, images, labels)  # type: ignore[arg-type]
        laplacian = ws.calculus.laplacian(
            lambda x: nn.functional.cross_entropy(model(x), labels, reduction="none"), images, case.metric()
        )
        assert float(terms.penalty.detach()) == pytest.approx(0.005 * float(laplacian.mean()), rel=1e-9)

    @pytest.mark.parametrize("iterations", [1, 5])
    def test_attacks_stay_in_the_box_and_in_the_ball_and_conserve_mass(
        self, case: OperatorCase, iterations: int, device: str
    ) -> None:
        model, (images, labels) = self.model(case, device), self.batch(case, device)
        metric, epsilon = case.metric(), 0.2
        assert isinstance(metric, ws.Wasserstein)
        attacked = ws.attacks.WassersteinPGD(metric, epsilon, iterations)(model, images, labels)
        assert attacked.shape == images.shape
        assert float(attacked.min()) >= 0
        assert float(attacked.max()) <= 1
        cometric = metric.cometric(images)
        xi = attacked - images
        if not case.mass:
            assert_matches(xi.flatten(2).sum(2), torch.zeros(case.batch, case.channels), 1e-9, unit=1.0)
        assert (cometric.norm_sq(xi) <= epsilon**2 * (1 + 1e-9)).all()
        losses = [nn.functional.cross_entropy(model(x), labels, reduction="none") for x in (images, attacked)]
        assert (losses[1] > losses[0]).all()
        closed = ws.attacks.WassersteinFGSM(metric, epsilon, limited=False)(model, images, labels)
        assert_each_matches(cometric.norm_sq(closed - images), torch.full((case.batch,), epsilon**2), 1e-6)

    def test_certificates(self, case: OperatorCase, device: str) -> None:
        model, (images, _) = self.model(case, device).eval(), self.batch(case, device)
        metric = ws.Wasserstein(case.graph(), reference="ones")
        found = ws.certify(model, images, metric, 0.1, samples=50, generator=torch.Generator(device=device).manual_seed(0))
        assert found.radii.shape == (case.batch,)
        if case.layout == "line":
            assert (found.w1() >= 0).all()
        else:
            with pytest.raises(ValueError, match="for pictures and signals; got PixelGraph"):
                found.w1()

    def test_graphs_are_values(self, case: OperatorCase, device: str) -> None:
        graph = case.graph()
        for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            assert twin == graph
            assert hash(twin) == hash(graph)
            assert repr(twin) == repr(graph)
        assert graph != replace_weights(graph)
        assert f"PixelGraph.{ {'line': 'line', 'volume': 'volume'}.get(case.layout, 'from_edges') }(" in repr(graph)

    def test_what_is_about_pictures_says_so(self, case: OperatorCase, device: str) -> None:
        model, (images, labels) = self.model(case, device).eval(), self.batch(case, device)
        for call in (
            lambda: ws.evaluate(model, images, labels),
            lambda: ws.variations.translate(images, 1),
            lambda: ws.variations.elastic(images, 1.0),
            lambda: ws.attacks.PGD(0.1, 0.05, 2)(model, images, labels),
        ):
            with pytest.raises(ValueError, match=r"images must have shape \(B, C, H, W\); got"):
                call()


def replace_weights(graph: ws.PixelGraph) -> ws.PixelGraph:
    return ws.PixelGraph(graph.shape, graph.radius, graph.neighborhood, 2 * graph.weights, "tensor", graph.edges)


def test_learned_weights_of_edges_follow_the_optimizer(device: str) -> None:
    case = OperatorCase(layout="edges", height=2, width=4, weight="tensor")
    weights = case.weight_tensor().to(device).requires_grad_()
    metric = ws.Wasserstein(ws.PixelGraph.from_edges(8, torch.tensor(case.edge_list()), weights), mass=0.1)
    x, xi = case.images(device=device), case.covectors(device=device)
    before = metric.cometric(x).log_prob(xi).mean()
    before.backward()
    assert weights.grad is not None
    with torch.no_grad():
        weights += 1e-3 * weights.grad / weights.grad.norm()
    assert metric.cometric(x).log_prob(xi).mean() > before


@pytest.mark.parametrize("value", [-0.25, float("nan")])
def test_weights_of_edges_that_an_optimizer_has_made_negative_are_refused(value: float) -> None:
    weights = torch.ones(3, requires_grad=True)
    metric = ws.Wasserstein(ws.PixelGraph.from_edges(4, EDGES, weights))
    with torch.no_grad():
        weights[1] = value
    with pytest.raises(ValueError, match=rf"weights must be positive and finite; got {value:g}; .* leave the edge out of the"):
        metric.cometric(torch.rand(1, 1, 4))


EDGES = torch.tensor([[0, 1], [1, 2], [2, 3]])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: ws.PixelGraph.from_edges(3, EDGES),
            r"edges must join nodes from 0 to 2; got \(2, 3\); count from 0, or raise",
        ),
        (lambda: ws.PixelGraph.from_edges(5, EDGES), r"every node must have a neighbor; got node 4 without an edge"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES - 1), r"from 0 to 3; got \(-1, 0\)"),
        (lambda: ws.PixelGraph.from_edges(4, torch.cat((EDGES, torch.tensor([[2, 2]])))), r"two different nodes; got \(2, 2\)"),
        (
            lambda: ws.PixelGraph.from_edges(4, torch.cat((EDGES, EDGES[1:2].flip(1)))),
            r"each pair once.*got \(1, 2\) more than",
        ),
        (lambda: ws.PixelGraph.from_edges(4, torch.cat((EDGES, EDGES.flip(1)))), r"got every pair in both directions; keep"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES.T), r"shape \(E, 2\), .*; got shape \(2, 3\); transpose it with edges.T"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES.double()), r"got torch.float64; convert with .long"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES.tolist()), r"got list; convert with torch.as_tensor"),  # type: ignore[arg-type]
        (lambda: ws.PixelGraph.from_edges(4, EDGES[:0]), r"got no edges for 4 nodes"),
        (lambda: ws.PixelGraph.from_edges(0, EDGES), r"nodes must be an integer of at least 1"),
        (
            lambda: ws.PixelGraph.from_edges(4, EDGES, torch.tensor([1.0, 0.0, 1.0])),
            r"weights must be positive .*got 0; .* edge",
        ),
        (lambda: ws.PixelGraph.from_edges(4, EDGES, torch.tensor([1.0, -2.0, 1.0])), r"weights must be positive .*got -2"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES, torch.tensor([1.0, float("nan"), 1.0])), r"weights must be .*got nan"),
        (
            lambda: ws.PixelGraph.from_edges(4, EDGES, torch.ones(4)),
            r"one weight per edge, shape \(3,\); got \(4,\) .*; give one for each edge",
        ),
        (lambda: ws.PixelGraph.from_edges(4, EDGES, torch.ones(3, 1)), r"got \(3, 1\) of torch.float32; convert with .flatten"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES, torch.tensor([1, 2, 1])), r"of torch.int64; convert with .float"),
        (lambda: ws.PixelGraph.from_edges(4, EDGES, [1, 1, 1]), r"weights must be a tensor"),  # type: ignore[arg-type]
        (lambda: ws.PixelGraph.line(1), r"every pixel must have a neighbor; got an image of 1"),
        (lambda: ws.PixelGraph.line(5, 0), r"radius must be an integer of at least 1"),
        (lambda: ws.PixelGraph.line(5, 2, lambda dy, dx: 1.0), r"weight must be a function \(dx\) -> float"),
        (lambda: ws.PixelGraph.volume(1, 1, 1), r"got an image of 1x1x1"),
        (lambda: ws.PixelGraph.volume(2, 0, 2), r"height must be an integer"),
        (lambda: ws.PixelGraph.volume(2, 2, 2, weight=torch.ones(3)), r"one weight per relation, shape \(13,\)"),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.line(5)).cometric(torch.rand(1, 1, 6)),
            r"must be 5 pixels, the size of the graph; got 6; use PixelGraph.line\(6, radius\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.line(5)).cometric(torch.rand(1, 1, 4, 3)),
            r"must have shape \(B, C, L\); got \(1, 1, 4, 3\); use PixelGraph.grid\(4, 3, radius\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.grid(4, 5)).cometric(torch.rand(1, 1, 6)),
            r"\(B, C, H, W\); got \(1, 1, 6\); add the missing dimension, .* channels, or use PixelGraph.line\(6, radius\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.volume(2, 3, 4)).cometric(torch.rand(1, 1, 6)),
            r"must have shape \(B, C, D, H, W\); got \(1, 1, 6\); use PixelGraph.line\(6, radius\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.line(5)).cometric(torch.rand(1, 1, 2, 3, 5)),
            r"must have shape \(B, C, L\); got \(1, 1, 2, 3, 5\); use PixelGraph.volume\(2, 3, 5, radius\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.from_edges(4, EDGES)).cometric(torch.rand(1, 1, 2, 2)),
            r"must have shape \(B, C, N\); got \(1, 1, 2, 2\); flatten the nodes with .flatten\(2\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.volume(2, 3, 4)).cometric(torch.rand(1, 1, 2, 3, 5)),
            r"must be 2x3x4 pixels, .*; got 2x3x5; use PixelGraph.volume\(2, 3, 5, radius\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.volume(2, 3, 4)).cometric(torch.rand(1, 2, 3, 4, 1)),
            r"got 3x4x1; move the channels forward with .permute\(0, 4, 1, 2, 3\)",
        ),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.from_edges(4, EDGES)).cometric(torch.rand(1, 1, 5)),
            r"must be 4 pixels, the size of the graph; got 5; use PixelGraph.from_edges\(5, edges\)",
        ),
        (lambda: ws.Wasserstein(ws.PixelGraph.line(5)).cometric(torch.rand(5)), r"must have shape \(B, C, L\); got \(5,\)"),
        (lambda: ws.Wasserstein(ws.PixelGraph.from_edges(4, EDGES), scale="pixels"), r"needs a grid, whose edges have lengths"),
        (
            lambda: ws.Wasserstein(ws.PixelGraph.line(5), reference=torch.ones(5)),
            r"reference must be one image, \(C, L\), or .ones.; got \(5,\)",
        ),
        (lambda: ws.Plain()(nn.Flatten(), torch.rand(3, 4, 5), torch.tensor([0, 1])), r"\(B, C, H, W\); got \(3, 4, 5\); add"),
    ],
)
def test_bad_input_is_one_line(make: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
