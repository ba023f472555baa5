"""Plausible mistakes with every public name: one line that says what was received, what was expected, and the remedy.

Each call below is right but for one argument. What comes out is a ValueError of this library, never an error of torch or
NumPy from further down, and never a wrong answer.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wassersmooth as ws
from wassersmooth.learning.gradient_gap import gap

SHAPE = (2, 1, 4, 4)
GRAPH = ws.PixelGraph.grid(4, 4, 1)
METRIC = ws.Wasserstein(GRAPH, mass=0.1)
A, V, C = ws.attacks, ws.variations, ws.calculus


def images() -> Tensor:
    return 0.05 + 0.9 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))


def small() -> Tensor:
    return 1e-3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def energy(x: Tensor) -> Tensor:
    return x.square().sum((1, 2, 3))


def labels() -> Tensor:
    return torch.tensor([0, 2])


def calling(kind: Callable[..., Any]) -> Callable[..., Any]:
    """An objective or attack, made and called."""

    def call(model: nn.Module, images: Tensor, labels: Tensor, generator: object = None, **settings: object) -> object:
        return kind(**settings)(model, images, labels, generator)

    return call


def at_images(method: str) -> Callable[..., Any]:
    return lambda v: getattr(METRIC.cometric(images()), method)(v)


def evaluated(model: Any) -> Any:
    return model.eval() if isinstance(model, nn.Module) else model


def fast(objective: object, model: nn.Module, images: Tensor, labels: Tensor) -> object:
    return ws.FastGradients(objective, model, compile=False)(images, labels)  # type: ignore[arg-type]


BATCH: dict[str, Any] = {"model": net, "images": images, "labels": labels}
SMOOTHED: dict[str, Any] = {"model": net, "images": images, "metric": ws.Euclidean(), "sigma": 0.1, "samples": 20}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grid": (ws.PixelGraph.grid, {"height": 4, "width": 4, "radius": 1, "weight": "constant"}),
    **{method: (at_images(method), {"v": small}) for method in ("mv", "quad", "kappa", "solve", "norm_sq", "in_range")},
    "Wasserstein": (METRIC.cometric, {"x": images}),
    "Euclidean": (ws.Euclidean().cometric, {"x": images}),
    "gradient": (C.gradient, {"f": energy, "x": images, "metric": METRIC}),
    "gradient_norm_sq": (C.gradient_norm_sq, {"f": energy, "x": images, "metric": METRIC}),
    "laplacian": (C.laplacian, {"f": energy, "x": images, "metric": METRIC, "probes": 1}),
    "hessian": (C.hessian, {"f": energy, "x": images, "a": small, "b": small, "metric": METRIC}),
    "christoffel": (C.christoffel, {"x": images, "a": small, "b": small, "metric": METRIC}),
    "exp_map": (C.exp_map, {"x": images, "v": small, "metric": METRIC, "steps": 1}),
    "beltrami_drift": (C.beltrami_drift, {"x": images, "metric": METRIC}),
    "log_volume": (C.log_volume, {"x": images, "metric": METRIC}),
    "interpolate": (ws.transport.interpolate, {"x": images, "y": images, "distance": 0.0, "metric": "l2"}),
    "Plain": (calling(ws.Plain), BATCH | {"loss": "square"}),
    "GradientPenalty": (calling(ws.GradientPenalty), BATCH | {"metric": METRIC, "eta": 0.1, "loss": "square"}),
    "Tikhonov": (calling(ws.Tikhonov), BATCH | {"metric": METRIC, "eta": 0.1}),
    "NoisyInputs": (calling(ws.NoisyInputs), BATCH | {"metric": METRIC, "eta": 0.1}),
    "AdversarialTraining": (calling(ws.AdversarialTraining), BATCH | {"attack": A.FGSM(0.1)}),
    "DirectionalPenalty": (calling(ws.DirectionalPenalty), BATCH | {"perturbation": lambda model, x, y: 0 * x}),
    "GradientObjective": (calling(ws.GradientObjective), BATCH | {"penalty": lambda g, x, y, f: g.flatten(1).sum(1)}),
    "FastGradients": (fast, BATCH | {"objective": ws.Plain()}),
    "gap": (gap, BATCH | {"objective": ws.GradientPenalty(METRIC, 0.1), "reference": None}),
    "evaluate": (ws.evaluate, BATCH | {"suite": [A.FGSM(0.1)], "memory": None, "progress": None, "seed": 0}),
    "FGSM": (calling(A.FGSM), BATCH | {"epsilon": 0.1}),
    "PGD": (calling(A.PGD), BATCH | {"epsilon": 0.1, "step": 0.1, "iterations": 1}),
    "Square": (calling(A.Square), BATCH | {"epsilon": 0.1, "queries": 1}),
    "WassersteinFGSM": (calling(A.WassersteinFGSM), BATCH | {"epsilon": 0.1, "metric": METRIC}),
    "AutoAttack": (calling(A.AutoAttack), BATCH | {"epsilon": 0.1}),
    "MultiTargetedPGD": (calling(A.MultiTargetedPGD), BATCH | {"epsilon": 0.1, "step": 0.1, "iterations": 1}),
    "certify": (lambda model, **options: ws.certify(evaluated(model), **options), SMOOTHED | {"select": 2}),
    "Smoothed": (lambda images, **options: ws.Smoothed(**options)(images), SMOOTHED),
    "label_flips": (V.label_flips, {"model": net, "images": images, "reach": 1}),
    "translate": (V.translate, {"images": images, "shift": 1}),
    "rotate": (V.rotate, {"images": images, "degrees": 5.0}),
    "elastic": (V.elastic, {"images": images, "displacement": 1.0}),
    "corrupt": (V.corrupt, {"images": images, "kind": "blur", "severity": 1}),
    "metric_noise": (V.metric_noise, {"images": images, "metric": METRIC, "size": 0.1}),
}


def call(name: str, **mistake: object) -> object:
    function, arguments = CALLS[name]
    made = {key: value() if value in (images, small, net, labels) else value for key, value in arguments.items()}
    return function(**made | mistake)


@pytest.mark.parametrize("name", CALLS)
def test_the_call_without_a_mistake_is_right(name: str) -> None:
    call(name)


BAD_TENSORS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "list": lambda: [[0.5]],
    "numpy": lambda: images().numpy(),
    "meta": lambda: images().to("meta"),
    "sparse": lambda: images().to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(1, 4, 4), torch.rand(1, 4, 5)]),
    "mkldnn": lambda: images().to_mkldnn(),
    "half": lambda: images().half(),
    "bfloat16": lambda: images().bfloat16(),
    "integers": lambda: images().long(),
    "complex": lambda: images().cfloat(),
    "empty": lambda: images()[:0],
    "no pixels": lambda: images()[..., :0],
    "single": lambda: images()[0],
    "number": lambda: torch.tensor(0.5),
}
TENSORS = [(name, key) for name, (_, made) in CALLS.items() for key in made if made[key] in (images, small)]
BAD_LABELS: dict[str, Callable[[], object]] = {
    "list": lambda: [0, 2],
    "numpy": lambda: np.array([0, 2]),
    "none": lambda: None,
    "meta": lambda: labels().to("meta"),
    "sparse": lambda: labels().to_sparse(),
    "too large": lambda: torch.tensor([0, 3]),
    "negative": lambda: torch.tensor([0, -1]),
    "too few": lambda: torch.tensor([0]),
    "number": lambda: torch.tensor(1),
    "bool": lambda: torch.tensor([True, False]),
}
BAD_MODELS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "class": lambda: nn.ReLU,
    "function": lambda: lambda x: x,
    "other channels": lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten()),
    "other size": lambda: nn.Sequential(nn.Flatten(), nn.Linear(17, 3)),
    "normalized, other size": lambda: ws.Normalized(nn.Sequential(nn.Flatten(), nn.Linear(17, 3)), 0.5, 0.5),
    "normalized, other channels": lambda: ws.Normalized(net(), [0.5] * 3, [0.5] * 3),
    "half": lambda: net().half(),
    "a number": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(32, 1)),
}
BAD_METRICS: dict[str, object] = {
    "none": None,
    "norm": ws.DualNorm(),
    "class": ws.Euclidean,
    "graph": GRAPH,
    "word": "wasserstein",
}
BAD_FUNCTIONS: dict[str, object] = {
    "float": lambda x: 0.5,
    "none": lambda x: None,
    "numpy": lambda x: np.zeros(len(x)),
    "sum": lambda x: x.sum(),
    "images": lambda x: x,
    "constant": lambda x: torch.zeros(len(x)),
    "detached": lambda x: x.detach().sum((1, 2, 3)),
    "integers": lambda x: x.sum((1, 2, 3)).long(),
    "complex": lambda x: x.sum((1, 2, 3)).cfloat(),
    "two arguments": lambda x, y: x.sum((1, 2, 3)),
    "no function": 3,
    "class": nn.ReLU,
    "unfit model": nn.Linear(7, 3),
    "model of another precision": nn.Sequential(nn.Flatten(), nn.Linear(16, 1).double(), nn.Flatten(0)),
    "model elsewhere": nn.Sequential(nn.Flatten(), nn.Linear(16, 1, device="meta"), nn.Flatten(0)),
}


def refused(name: str, **mistake: object) -> str:
    """The message of the refusal; the error comes from this library, and is one line."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"(?s)^.{30,}$") as caught:
        call(name, **mistake)
    assert "wassersmooth" in str(caught.traceback[-1].path), "it is raised by the library itself"
    if name != "NoisyInputs":  # its noise is drawn before the model is asked
        assert torch.equal(torch.get_rng_state(), before)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 420
    return message


