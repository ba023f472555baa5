"""The theorem: its identity, its meaning for noise, its classical case, and its derivatives."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.compare import assert_matches, assert_within_standard_errors
from tests.learning.central import along, differences, gradients_of
from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.geometry import calculus
from wassersmooth.learning import tikhonov
from wassersmooth.learning.objectives import NoisyInputs
from wassersmooth.learning.tikhonov import Tikhonov

LOSSES = ("cross_entropy", "binary_cross_entropy", "square")
METRICS = {"euclidean": Euclidean(), "wasserstein": Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.2)}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())


def reference_loss(name, outputs, labels):
    """The losses by torch's own functions, one value per image."""
    if name == "cross_entropy":
        return F.cross_entropy(outputs, labels, reduction="none")
    targets = F.one_hot(labels, outputs.shape[1]).to(outputs)
    if name == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
    return F.mse_loss(outputs, targets, reduction="none").mean(1)


def hessians(model, images, labels, loss):
    """Hess_x (l o f), dense. # shape: (B, N, N)"""

    def single(x, y):
        return reference_loss(loss, model(x[None]), y[None])[0]

    rows = [torch.autograd.functional.hessian(lambda x, y=y: single(x, y), x) for x, y in zip(images, labels, strict=True)]
    return torch.stack(rows).reshape(len(images), images[0].numel(), -1)


@every_metric
@pytest.mark.parametrize("loss", LOSSES)
def test_identity_the_regularizer_is_the_trace_of_the_hessian_of_the_loss(loss, metric, device):
    model, (images, labels) = smooth_net(device), batch(3, device=device)
    L = metric.cometric(images).as_matrix()
    trace = torch.einsum("bij,bji->b", L, hessians(model, images, labels, loss)).mean()
    terms = Tikhonov(metric, 0.3, loss=loss, probes=None)(model, images, labels)
    assert_matches(terms.penalty, 0.3**2 / 2 * trace, 1e-9)
    assert_matches(terms.loss, reference_loss(loss, model(images), labels).mean(), 1e-12)


