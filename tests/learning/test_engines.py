"""Every engine against central differences of the scalar objective, layer by layer."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches, assert_within_standard_errors
from tests.learning.central import along, differences, flat, gradient_penalty, gradients_of
from tests.learning.zoo import ZOO, DropsLayers, batch, make, smooth_net
from wassersmooth import DualNorm, Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning import gradient_gap
from wassersmooth.learning.engines import FiniteDifference, couples_images
from wassersmooth.learning.objectives import GradientPenalty

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
EXACT = ("double_backward", "forward_mode")


def seeded(function):
    def run():
        torch.manual_seed(5)
        return function()

    return run


@pytest.mark.parametrize("engine", EXACT)
@pytest.mark.parametrize("name", ZOO)
def test_exact_engines_match_central_differences(name, engine, device):
    model, (images, labels) = make(name, device), batch(device=device)
    objective = GradientPenalty(METRIC, eta=0.7, engine=engine)
    parameters = list(model.parameters())

    terms = seeded(lambda: objective(model, images, labels))()
    value = seeded(lambda: gradient_penalty(model, images, labels, METRIC, 0.7))
    assert_matches(terms.penalty, value(), 1e-10)
    received = along(gradients_of(terms.penalty, model), parameters)
    assert_matches(received, differences(value, parameters), 1e-6)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("central", [True, False])
def test_finite_differences_have_the_value_and_nearly_the_gradient(name, central, device):
    model, (images, labels) = make(name, device), batch(device=device)
    exact = seeded(lambda: GradientPenalty(METRIC, eta=0.7)(model, images, labels))()
    rough = seeded(lambda: GradientPenalty(METRIC, 0.7, engine=FiniteDifference(central=central))(model, images, labels))()
    assert_matches(rough.penalty, exact.penalty, 1e-10)
    a, b = (flat(gradients_of(terms.penalty, model)) for terms in (rough, exact))
    assert (a - b).norm() <= (2e-2 if model.training else 5e-4) * b.norm()


def test_finite_differences_in_float32(device):
    for name in ("batch_norm_train", "batch_norm_eval", "vision_transformer"):
        model, (images, labels) = make(name, device), batch(device=device)
        exact = flat(gradients_of(GradientPenalty(METRIC, 1.0)(model, images, labels).penalty, model))
        objective = GradientPenalty(METRIC, 1.0, engine="finite_difference")
        terms = objective(model.float(), images.float(), labels)
        rough = flat(gradients_of(terms.penalty, model)).double()
        assert (rough - exact).norm() <= (2e-2 if model.training else 5e-4) * exact.norm(), name


@pytest.mark.parametrize("engine", EXACT)
@pytest.mark.parametrize("name", ["batch_norm_train", "vision_transformer", "dropout"])
def test_penalty_of_the_outputs(name, engine, device):
    model, (images, labels) = make(name, device), batch(device=device)
    parameters = list(model.parameters())
    terms = seeded(lambda: GradientPenalty(Euclidean(), 0.7, of="logits", engine=engine)(model, images, labels))()
    value = seeded(lambda: gradient_penalty(model, images, labels, Euclidean(), 0.7, of="logits"))
    assert_matches(terms.penalty, value(), 1e-10)
    received = along(gradients_of(terms.penalty, model), parameters)
    assert_matches(received, differences(value, parameters), 1e-6)


def test_many_outputs_are_projected_without_bias(device):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20)).double().to(device)
    images, labels = batch(device=device)
    exact = METRIC.cometric(images).as_matrix()
    weight = model[1].weight.detach()
    expected = torch.einsum("ci,bij,cj->", weight, exact, weight) / len(images)
    objective = GradientPenalty(METRIC, 1.0, of="logits")
    values = torch.stack([objective(model, images, labels).penalty.detach() for _ in range(200)])
    error = values.std() / 200**0.5
    assert 0 < error < 0.05 * expected
    assert abs(values.mean() - expected) < 5 * error


LENGTHS_THAT_ARE_NO_QUADRATIC_FORM = {
    "length": (GradientPenalty(Euclidean(), 1.0, of="logits", power=1), 17.0),
    "dual norm": (GradientPenalty(DualNorm(), 1.0, of="logits"), 17 * math.pi / 2 / 100),
    "its length": (GradientPenalty(DualNorm(), 1.0, of="logits", power=1), 17 * (math.pi / 2 / 100) ** 0.5),
}


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "finite_difference"])
@pytest.mark.parametrize("name", LENGTHS_THAT_ARE_NO_QUADRATIC_FORM)
def test_many_outputs_are_exact_where_projections_would_be_biased(name, engine, device):
    """Output c is pixel c, so that every gradient is a unit vector."""
    objective, expected = LENGTHS_THAT_ARE_NO_QUADRATIC_FORM[name]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(100, 17, bias=False)).double().to(device)
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(100)[:17])
    images, labels = torch.rand(3, 1, 10, 10, dtype=torch.float64, device=device), torch.tensor([0, 5, 16], device=device)
    before = torch.get_rng_state()
    penalty = replace(objective, engine=engine)(model, images, labels).penalty
    assert_matches(penalty, torch.tensor(expected, dtype=torch.float64), 1e-12)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn"


@pytest.mark.parametrize("engine", EXACT)
@pytest.mark.parametrize("metric", [Euclidean(), DualNorm()])
def test_the_exact_sum_over_many_outputs_has_its_derivative(metric, engine, device):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 17))
    model, (images, labels) = model.double().to(device), batch(2, device=device)
    objective = GradientPenalty(metric, 1.0, of="logits", engine=engine, power=1)
    parameters = list(model.parameters())
    received = along(gradients_of(objective(model, images, labels).penalty, model), parameters)
    assert_matches(received, differences(lambda: objective(model, images, labels).penalty.detach(), parameters, 1e-6), 1e-6)


def test_a_metric_of_the_user_is_not_taken_for_a_quadratic_form(device):
    class FourthRoot:
        def quad(self, v):
            return v.pow(4).sum((1, 2, 3)).sqrt()

        def mv(self, v):
            return v**3 / self.quad(v).view(-1, 1, 1, 1)

    class FourthPowers:
        def cometric(self, x):
            return FourthRoot()

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 30)).double().to(device)
    images, labels = batch(device=device)
    penalty = GradientPenalty(FourthPowers(), 1.0, of="logits")(model, images, labels).penalty
    assert_matches(penalty, model[1].weight.pow(4).sum(1).sqrt().sum(), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_projections_are_unbiased_where_images_see_each_other(training, device):
    """Under batch-norm in training mode the gradient at an image is that of a sum over the batch."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Tanh(), torch.nn.Flatten())
    model = model.append(torch.nn.Linear(3 * 36, 20)).double().to(device).train(training)
    images, labels = batch(4, device=device)
    x = images.detach().requires_grad_()
    outputs, cometric = model(x), METRIC.cometric(images)
    rows = [cometric.quad(torch.autograd.grad(column.sum(), x, retain_graph=True)[0]) for column in outputs.T]
    expected = torch.stack(rows).sum(0).mean()
    objective, generator = GradientPenalty(METRIC, 1.0, of="logits"), torch.Generator(device).manual_seed(0)
    values = torch.stack([objective(model, images, labels, generator).penalty.detach() for _ in range(300)])
    assert_within_standard_errors(values.mean(), expected, values.std() / 300**0.5, limit=4)