@pytest.mark.parametrize(("name", "key"), TENSORS, ids=[f"{name}-{key}" for name, key in TENSORS])
def test_images_and_vectors(name: str, key: str) -> None:
    for made in BAD_TENSORS.values():
        assert "; got" in refused(name, **{key: made()})


@pytest.mark.parametrize("name", [name for name, (_, made) in CALLS.items() if "labels" in made])
def test_labels(name: str) -> None:
    for made in BAD_LABELS.values():
        assert "labels" in refused(name, labels=made())


@pytest.mark.parametrize("name", [name for name, (_, made) in CALLS.items() if "model" in made])
@pytest.mark.parametrize("mistake", BAD_MODELS)
def test_models(name: str, mistake: str) -> None:
    message = refused(name, model=BAD_MODELS[mistake]())
    if mistake.startswith("other") or mistake == "normalized, other size":
        assert message.startswith("the model cannot process images of 1 x 4 x 4 (")


FULL = [name for name, (_, made) in CALLS.items() if "metric" in made and name not in ("interpolate", "GradientPenalty")]


@pytest.mark.parametrize("name", [*FULL, "GradientPenalty"])
def test_metrics(name: str) -> None:
    for mistake, metric in BAD_METRICS.items():
        if name != "GradientPenalty" or mistake != "norm":  # a penalty is what the norm is for
            assert refused(name, metric=metric).startswith(("metric must be ", "a certificate needs noise with the same"))


