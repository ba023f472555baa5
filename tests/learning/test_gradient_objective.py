"""Functions of input gradients: critics, implicit surfaces, energies and forces; eager, compiled, and central differences."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import along, differences, flat, gradients_of
from tests.learning.steps import assert_same_step, eager, traced
from tests.learning.zoo import batch, make, smooth_net
from tests.robustness.small_models import Around
from wassersmooth import Euclidean, FastGradients, GradientObjective, GradientPenalty, PixelGraph, Wasserstein
from wassersmooth._checks import NotFiniteError
from wassersmooth._torch_internals import pytree
from wassersmooth.learning.compiled import prepared_step


def per_row(values):
    return values.flatten(1).sum(1)


class Critic(nn.Module):
    """A small convolutional critic with one score per image."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Linear(36, 1)

    def forward(self, x):
        return self.last(F.silu(self.second(self.first(x))).flatten(1))


class Surface(nn.Module):
    """A coordinate network: points to signed distances."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Softplus(10), nn.Linear(16, 16), nn.Softplus(10), nn.Linear(16, 1))

    def forward(self, points):
        return self.layers(points)


class PairPotential(nn.Module):
    """The energy of a molecule: a learned function of all distances, times the product of the charges of its species."""

    def __init__(self):
        super().__init__()
        self.charges = nn.Embedding(3, 4)
        self.radial = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, positions, species, mask):
        distances = torch.cdist(positions, positions)
        charges = self.charges(species)
        pairs = torch.einsum("bif,bjf,bijf->bij", charges, charges, self.radial(distances[..., None]))
        atoms = positions.shape[1]
        others = mask[:, None] & mask[:, :, None] & ~torch.eye(atoms, dtype=torch.bool, device=positions.device)
        return (pairs * others).sum((1, 2))


def with_gaps(tensor):
    """The same values, where every other place in memory belongs to something else."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def first_output(outputs, labels):
    return outputs[:, 0]


def r1(g, inputs, labels, outputs):
    """Half the squared gradient, at real images only."""
    return labels * 5 * per_row(g.square())


def critic_loss(outputs, labels):
    return F.softplus(torch.where(labels > 0, -outputs[:, 0], outputs[:, 0]))


def one_lipschitz(g, inputs, labels, outputs):
    return 10 * ((per_row(g.square()) + 1e-12).sqrt() - 1).square()


def eikonal(g, inputs, labels, outputs):
    return 0.1 * (g.norm(dim=1) - 1).square() + outputs[:, 0].abs() * (g * labels).sum(1)


def squared_distance(outputs, labels):
    return outputs[:, 0].square()


def energy(outputs, labels):
    return outputs


def energy_error(outputs, labels):
    return (outputs - labels["energy"]).square()


def force_error(g, inputs, labels, outputs):
    mask = inputs[2]
    return ((-g - labels["forces"]).square().sum(2) * mask).sum(1) / mask.sum(1)


def relative_to_outputs(g, inputs, labels, outputs):
    """Depends on everything."""
    return per_row((g * inputs).square()) / (1 + outputs.square().sum(1)) + (labels % 2) * outputs[:, 0] * per_row(g)


def random(*shape, seed=0, low=0.0):
    return low + torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    model: Any
    objective: dict
    inputs: Any
    labels: Any


def cases() -> dict[str, Case]:
    images, labels = batch(5)
    species = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2], [2, 0, 0, 1]])
    mask = torch.tensor([[True] * 4, [True] * 4, [True, True, True, False]])
    molecules = {"energy": random(3, seed=1), "forces": random(3, 4, 3, seed=2)}
    return {
        "R1 critic": Case(Critic, dict(penalty=r1, of=first_output, loss=critic_loss), images - 0.5, (labels > 0).double()),
        "WGAN-GP": Case(Critic, dict(penalty=one_lipschitz, of=first_output, loss=None), images, None),
        "eikonal": Case(
            Surface, dict(penalty=eikonal, of=first_output, loss=squared_distance), random(7, 3, low=-0.5), random(7, 3, seed=3)
        ),
        "energies and forces": Case(
            PairPotential,
            dict(penalty=force_error, of=energy, loss=energy_error),
            (3 * random(3, 4, 3), species, mask),
            molecules,
        ),
        "gradient of the loss": Case(lambda: make("batch_norm_train"), dict(penalty=relative_to_outputs), images, labels),
    }