def test_engines_share_the_projections_of_one_generator(device):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 20))
    model, (images, labels) = model.double().to(device), batch(device=device)
    found = []
    for engine in ("double_backward", "forward_mode", "finite_difference"):
        objective = GradientPenalty(METRIC, 1.0, of="logits", engine=engine)
        generator = torch.Generator(device).manual_seed(3)
        found.append(flat(gradients_of(objective(model, images, labels, generator).penalty, model)))
    assert_matches(found[1], found[0], 1e-10)
    assert_matches(found[2], found[0], 1e-4)


@pytest.mark.parametrize("engine", [*EXACT, "finite_difference"])
def test_learned_graph_weights_get_their_gradient(engine, device):
    weights = torch.rand(12, dtype=torch.float64).add(0.5).requires_grad_()
    metric = Wasserstein(PixelGraph.grid(8, 8, radius=2, weight=weights))
    model, (images, labels) = smooth_net(device), batch(device=device)
    penalty = GradientPenalty(metric, 0.7, engine=engine)(model, images, labels).penalty
    (gradient,) = torch.autograd.grad(penalty, weights)
    expected = differences(lambda: gradient_penalty(model, images, labels, metric, 0.7), [weights])
    assert_matches(along([gradient], [weights]), expected, 1e-6)


@pytest.mark.parametrize("engine", [*EXACT, "finite_difference"])
def test_zero_image_constant_image_and_zero_gradient_are_finite(engine, device):
    model, (images, labels) = smooth_net(device, torch.float32), batch(device=device, dtype=torch.float32)
    images[0], images[1] = 0, 0.5
    dead = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).to(device)
    torch.nn.init.zeros_(dead[1].weight)
    for net in (model, dead):
        for metric in (METRIC, Wasserstein(PixelGraph.grid(8, 8, radius=1)), Euclidean()):
            terms = GradientPenalty(metric, 0.7, engine=engine)(net, images, labels)
            assert torch.isfinite(terms.total)
            assert all(bool(torch.isfinite(g).all()) for g in gradients_of(terms.total, net))
    assert terms.penalty == 0