@pytest.mark.parametrize("name", [name for name, (_, made) in CALLS.items() if "f" in made])
def test_functions_of_images(name: str) -> None:
    for f in BAD_FUNCTIONS.values():
        refused(name, f=f)


@pytest.mark.parametrize("name", ["GradientPenalty", "Tikhonov", "NoisyInputs"])
def test_strengths(name: str) -> None:
    """The square of 1e200 is infinite, and that of 1e20 is in float32."""
    for eta in (
        1e200,
        1e20,
        math.nan,
        math.inf,
        -0.1,
        True,
        "0.1",
        None,
        [0.1],
        10**400,
        torch.tensor(1e20),
        torch.ones(2),
        Fraction(10**400),
    ):
        assert refused(name, eta=eta).startswith("eta must be ")
    refused(name, eta=torch.tensor(0.1, device="meta"))
    call(name, eta=1e18)


@pytest.mark.parametrize(
    ("name", "mistake", "words"),
    [
        ("evaluate", {"memory": 3}, "memory must be a mutable mapping .*; got int; a dict is one"),
        ("evaluate", {"memory": ()}, "memory must be a mutable mapping .*; got tuple"),
        ("evaluate", {"progress": 3}, r"progress must be a function of \(done, total, name\).*; got int"),
        ("evaluate", {"progress": lambda: None}, "progress must be .* takes other arguments"),
        ("evaluate", {"seed": torch.rand(3, 3)}, r"seed must be an integer .*; got a tensor of shape \(3, 3\)"),
        ("evaluate", {"suite": {"mine": lambda x: x}}, "the suite's 'mine' must be a function .* takes other arguments"),
        ("Plain", {"loss": nn.CrossEntropyLoss}, "loss must be a function .*; got the class CrossEntropyLoss itself"),
        ("Plain", {"loss": lambda outputs: outputs}, "loss must be a function .* takes other arguments"),
        ("PGD", {"loss": nn.Linear(2, 2)}, r"loss must be a function .* takes other arguments"),
        ("WassersteinFGSM", {"loss": lambda outputs: outputs}, r"loss must be a function .* takes other arguments"),
        ("AdversarialTraining", {"attack": lambda x: x}, "attack must be a function .* takes other arguments"),
        ("AdversarialTraining", {"attack": net()}, "attack must be a function .* takes other arguments"),
        ("DirectionalPenalty", {"perturbation": lambda x: x}, "perturbation must be a function .* takes other arguments"),
        ("gap", {"objective": ws.Plain()}, "objective must be a GradientPenalty; got Plain"),
        ("gap", {"reference": "exact"}, "engine must be one of .*; got 'exact'"),
        ("grid", {"weight": lambda d: 1.0}, "weight must be a function .* takes other arguments"),
        ("grid", {"weight": lambda dy, dx: None}, "weight must return a number; got None"),
        ("grid", {"weight": lambda dy, dx: "heavy"}, "weight must return a number; got 'heavy'"),
        ("grid", {"weight": float}, "weight must be a name, a function .*; got the class float itself"),
        ("grid", {"weight": torch.ones(4).to_sparse()}, "weight must be an ordinary dense tensor; got the layout"),
        ("grid", {"weight": torch.ones(4, device="meta")}, "weight must be an ordinary dense tensor; got .* meta"),
        ("rotate", {"degrees": "ten"}, "degrees must be one number, or one per image, .*; got 'ten'"),
        ("rotate", {"degrees": None}, "degrees must be one number, or one per image, .*; got None"),
        ("rotate", {"degrees": torch.ones(2, device="meta")}, "degrees must be an ordinary dense tensor; got .* meta"),
        ("rotate", {"degrees": 10**400}, "degrees must be one number"),
        ("translate", {"shift": torch.rand(2, 2)}, "shift must be a whole number of pixels; got a tensor"),
        ("metric_noise", {"size": 1e200}, "size must be a finite number of at least 0 and at most 1e.18; got 1e.200"),
        ("PGD", {"step": 1e200}, "step must be a finite number of at least 0 and at most 1e.18; got 1e.200"),
        (
            "log_volume",
            {"metric": ws.Wasserstein(GRAPH, mass=1e200)},
            "mass must be a finite number in torch.float32; got 1e.200",
        ),
        ("elastic", {"smoothness": 1e9}, "smoothness must be a finite number of at least 0 and at most 16; got 1000000000"),
        ("interpolate", {"y": torch.full(SHAPE, math.nan)}, "y must be finite; got nan"),
        ("interpolate", {"x": torch.full(SHAPE, math.inf)}, "x must be finite; got inf"),
    ],
)
def test_other_mistakes(name: str, mistake: dict[str, object], words: str) -> None:
    assert re.match(words, refused(name, **mistake))


