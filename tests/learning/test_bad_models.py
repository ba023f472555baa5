"""Models and arguments that cannot work: one clear ValueError, before anything else goes wrong."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from wassersmooth.learning.objective import readable

METRIC = ws.Wasserstein(ws.PixelGraph.grid(4, 4, radius=1))
OBJECTIVES = [
    ws.Plain(),
    ws.GradientPenalty(METRIC, 0.3),
    ws.GradientPenalty(METRIC, 0.3, engine="forward_mode"),
    ws.GradientPenalty(METRIC, 0.3, engine="finite_difference"),
    ws.Tikhonov(METRIC, 0.3),
    ws.NoisyInputs(METRIC, 0.3),
]
PENALTIES = OBJECTIVES[1:5]


class Returning(nn.Module):
    """A linear network whose outputs pass through a function that spoils them."""

    def __init__(self, spoil: object) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        self.spoil = spoil

    def forward(self, x: Tensor) -> object:
        return self.spoil(self.network(x))  # type: ignore[operator]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(4, 1, 4, 4, generator=generator), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_outputs_that_are_no_tensor(objective) -> None:
    with pytest.raises(ValueError, match="tuple"):
        objective(Returning(lambda z: (z, z)), *batch())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_outputs_for_another_number_of_images(objective) -> None:
    with pytest.raises(ValueError, match="one row"):
        objective(Returning(lambda z: z[:1]), *batch())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 1, 1, 0]), torch.zeros(4).long(), torch.ones(4, 1)], ids=["two classes", "one class", "targets"]
)
def test_one_output_has_no_softmax(objective, labels) -> None:
    """Its loss, its penalty and all gradients would be zero, and nothing would be learned."""
    with pytest.raises(ValueError, match=r"at least 2 outputs.*got 1; use loss='binary_cross_entropy'.*\(B, 1\)"):
        objective(Returning(lambda z: z[:, :1]), batch()[0], labels)


def test_one_output_by_the_fast_way_and_by_its_remedy() -> None:
    model, images, targets = Returning(lambda z: z[:, :1]), batch()[0], torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    with pytest.raises(ValueError, match="at least 2 outputs"):
        ws.FastGradients(OBJECTIVES[1], model, compile=False)(images, targets)
    for objective in (ws.GradientPenalty(METRIC, 0.3, loss="binary_cross_entropy"), ws.Tikhonov(METRIC, 0.3, "square")):
        terms = objective(model, images, targets)
        terms.total.backward()
        assert terms.loss > 0
        assert model.network[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("objective", PENALTIES, ids=repr)
def test_outputs_without_a_way_back_to_the_images(objective) -> None:
    with pytest.raises(ValueError, match="detach"):
        objective(Returning(lambda z: z.detach()), *batch())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_double_targets_keep_a_float_objective_float(objective) -> None:
    images, _ = batch()
    targets = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(1)
    terms = objective(Returning(lambda z: z), images, targets)
    assert {term.dtype for term in terms} == {torch.float32}


def test_targets_that_are_not_finite_are_named() -> None:
    images, _ = batch()
    with pytest.raises(ValueError, match="targets"):
        ws.Plain()(Returning(lambda z: z), images, torch.full((4, 3), torch.nan))


def test_a_graph_in_place_of_a_metric() -> None:
    with pytest.raises(ValueError, match=r"Wasserstein\(graph\)"):
        ws.GradientPenalty(METRIC.graph, 0.3)
    with pytest.raises(ValueError, match=r"Wasserstein\(graph\)"):
        ws.calculus.gradient(lambda x: x.sum((1, 2, 3)), batch()[0], METRIC.graph)


def test_perturbations_that_are_not_finite_or_not_callable() -> None:
    with pytest.raises(ValueError, match="xi must be finite"):
        ws.DirectionalPenalty(lambda model, x, y: x * torch.nan)(Returning(lambda z: z), *batch())
    with pytest.raises(ValueError, match="attack must be a function"):
        ws.DirectionalPenalty.from_attack("fgsm")


@pytest.mark.parametrize("make", [ws.AdversarialTraining, ws.DirectionalPenalty.from_attack])
@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (ws.attacks.FGSM(0.1, targeted=True), "got targeted=True; a batch has no targets, so leave it out$"),
        (ws.attacks.PGD(0.1, 0.1, 1, targeted=True), "got targeted=True"),
        (ws.attacks.FGSM, r"such as attacks\.FGSM\(8 / 255\); got the class FGSM itself; "),
        ("fgsm", "must be a function .*; got str; "),
    ],
)
def test_an_attack_leads_away_from_the_labels(make, attack, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(attack)


def test_expanded_images_in_forward_mode() -> None:
    """Images that share memory, such as one image repeated."""
    images, labels = batch()
    repeated = images[:1].expand(4, -1, -1, -1)
    model = Returning(lambda z: z)
    exact, forward = (ws.GradientPenalty(METRIC, 0.3, engine=e) for e in ("double_backward", "forward_mode"))
    torch.testing.assert_close(forward(model, repeated, labels), exact(model, repeated.clone(), labels))


def test_total_can_be_differentiated_whatever_the_mode_outside() -> None:
    with torch.no_grad():
        terms = ws.GradientPenalty(METRIC, 0.3)(Returning(lambda z: z), *batch())
    assert terms.total.requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("objective", PENALTIES, ids=repr)
def test_scripted_models_have_one_engine(objective) -> None:
    images, labels = batch()
    model = Returning(lambda z: z).network
    if objective == PENALTIES[0]:
        torch.testing.assert_close(objective(torch.jit.script(model), images, labels), objective(model, images, labels))
        return
    for scripted in (torch.jit.script(model), torch.jit.trace(model, images)):
        with pytest.raises(ValueError, match=r"a scripted model cannot .* engine='double_backward' only; use that, or"):
            objective(scripted, images, labels)


@pytest.mark.parametrize("objective", [*PENALTIES, ws.DirectionalPenalty(lambda model, x, y: x)], ids=repr)
def test_penalties_inside_transforms_are_refused(objective) -> None:
    images, labels = batch()
    model = Returning(lambda z: z)

    def total(factor: Tensor, x: Tensor = images, y: Tensor = labels) -> Tensor:
        return factor * objective(model, x, y).total

    for ask in (
        lambda: torch.func.grad(total)(torch.tensor(1.0)),
        lambda: torch.func.vmap(lambda x, y: total(1.0, x[None], y[None]))(images, labels),
    ):
        with pytest.raises(RuntimeError, match=r"inside torch\.func\.grad, vmap .* terms\.total\.backward\(\)"):
            ask()


def test_functions_are_no_models() -> None:
    images, labels = batch()
    for ask in (
        lambda: ws.Normalized(lambda z: z, 0.5, 0.5),
        lambda: ws.attacks.FGSM(8 / 255)(lambda z: z, images, labels),
        lambda: ws.evaluate(lambda z: z, images, labels),
    ):
        with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
            ask()


@pytest.mark.parametrize("make", [lambda: ws.attacks.FGSM(8), lambda: ws.attacks.PGD(8, 2, 3)])
def test_gray_levels_are_not_pixel_units(make) -> None:
    with pytest.raises(ValueError, match="8/255"):
        make()
    ws.attacks.FGSM(8, units="normalized")
    ws.attacks.PGD(8, 2, 3, norm="l2")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda y: y[:, None], r"int64 of \(\d+, 1\); convert indices with \.squeeze\(1\)"),
        (lambda y: y.int(), r"int32 of \(\d+,\); convert indices with \.long\(\)"),
        (lambda y: y.float(), r"convert class indices with \.long\(\)"),
    ],
)
def test_the_remedy_fits_the_labels(change, remedy) -> None:
    images, labels = batch()
    with pytest.raises(ValueError, match=remedy):
        PENALTIES[0](Returning(lambda z: z), images, change(labels))


BINARY = ws.GradientPenalty(METRIC, 0.3, loss="binary_cross_entropy")
EACH_OUTPUT = ws.Plain(loss=nn.BCEWithLogitsLoss(reduction="none"))


@pytest.mark.parametrize(
    ("objective", "spoil", "change", "remedy"),
    [
        (BINARY, lambda z: z[:, :1], lambda y: y.float(), r"got \(4,\); add a dimension, targets\[:, None\]"),
        (BINARY, lambda z: z[:, :1], lambda y: y, r"got 0\.\.2; a single output takes float targets \(B, 1\)"),
        (BINARY, lambda z: z[:, 0], lambda y: y.float(), r"got \(4,\); add a dimension, outputs\[:, None\]"),
        (EACH_OUTPUT, lambda z: z, lambda y: torch.ones(4, 3), r"got shape \(4, 3\); average over the rest"),
        (ws.AdversarialTraining(ws.attacks.FGSM(0.1)), lambda z: z, lambda y: torch.ones(4, 3), r"targets\.argmax\(1\)"),
        (ws.AdversarialTraining(ws.attacks.FGSM(0.1)), lambda z: z, lambda y: y[:, None], r"dimension with \.squeeze\(1\)"),
        (ws.AdversarialTraining(ws.attacks.FGSM(0.1)), lambda z: z[:, :1], lambda y: y, r"torch\.cat\(\[0 \* z, z\], 1\)"),
    ],
)
def test_the_remedy_fits_the_outputs(objective, spoil, change, remedy) -> None:
    images, labels = batch()
    with pytest.raises(ValueError, match=remedy):
        objective(Returning(spoil), images, change(labels))


@pytest.mark.parametrize(
    "objective", [ws.Tikhonov(METRIC, 0.3), ws.DirectionalPenalty.from_attack(ws.attacks.FGSM(0.1))], ids=repr
)
def test_no_engine_is_recommended_where_there_is_no_choice(objective) -> None:
    compiled = torch.compile(Returning(lambda z: z), backend="eager")
    with pytest.raises(RuntimeError, match="this objective cannot differentiate a model that was compiled") as caught:
        objective(compiled, *batch())
    assert "engine" not in str(caught.value)


@pytest.mark.parametrize("objective", [ws.GradientPenalty, ws.Tikhonov, ws.NoisyInputs])
def test_a_class_is_no_metric(objective) -> None:
    with pytest.raises(ValueError, match=r"metric must be .*Wasserstein\(") as caught:
        objective(ws.Wasserstein, 0.3)
    assert "ABCMeta" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("euclidean", "got str; use Euclidean() if in doubt"),
        (ws.PixelGraph.grid(8, 8, 1), "got PixelGraph; wrap the graph as Wasserstein(graph)"),
        (ws.Euclidean, "got the class Euclidean itself; call it"),
    ],
    ids=["name", "graph", "class"],
)
def test_what_is_given_for_a_metric_has_its_own_remedy(given, remedy) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy) + "$"):
        ws.GradientPenalty(given, 0.3)


def test_fast_gradients_say_that_the_objective_comes_first() -> None:
    with pytest.raises(ValueError, match=r"got Linear, .*; give the objective first, then the model$"):
        ws.FastGradients(nn.Linear(3, 2), ws.Plain())


ASKING = [*OBJECTIVES, ws.AdversarialTraining(ws.attacks.FGSM(0.1)), ws.attacks.FGSM(0.1), ws.attacks.Square(0.1, 5)]


@pytest.mark.parametrize("asking", [*ASKING, ws.evaluate], ids=readable)
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_answers_are_no_scores(asking, kind) -> None:
    with pytest.raises(ValueError, match=rf"floating-point scores; got {kind}; return them before .*\.float\(\)$"):
        asking(Returning(lambda z: (10 * z).to(kind)), *batch())


DRAWING = [
    *ASKING,
    ws.attacks.PGD(0.1, 0.1, 1),
    ws.evaluate,
    lambda model, x, y, generator: METRIC.cometric(x).sample(generator),
]


@pytest.mark.parametrize("asking", DRAWING, ids=readable)
@pytest.mark.parametrize(
    ("received", "message"),
    [(3, r"got 3; use torch\.Generator\(\)\.manual_seed\(3\)$"), (torch.zeros(3), "got Tensor; use torch")],
)
def test_a_seed_is_no_generator(asking, received, message) -> None:
    with pytest.raises(ValueError, match=f"generator must be a torch.Generator or None; {message}"):
        asking(Returning(lambda z: z), *batch(), generator=received)


def test_fast_gradients_of_no_model_and_from_no_generator() -> None:
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module; got NoneType"):
        ws.FastGradients(ws.Plain(), None)
    with pytest.raises(ValueError, match="generator must be"):
        ws.FastGradients(ws.Plain(), Returning(lambda z: z), compile=False)(*batch(), generator=3)


@pytest.mark.parametrize("asking", ASKING, ids=repr)
@pytest.mark.parametrize(
    ("of_model", "of_images", "remedy"),
    [
        (torch.float64, torch.float32, r"use model\.float\(\), or a cast inside its forward"),
        (torch.float32, torch.float64, r"use images\.float\(\)"),
        (torch.bfloat16, torch.float64, r"use model\.float\(\) and images\.float\(\)"),
    ],
)
def test_two_precisions_are_told_with_a_remedy(asking, of_model, of_images, remedy) -> None:
    images, labels = batch()
    told = rf"parameters or buffers in {of_model} and cannot process images in {of_images} \(.*\)"
    message = f"{told}; expected one precision; {remedy}$"
    with pytest.raises(ValueError, match=message):
        asking(Returning(lambda z: z).to(of_model), images.to(of_images), labels)


def test_a_model_that_casts_by_itself_fails_in_its_own_words() -> None:
    class Casting(Returning):
        def forward(self, x: Tensor) -> object:
            return super().forward(x.double().reshape(7))

    with pytest.raises(ValueError, match=r"cannot process images of 1 x 4 x 4 \(shape .* is invalid for input of size"):
        ws.Plain()(Casting(lambda z: z).double(), *batch())


def test_a_buffer_of_another_precision_is_told_and_other_complaints_about_types_are_not_replaced() -> None:
    class Shifted(Returning):
        def __init__(self, message: str = "") -> None:
            super().__init__(lambda z: z)
            self.message = message
            self.register_buffer("mean", torch.zeros((), dtype=torch.float64) + torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> object:
            if self.message:
                raise RuntimeError(self.message)
            return super().forward(x - self.mean)

    with pytest.raises(ValueError, match=r"parameters or buffers in torch.float64 .* use model\.float\(\)"):
        ws.Plain()(Shifted(), *batch())
    with pytest.raises(RuntimeError, match="unknown prototype"):
        ws.Plain()(Shifted("unknown prototype: call build() first"), *batch())


def test_a_model_made_in_inference_mode_is_refused_as_it_was() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match=r"created in torch\.inference_mode"):
        ws.attacks.FGSM(0.1)(model, *batch())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_rows_of_integer_targets_are_told_to_be_floats(kind) -> None:
    images, labels = batch()
    rows = torch.nn.functional.one_hot(labels, 3).to(kind)
    with pytest.raises(ValueError, match=r"convert rows of targets with \.float\(\)"):
        ws.Plain()(Returning(lambda z: z), images, rows)
    ws.Plain()(Returning(lambda z: z), images, rows.float())