OWN_LOSSES = {
    "class weights": torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), reduction="none"),
    "an ignored class": lambda outputs, labels: F.cross_entropy(outputs, labels, ignore_index=0, reduction="none"),
    "all options": lambda outputs, labels: F.cross_entropy(
        outputs, labels, outputs.new_tensor([1, 2, 3]), ignore_index=0, reduction="none", label_smoothing=0.1
    ),
    "special.softmax": lambda outputs, labels: torch.special.softmax(outputs, 1).square().sum(1),
    "special.log_softmax": lambda outputs, labels: -torch.special.log_softmax(outputs, 1).gather(1, labels[:, None])[:, 0],
    "special.logsumexp": lambda outputs, labels: torch.special.logsumexp(outputs, 1),
    "logsumexp over two": lambda outputs, labels: outputs[:, None].logsumexp((1, 2)),
}


@pytest.mark.parametrize("loss", OWN_LOSSES.values(), ids=OWN_LOSSES.keys())
def test_losses_of_torch_in_forward_mode(loss, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    loss = loss.to(device) if isinstance(loss, torch.nn.Module) else loss
    exact, forward = (GradientPenalty(METRIC, 0.7, engine=engine, loss=loss)(model, images, labels) for engine in EXACT)
    assert_matches(forward.penalty, exact.penalty, 1e-10)
    assert_matches(flat(gradients_of(forward.total, model)), flat(gradients_of(exact.total, model)), 1e-9)


def normalized_cubes(outputs, labels):
    """By a kernel that is silently wrong in forward mode."""
    return torch.native_layer_norm(outputs, [3], None, None, 1e-5)[0].pow(3).sum(1)


class SlottedLoss:
    __slots__ = ()

    def __call__(self, outputs, labels):
        return outputs.square().sum(1)


def test_a_custom_loss_is_compared_once_even_if_the_model_is_tested(device, monkeypatch):
    model, (images, labels) = smooth_net(device), batch(device=device)
    with pytest.raises(ValueError, match=r"off by .* perhaps the loss\. Use engine='double_backward'"):
        GradientPenalty(METRIC, 0.7, engine="forward_mode", loss=normalized_cubes)(model, images, labels)

    compared = []
    monkeypatch.setattr(gradient_gap, "verify_forward_mode", lambda objective, *_: compared.append(objective.loss))
    slotted, weighted = SlottedLoss(), OWN_LOSSES["class weights"].to(device)
    for _ in range(2):
        for loss in ("cross_entropy", lambda outputs, labels: outputs.square().sum(1), slotted, weighted, normalized_cubes):
            GradientPenalty(METRIC, 0.7, engine="forward_mode", loss=loss)(model, images, labels)
    assert len(compared) == 4
    assert "cross_entropy" not in compared


def test_a_common_step_is_taken_where_images_see_each_other():
    model, (images, labels) = make("batch_norm_train"), batch(16)
    images[::2] *= 0.01  # very different scales in one batch
    assert couples_images(model)
    assert not couples_images(model.eval())
    exact = flat(gradients_of(GradientPenalty(Euclidean(), 1.0)(model.train(), images, labels).penalty, model))
    rough = GradientPenalty(Euclidean(), 1.0, engine="finite_difference")(model, images, labels)
    assert (flat(gradients_of(rough.penalty, model)) - exact).norm() < 1e-3 * exact.norm()


NORMS = {
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "batch": lambda: nn.BatchNorm2d(4),
    "softmax": lambda: nn.Softmax(1),
    "layer, channels last": lambda: nn.Sequential(ChannelsBehind(), nn.LayerNorm(4)),
}


class ChannelsBehind(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_all_passes_drop_the_same_values_in_whatever_order_they_lie(norm, layout, device):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), NORMS[norm](), nn.Tanh(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(256, 3)
    model, (images, labels) = nn.Sequential(*layers).double().to(device), batch(device=device, channels=2)
    images = images.contiguous(memory_format=layout)
    found = {}
    for engine in (*EXACT, "finite_difference"):
        terms = seeded(lambda engine=engine: GradientPenalty(Euclidean(), 0.5, engine=engine)(model, images, labels))()
        found[engine] = terms.total.detach(), flat(gradients_of(terms.total, model))
    for engine, (total, gradient) in found.items():
        assert_matches(total, found["double_backward"][0], 1e-10)
        assert_matches(gradient, found["double_backward"][1], 1e-6 if engine == "finite_difference" else 1e-9)


class HalfATangent(torch.autograd.Function):
    """tanh, with a wrong derivative in forward mode."""

    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)

    @staticmethod
    def jvp(ctx, tangent):
        (y,) = ctx.saved_tensors
        return tangent * (1 - y * y) / 2


class WrongInOneOrder(nn.Module):
    def forward(self, x):
        return x.tanh() if x.is_contiguous() else HalfATangent.apply(x)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
@pytest.mark.parametrize("engine", [*EXACT, FiniteDifference()])
def test_all_passes_see_the_same_numbers_of_python_and_numpy(engine, draw, device):
    """A model that drops layers by such a number was another model in the second pass."""
    torch.manual_seed(0)
    model, (images, labels) = DropsLayers(draw).to(device), batch(device=device)
    dropped = set()
    for seed in range(6):
        random.seed(seed)
        np.random.seed(seed)
        dropped.add(number := draw())
        kept = DropsLayers(lambda number=number: number).to(device)
        kept.load_state_dict(model.state_dict())
        random.seed(seed)
        np.random.seed(seed)
        received = flat(gradients_of(GradientPenalty(METRIC, 0.7, engine=engine)(model, images, labels).total, model))
        after = draw()
        random.seed(seed)
        np.random.seed(seed)
        assert (draw(), draw())[1] == after  # as after one pass
        exact = GradientPenalty(METRIC, 0.7)(kept, images, labels)
        assert_matches(received, flat(gradients_of(exact.total, kept)), 1e-4 if isinstance(engine, FiniteDifference) else 1e-10)
    assert min(dropped) < 0.5 <= max(dropped)


def test_models_are_compared_in_each_order_of_memory():
    torch.manual_seed(0)
    model = nn.Sequential(WrongInOneOrder(), nn.Flatten(), nn.Tanh(), nn.Linear(128, 3)).double()
    images, labels = batch(channels=2)
    objective = GradientPenalty(METRIC, 0.5, engine="forward_mode")
    objective(model, images, labels)
    with pytest.raises(ValueError, match="engine='forward_mode' is off by"):
        objective(model, images.contiguous(memory_format=torch.channels_last), labels)