@pytest.mark.parametrize("std", [1e-46, 1e-40, 0.0, -0.1, math.nan, "0.5", None, True, [], ["a"], torch.rand(2, 3), object()])
def test_a_normalization_without_an_inverse(std: object) -> None:
    with pytest.raises(ValueError, match=r"^std must be .*; got .*; .*$"):
        ws.Normalized(net(), 0.5, std)  # type: ignore[arg-type]


def test_a_normalization_is_judged_by_the_precision_of_the_model() -> None:
    with pytest.raises(ValueError, match=r"^std must be positive, at least 6\.1e-05 for this model; got 1e-05"):
        ws.Normalized(net().half(), 0.5, 1e-5)
    outputs = ws.Normalized(nn.Identity(), 0.5, 2e-38)(torch.ones(SHAPE))
    assert torch.isfinite(outputs).all()


def test_normalized_takes_tensors_only() -> None:
    with pytest.raises(ValueError, match=r"^images must be a tensor .*; got ndarray; convert with torch\.as_tensor"):
        ws.Normalized(net(), 0.5, 0.5)(images().numpy())


@pytest.mark.parametrize("name", [name for name in CALLS if name != "grid"])
def test_tensors_made_in_inference_mode_are_used_like_any_others(name: str) -> None:
    expected = call(name)
    arguments = CALLS[name][1]
    with torch.inference_mode():
        made = {key: value() for key, value in arguments.items() if value in (images, small, labels)}
    torch.manual_seed(0)
    received = call(name, **made)
    if isinstance(expected, Tensor) and name not in ("elastic", "metric_noise"):
        torch.testing.assert_close(received, expected)