CASES = cases()


def on(device, value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def setting(name, device, **changes):
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model().double().to(device)
    return model, GradientObjective(**case.objective | changes), on(device, case.inputs), on(device, case.labels)


def total_by_hand(name, model, inputs, labels):
    """The definition: one gradient in the inputs, without our engines."""
    case = CASES[name].objective
    model = copy.deepcopy(model)  # batch-norm statistics
    x = (inputs[0] if isinstance(inputs, tuple) else inputs).detach().requires_grad_()
    outputs = model(x, *inputs[1:]) if isinstance(inputs, tuple) else model(x)
    loss = case.get("loss", lambda o, y: F.cross_entropy(o, y, reduction="none"))
    of = case.get("of", loss)
    (g,) = torch.autograd.grad(of(outputs, labels).sum(), x)
    total = case["penalty"](g, inputs, labels, outputs).mean()
    return (total if loss is None else total + loss(outputs, labels).mean()).detach()


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode"])
@pytest.mark.parametrize("name", CASES)
def test_eager_gradients_match_central_differences(name, engine, device):
    model, objective, inputs, labels = setting(name, device, engine=engine)
    parameters = list(model.parameters())
    expected = differences(lambda: total_by_hand(name, model, inputs, labels), parameters)
    terms = objective(copy.deepcopy(model), inputs, labels)
    assert_matches(terms.total, total_by_hand(name, model, inputs, labels), 1e-12)
    assert (terms.loss == 0) == (objective.loss is None)
    assert_matches(along(gradients_of(objective(model, inputs, labels).total, model), parameters), expected, 1e-7)


@pytest.mark.parametrize("name", CASES)
def test_fast_gradients_are_eager_ones(name, device):
    model, objective, inputs, labels = setting(name, device)
    fast, twin = traced(objective, model), copy.deepcopy(model)
    for _ in range(2):
        expected = eager(objective, twin, inputs, labels)
        assert_same_step(fast(inputs, labels), expected, model, twin, 1e-10)


def test_a_gradient_penalty_is_a_special_case(device):
    model, (images, labels) = make("residual_train", device), batch(device=device)
    metric = Wasserstein(PixelGraph.grid(8, 8, radius=2))
    special = GradientObjective(lambda g, x, y, f: 0.7**2 * metric.cometric(x).quad(g))
    for engine in ("double_backward", "forward_mode"):
        one = GradientPenalty(metric, 0.7, engine=engine)(model, images, labels)
        other = special(model, images, labels)
        assert_matches(one.total, other.total, 1e-10)
        assert_matches(flat(gradients_of(one.total, model)), flat(gradients_of(other.total, model)), 1e-9)


@pytest.mark.slow  # half a minute of compiling on a CPU
def test_compiled_as_one_function(device):
    model, objective, inputs, labels = setting("energies and forces", device)
    fast, twin = FastGradients(objective, model, compile=True), copy.deepcopy(model)
    for _ in range(2):
        assert_same_step(fast(inputs, labels), eager(objective, twin, inputs, labels), model, twin, 1e-9)
        inputs, labels = pytree.tree_map(with_gaps, inputs), pytree.tree_map(with_gaps, labels)
    assert "compiled" in repr(fast)


def test_compiled_functions_are_given_tensors_without_gaps(device, monkeypatch):
    """They refuse other strides than those they were compiled for, and a column of a table has strides of its own."""
    strides = []

    def compiled(graph, on_cuda):
        def run(*tensors):
            strides.append([tensor.stride() for tensor in tensors])
            return graph(*tensors)

        return run

    monkeypatch.setattr(prepared_step, "_compiled", compiled)
    model, objective, inputs, labels = setting("energies and forces", device)
    fast = FastGradients(objective, model, compile=True, cuda_graph=False)
    fast(inputs, labels)
    fast(pytree.tree_map(with_gaps, inputs), pytree.tree_map(with_gaps, labels))
    assert all(found == strides[0] for found in strides)


def test_labels_may_be_a_tuple(device):
    model, (images, labels) = smooth_net(device), batch(device=device)

    def loss(outputs, labels):
        return labels[1] * F.cross_entropy(outputs, labels[0], reduction="none")

    objective = GradientObjective(lambda g, x, y, f: y[1] * per_row(g.square()), loss=loss)
    pair, twin = (labels, torch.rand(len(labels), dtype=torch.float64, device=device)), copy.deepcopy(model)
    assert_same_step(traced(objective, model)(images, pair), eager(objective, twin, images, pair), model, twin, 1e-10)


def test_one_tensor_may_be_given_several_times(device):
    """A trace took two arguments that were one object for the same argument, also when they later were not."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x, y):
            return torch.tanh(self.a(x) + self.b(y))

    def loss(outputs, labels):
        return labels["weight"] * per_row((outputs[:, :4] - labels["target"]).square())

    torch.manual_seed(0)
    model, ones = Pair().double().to(device), torch.ones(3, dtype=torch.float64, device=device)
    objective = GradientObjective(lambda g, x, y, f: y["scale"] * per_row(g.square()), loss=loss)
    fast, twin = traced(objective, model), copy.deepcopy(model)
    x, y, target, weight, scale = (torch.rand(3, size, dtype=torch.float64, device=device) for size in (4, 4, 4, 1, 1))
    for inputs, labels in (
        ((x, x), {"target": x, "weight": ones, "scale": ones}),
        ((x, y), {"target": target, "weight": weight[:, 0], "scale": scale[:, 0]}),
    ):
        assert_same_step(fast(inputs, labels), eager(objective, twin, inputs, labels), model, twin, 1e-10)


def test_a_penalty_that_ignores_the_gradient_or_everything(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    for penalty in (lambda g, x, y, f: f.square().sum(1), lambda g, x, y, f: torch.ones_like(f[:, 0])):
        twin = copy.deepcopy(model)
        objective = GradientObjective(penalty)
        assert_same_step(traced(objective, model)(images, labels), eager(objective, twin, images, labels), model, twin, 1e-10)


BAD = [
    (lambda: GradientObjective(3), "penalty must be a function .*; got int"),
    (lambda: GradientObjective(lambda g: g), "penalty must be a function .*, which takes other arguments"),
    (lambda: GradientObjective(r1, of=lambda outputs: outputs), "of must be a function .*, which takes other arguments"),
    (lambda: GradientObjective(r1, of="logits"), "of must be 'loss' or a callable .*; got 'logits'$"),
    (lambda: GradientObjective(r1, of=torch.ones(2, 2)), r"of must be .loss. or a callable .*; got a tensor of shape \(2, 2\)"),
    (lambda: GradientObjective(r1, loss=None), "got 'loss'; without a loss, pass a callable"),
    (lambda: GradientObjective(r1, loss="hinge"), "loss must be one of"),
    (lambda: GradientObjective(r1, engine="finite_difference"), "which are exact; got 'finite_difference'"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_frozen_model_needs_no_comparison():
    """A critic whose parameters are frozen while something else is trained: there are no gradients to compare."""
    images, labels = batch()
    model = smooth_net().requires_grad_(False)
    exact, forward = (GradientObjective(relative_to_outputs, engine=e) for e in ("double_backward", "forward_mode"))
    assert_matches(forward(model, images, labels).total, exact(model, images, labels).total, 1e-10)


def test_bad_batches_are_refused():
    images, labels = batch()
    model, objective = smooth_net(), GradientObjective(relative_to_outputs)
    for call in (objective.__call__, lambda m, x, y: traced(objective, m)(x, y)):
        with pytest.raises(ValueError, match=r"inputs must be a float32 or float64 tensor .*; got torch.int64"):
            call(model, labels, labels)
        with pytest.raises(ValueError, match="inputs must be finite"):
            call(model, images * torch.nan, labels)
        with pytest.raises(ValueError, match="constants besides the inputs must be tensors; got int"):
            call(model, (images, 3), labels)
        with pytest.raises(ValueError, match=r"labels must be None, a tensor, .*; got int in them"):
            call(model, images, {"target": 3})
        with pytest.raises(ValueError, match="labels must be a tensor; got NoneType"):
            call(model, images, None)
    wrong = GradientObjective(lambda g, x, y, f: g.square().sum())
    for call in (wrong.__call__, lambda m, x, y: traced(wrong, m)(x, y)):
        with pytest.raises(
            ValueError, match=r"penalty must return one value per image, shape \(4,\); got shape \(\); sum over"
        ):
            call(model, images, labels)


@pytest.mark.parametrize("fast", [False, True])
def test_a_wrong_of_and_wrong_outputs_are_named(fast):
    (images, labels), two = batch(), Around(smooth_net(), after=lambda z: (z, z))
    for of, model, message in (
        (lambda f, y: f, smooth_net(), r"^of must return one value per image, shape \(4,\); got shape \(4, 3\); average"),
        (lambda f, y: f.gather(1, y), smooth_net(), r"^of cannot take outputs .*; pass labels that it takes, or another of$"),
        (lambda f, y: (f / 0).sum(1), smooth_net(), r"^of must be finite; got"),
        (lambda f, y: f.sum(1), two, r"^the model must return a tensor of outputs; got tuple; pick the logits in a wrapper$"),
    ):
        objective = GradientObjective(lambda g, x, y, f: per_row(g.square()), of=of, loss=None)
        with pytest.raises(ValueError, match=message):
            (traced(objective, model) if fast else partial(objective, model))(images, labels)


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode"])
def test_constants_and_nan_are_refused(engine):
    images, labels = batch()
    constant = GradientObjective(lambda g, x, y, f: g.flatten(1).sum(1), of=lambda f, y: f.detach().sum(1), engine=engine)
    with pytest.raises(ValueError, match="what is penalized does not depend on the outputs in a differentiable way"):
        constant(smooth_net(), images, labels)
    spoiled = GradientObjective(lambda g, x, y, f: torch.nan * f[:, 0], engine=engine)
    with pytest.raises(NotFiniteError, match=r"the penalty must be finite; got nan \(4 of 4 values\)"):
        spoiled(smooth_net(), images, labels)


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "finite_difference"])
def test_a_model_without_values_is_named(engine):
    images, labels = batch()
    model = nn.Sequential(nn.Conv2d(images.shape[1], 2, 3), nn.Softplus(), nn.Flatten(), nn.LazyLinear(3))
    model(images.float())
    with pytest.raises(ValueError, match="the model is on meta and the images are on cpu; move one with"):
        GradientPenalty(Euclidean(), 0.3, engine=engine)(model.to("meta"), images.float(), labels)


def test_under_autocast_a_float32_penalty(device):
    model, (images, labels) = smooth_net(device, torch.float32), batch(device=device, dtype=torch.float32)
    twin, objective = copy.deepcopy(model), GradientObjective(lambda g, x, y, f: per_row(g.square()))
    with torch.autocast(device, torch.bfloat16):
        received, expected = traced(objective, model)(images, labels), eager(objective, twin, images, labels)
    assert received.total.dtype == expected.total.dtype == torch.float32
    assert_matches(received.total, expected.total, 2e-2)