@every_metric
@pytest.mark.parametrize("loss", LOSSES)
def test_the_second_derivative_term_alone(loss, metric, device):
    """sum_cd l''_cd grad f_c' L grad f_d with l'' from autograd; the rest of the trace is the Laplacian of the outputs."""
    model, (images, labels) = smooth_net(device), batch(3, device=device)
    L, outputs = metric.cometric(images).as_matrix(), model(images).detach()
    expected = 0
    for i in range(3):
        J = torch.autograd.functional.jacobian(lambda x: model(x[None])[0], images[i]).flatten(1)
        curvature = torch.autograd.functional.hessian(
            lambda f, i=i: reference_loss(loss, f[None], labels[i : i + 1])[0], outputs[i]
        )
        expected = expected + torch.trace(curvature @ J @ L[i] @ J.T) / 3
    terms = Tikhonov(metric, 0.3, loss=loss, laplacian=None, probes=None)(model, images, labels)
    assert_matches(terms.penalty, 0.3**2 / 2 * expected, 1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_beltrami_adds_the_first_order_drift(loss, device):
    metric = METRICS["wasserstein"]
    model, (images, labels) = smooth_net(device), batch(3, device=device)
    x = images.detach().requires_grad_()
    g = torch.autograd.grad(reference_loss(loss, model(x), labels).sum(), x)[0]
    drift = (calculus.beltrami_drift(images, metric) * g).sum((1, 2, 3)).mean()
    additive, beltrami = (
        Tikhonov(metric, 1.0, loss=loss, laplacian=kind, probes=None)(model, images, labels).penalty
        for kind in ("additive", "beltrami")
    )
    assert abs(drift) > 1e-3 * abs(additive)
    assert_matches(beltrami - additive, drift / 2, 1e-8)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("laplacian", ["additive", None])
def test_probes_are_unbiased(loss, laplacian, device):
    model, (images, labels) = smooth_net(device), batch(3, device=device)
    metric = METRICS["wasserstein"]
    exact = Tikhonov(metric, 1.0, loss, laplacian, probes=None)(model, images, labels).penalty
    generator = torch.Generator(device).manual_seed(0)
    objective = Tikhonov(metric, 1.0, loss, laplacian, probes=2)
    draws = torch.stack([objective(model, images, labels, generator).penalty.detach() for _ in range(150)])
    assert_within_standard_errors(draws.mean(), exact, draws.std() / 150**0.5, limit=4)


def test_probes_of_the_curvature_are_shared_where_images_see_each_other(device, monkeypatch):
    """The mean over all signs is exact; drawn for each image alone, they would take the products of different images out."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Tanh(), torch.nn.Flatten())
    model, (images, labels) = model.append(torch.nn.Linear(3 * 36, 3)).double().to(device), batch(3, device=device)
    exact = Tikhonov(Euclidean(), 1.0, laplacian=None, probes=None)(model, images, labels).penalty

    def all_signs(shape, like, generator):
        assert shape == (8, 1, 3)
        return torch.tensor(list(itertools.product((-1, 1), repeat=3)), dtype=like.dtype, device=device).unsqueeze(1)

    monkeypatch.setattr(tikhonov, "random_signs", all_signs)
    assert_matches(Tikhonov(Euclidean(), 1.0, laplacian=None, probes=8)(model, images, labels).penalty, exact, 1e-9)


@every_metric
def test_agreement_with_noise_as_eta_vanishes(metric, device):
    """Antithetic pairs cancel the first order, so that what is left of the noise is the theorem's second order."""
    model, (images, labels) = smooth_net(device), batch(2, device=device)
    eta, generator = 0.02, torch.Generator(device).manual_seed(1)
    penalty = Tikhonov(metric, eta, probes=None)(model, images, labels).penalty.detach()
    many, their_labels = images.repeat(2000, 1, 1, 1), labels.repeat(2000)
    draws = []
    for _ in range(10):
        xi = eta * metric.cometric(many).sample(generator)
        with torch.no_grad():
            plus, middle, minus = (
                F.cross_entropy(model(many + s * xi), their_labels, reduction="none").reshape(2000, 2).mean(1)
                for s in (1, 0, -1)
            )
        draws.append((plus + minus) / 2 - middle)
    draws = torch.cat(draws)
    error = draws.std() / len(draws) ** 0.5
    assert error < 0.1 * abs(penalty)
    assert_within_standard_errors(draws.mean(), penalty, error + 0.01 * abs(penalty), limit=4)


@pytest.mark.slow
def test_noisy_inputs_have_the_expectation_of_the_theorem(device):
    model, (images, labels) = smooth_net(device), batch(2, device=device)
    metric, eta, generator = METRICS["wasserstein"], 0.3, torch.Generator(device).manual_seed(2)
    terms = Tikhonov(metric, eta, probes=None)(model, images, labels)
    draws = torch.stack([NoisyInputs(metric, eta)(model, images, labels, generator).loss.detach() for _ in range(1500)])
    assert_within_standard_errors(draws.mean(), terms.total, draws.std() / 1500**0.5 + 0.1 * abs(terms.penalty), limit=3)


def test_the_classical_euclidean_result_for_square_error(device):
    """Bishop 1995: E^R = 2 (|grad f|^2 + (f - y) Laplacian f), here for one output that is quadratic in x."""

    class Quadratic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.linspace(0.1, 1, 64, dtype=torch.float64))

        def forward(self, x):
            return (self.a * x.flatten(1).square()).sum(1, keepdim=True)

    model, (images, _) = Quadratic().to(device), batch(3, device=device)
    y = torch.rand(3, 1, dtype=torch.float64).to(device)
    a, x = model.a.detach(), images.flatten(1)
    f, gradient_sq, laplacian = (a * x**2).sum(1), (2 * a * x).square().sum(1), 2 * a.sum()
    expected = 0.3**2 / 2 * (2 * (gradient_sq + (f - y[:, 0]) * laplacian)).mean()
    assert_matches(Tikhonov(Euclidean(), 0.3, loss="square", probes=None)(model, images, y).penalty, expected, 1e-12)


@pytest.mark.parametrize("laplacian", ["additive", "beltrami", None])
@pytest.mark.parametrize("name", ["batch_norm_eval", "layer_norm", "vision_transformer"])
def test_derivatives_in_the_parameters(name, laplacian, device):
    model, (images, labels) = make(name, device).eval(), batch(2, device=device)
    metric = METRICS["wasserstein"]
    objective = Tikhonov(metric, 0.5, laplacian=laplacian, probes=2)
    parameters = list(model.parameters())

    def terms():  # the same probes every time
        return objective(model, images, labels, torch.Generator(device).manual_seed(0))

    received = along(gradients_of(terms().penalty, model), parameters)
    assert_matches(received, differences(lambda: terms().penalty.detach(), parameters), 1e-6)


def test_the_exact_trace_refuses_images_that_see_each_other(device):
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    with pytest.raises(ValueError, match=r"batch-norm in training mode.*probes=1.*eval"):
        Tikhonov(Euclidean(), 0.3, probes=None)(model, images, labels)
    assert torch.isfinite(Tikhonov(Euclidean(), 0.3, probes=1)(model, images, labels).total)


def test_targets_as_rows(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    rows = F.one_hot(labels, 3).double()
    for loss in LOSSES:
        a, b = (Tikhonov(Euclidean(), 0.3, loss, None, None)(model, images, y) for y in (labels, rows))
        assert_matches(a.total, b.total, 1e-12)