def test_a_gradient_flows_beside_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x, v = images(), small()
    for method in ("mv", "quad"):
        weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
        metric = ws.Wasserstein(ws.PixelGraph.grid(4, 4, 1, weight=weight))
        getattr(metric.cometric(x), method)(v).sum().backward()
        assert weight.grad is not None
        there = images().requires_grad_()
        getattr(METRIC.cometric(there), method)(v).sum().backward()
        assert there.grad is not None


def _penalty(g: Tensor, inputs: Tensor, labels: Tensor, outputs: Tensor) -> Tensor:
    return g.flatten(1).square().sum(1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, y: ws.GradientObjective(_penalty)(net(), x.to_sparse(), y), "inputs must be an ordinary dense tensor"),
        (lambda x, y: ws.GradientObjective(_penalty)(net(), x.to("meta"), y), "inputs must be an ordinary dense tensor"),
        (lambda x, y: ws.FastGradients(ws.Plain(), net(), progress=math.nan), "progress must be a function"),
        (lambda x, y: ws.engines.FiniteDifference(verify=x), "verify must be"),
        (lambda x, y: ws.engines.ForwardMode(verify="no"), "verify must be one of False, True; got 'no'"),
        (
            lambda x, y: ws.Plain()(nn.Sequential(nn.BatchNorm2d(1), net()), x[:1, :, :1, :1], y[:1]),
            r"a batch norm in training mode needs more than one value per channel; got a batch of \(1, 1, 1, 1\)",
        ),
        (
            lambda x, y: ws.GradientPenalty(ws.Euclidean(), 0.1, loss=F.cross_entropy)(net(), x, y.int()),
            "the loss cannot take outputs .* labels torch.int32",
        ),
        (
            lambda x, y: gap(ws.GradientPenalty(ws.Euclidean(), 0.1), net().requires_grad_(False), x, y),
            "got no parameter that requires grad",
        ),
    ],
)
def test_what_random_calls_found(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(torch.rand(2, 1, 4, 4), torch.tensor([0, 2]))


def test_every_way_in_which_torch_says_that_a_layer_does_not_fit() -> None:
    """A product that torch computes in batches is reported in other words; channels_last decides which it is."""
    x = torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last)
    for made in (x, x.contiguous()):
        with pytest.raises(ValueError, match=r"^the model cannot process images of 3 x 2 x 2 \("):
            A.FGSM(0.1)(nn.Linear(7, 3), made, torch.zeros(1, dtype=torch.int64))
    single = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"^the model cannot process images of 2 x 2 \("):
        ws.GradientPenalty(ws.Euclidean(), 0.1)(single, torch.rand(2, 2, 2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("pixels", [(2, 2), (3, 2)])
def test_one_image_without_its_batch_for_a_model_with_group_norm(pixels: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3))
    objective = ws.GradientObjective(lambda g, inputs, labels, outputs: g.flatten(1).square().sum(1))
    with pytest.raises(ValueError, match=r"^the model cannot process images of \d x \d \(.*; convert them to the channels"):
        objective(model, torch.rand(3, *pixels), torch.zeros(3, dtype=torch.int64))


def test_labels_that_a_loss_of_ones_own_has_no_class_for() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"^the loss cannot take outputs .*out of bounds.*; pass labels that it takes"):
        ws.Plain(nn.CrossEntropyLoss(reduction="none"))(model, torch.rand(1, 1, 2, 2), torch.tensor([2]))
