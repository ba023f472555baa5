"""Bad input is refused before any arithmetic, in words: what was received and what to do."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws

GRAPH = ws.PixelGraph.grid(4, 5, 1)
WASSERSTEIN = ws.Wasserstein(GRAPH)
EUCLIDEAN = ws.Euclidean()


def image(value: float = 0.5, **change: float) -> Tensor:
    x = torch.full((2, 3, 4, 5), value)
    for entry in change.values():
        x[1, 2, 3, 4] = entry  # the last pixel of the last image: a check of the first one is not enough
    return x


def assert_explains(text: str, minimum: int = 40) -> None:
    """An error says more than that something is wrong."""
    assert len(text) >= minimum, f"too short to hold what was received, expected and a remedy: {text!r}"


BAD_IMAGES: dict[str, tuple[Tensor, str]] = {
    "negative": (image(bad=-0.25), r"-0\.25"),
    "nan": (image(bad=math.nan), "(?i)nan|finite"),
    "infinite": (image(bad=math.inf), "(?i)inf|finite"),
    "rank 3": (image()[0], r"3, 4, 5"),
    "rank 5": (image()[None], r"1, 2, 3, 4, 5"),
    "wrong width": (torch.ones(2, 3, 4, 6), "6"),
    "wrong height": (torch.ones(2, 3, 7, 5), "7"),
    "transposed": (torch.ones(2, 3, 5, 4), r"5x4; use PixelGraph\.grid\(5, 4, radius\)"),
    "channels last": (torch.ones(2, 4, 5, 3), r"move the channels forward with \.permute\(0, 3, 1, 2\)"),
    "empty batch": (torch.ones(0, 3, 4, 5), r"0"),
    "no channels": (torch.ones(2, 0, 4, 5), r"0"),
    "int64": (torch.ones(2, 3, 4, 5, dtype=torch.int64), "int64"),
    "uint8": (torch.ones(2, 3, 4, 5, dtype=torch.uint8), "uint8"),
    "bool": (torch.ones(2, 3, 4, 5, dtype=torch.bool), "bool"),
    "complex": (torch.ones(2, 3, 4, 5, dtype=torch.complex64), "complex"),
    "float16": (torch.ones(2, 3, 4, 5, dtype=torch.float16), "float16"),
}

ANY_METRIC = {"nan", "infinite", "rank 3", "rank 5", "empty batch", "int64", "uint8"}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_wasserstein_refuses(name: str, device: str) -> None:
    x, words = BAD_IMAGES[name]
    with pytest.raises(ValueError, match=words) as error:
        WASSERSTEIN.cometric(x.to(device))
    assert_explains(str(error.value))


@pytest.mark.parametrize("name", sorted(ANY_METRIC))
def test_euclidean_refuses(name: str, device: str) -> None:
    x, words = BAD_IMAGES[name]
    with pytest.raises(ValueError, match=words) as error:
        EUCLIDEAN.cometric(x.to(device))
    assert_explains(str(error.value))


def test_negative_image_error_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"(?i)normali[sz]"):
        WASSERSTEIN.cometric(image(bad=-2.0))


def test_nothing_is_clamped() -> None:
    with pytest.raises(ValueError, match=r"-1e-0?7"):
        WASSERSTEIN.cometric(image(bad=-1e-7))


@pytest.mark.parametrize("options", [{"mass": 0.5}, {"uniform": True}, {"scale": "paper"}])
def test_options_do_not_excuse_a_negative_image(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"-0\.25"):
        ws.Wasserstein(GRAPH, **options).cometric(image(bad=-0.25))  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", [WASSERSTEIN, EUCLIDEAN], ids=["wasserstein", "euclidean"])
@pytest.mark.parametrize("method", ["mv", "quad", "solve", "norm_sq", "in_range", "kappa"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (3, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5), (2, 60)])
def test_covector_of_another_shape_is_refused(metric: ws.Euclidean, method: str, shape: tuple[int, ...]) -> None:
    """No broadcasting: one channel or one image in place of three would give a number, and not the right one."""
    cometric = metric.cometric(image())
    with pytest.raises(ValueError, match=", ".join(str(n) for n in shape)):
        getattr(cometric, method)(torch.ones(shape))


@pytest.mark.parametrize("metric", [WASSERSTEIN, EUCLIDEAN], ids=["wasserstein", "euclidean"])
def test_covector_of_integers_is_refused(metric: ws.Euclidean) -> None:
    with pytest.raises(ValueError, match="int64"):
        metric.cometric(image()).mv(torch.ones(2, 3, 4, 5, dtype=torch.int64))


# Graphs --------------------------------------------------------------------------------------------------------------


def grid(**change: object) -> Callable[[], object]:
    arguments = {"height": 4, "width": 5, "radius": 1} | change
    return lambda: ws.PixelGraph.grid(**arguments)  # type: ignore[arg-type]


BAD_GRAPHS: dict[str, tuple[Callable[[], object], str]] = {
    "radius 0": (grid(radius=0), "0"),
    "radius negative": (grid(radius=-3), "-3"),
    "radius fraction": (grid(radius=1.5), r"1\.5"),
    "radius nan": (grid(radius=math.nan), "nan"),
    "height 0": (grid(height=0), "0"),
    "width negative": (grid(width=-2), "-2"),
    "one pixel is isolated": (grid(height=1, width=1), r"neighbor; got .* 1x1, .* use at least two pixels, or Euclidean\(\)$"),
    "neighborhood": (grid(neighborhood="hexagon"), "hexagon"),
    "weight name": (grid(weight="triangle"), "triangle"),
    "weight function zero": (grid(weight=lambda dy, dx: 0.0), "0"),
    "weight function negative": (grid(weight=lambda dy, dx: -1.5), r"-1\.5"),
    "weight function nan": (grid(weight=lambda dy, dx: math.nan), "nan"),
    "weight function infinite": (grid(weight=lambda dy, dx: math.inf), "inf"),
    "weight tensor too short": (grid(weight=torch.ones(3)), "3"),
    "weight tensor too long": (grid(weight=torch.ones(7)), "7"),
    "weight tensor of rank 2": (grid(weight=torch.ones(2, 2)), "2, 2"),
    "weight tensor negative": (grid(weight=torch.tensor([1.0, 1.0, -0.5, 1.0])), r"-0\.5"),
    "weight tensor zero": (grid(weight=torch.zeros(4)), "0"),
    "weight tensor nan": (grid(weight=torch.full((4,), math.nan)), "nan"),
    "weight tensor integer": (grid(weight=torch.ones(4, dtype=torch.int64)), "int64"),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_graph_refuses(name: str) -> None:
    make, words = BAD_GRAPHS[name]
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert_explains(str(error.value))


@pytest.mark.parametrize(("option", "known"), [({"neighborhood": "hexagon"}, "disk"), ({"weight": "triangle"}, "gaussian")])
def test_unknown_names_list_the_known_ones(option: dict[str, str], known: str) -> None:
    with pytest.raises(ValueError, match=known):
        grid(**option)()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_integers(kind: type) -> None:
    graph = ws.PixelGraph.grid(kind(4), kind(5), kind(1))
    assert repr(graph) == repr(GRAPH)
    assert all(type(number) is int for number in (graph.height, graph.width, graph.radius))
    x = image().double()
    assert torch.equal(ws.calculus.laplacian(total, x, WASSERSTEIN, probes=kind(2)), torch.zeros(2))
    assert torch.equal(ws.calculus.exp_map(x, torch.zeros_like(x), WASSERSTEIN, steps=kind(1)), x)
    assert WASSERSTEIN.cometric(x).logdet_estimate(kind(1))[0].shape == (2,)
    with pytest.raises(ValueError, match="radius must be an integer of at least 1"):
        ws.PixelGraph.grid(4, 5, kind(0))
    for wrong in (np.float64(2.0), np.bool_(True)):
        with pytest.raises(ValueError, match="radius must be an integer"):
            ws.PixelGraph.grid(4, 5, wrong)  # type: ignore[arg-type]


# Metrics and calculus ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "metric"}, "metric.*(unit|paper)|(unit|paper).*metric"),
        ({"mass": -0.5}, r"-0\.5"),
        ({"mass": math.nan}, "nan"),
        ({"mass": math.inf}, "inf"),
    ],
)
def test_metric_refuses(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        ws.Wasserstein(GRAPH, **options)  # type: ignore[arg-type]
    assert_explains(str(error.value), minimum=25)


def total(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


X = image()
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "laplacian kind": (lambda: ws.calculus.laplacian(total, X, WASSERSTEIN, kind="cotangent"), "cotangent"),
    "probes 0": (lambda: ws.calculus.laplacian(total, X, WASSERSTEIN, probes=0), "0"),
    "probes negative": (lambda: ws.calculus.laplacian(total, X, WASSERSTEIN, probes=-2), "-2"),
    "steps 0": (lambda: ws.calculus.exp_map(X, torch.zeros_like(X), WASSERSTEIN, steps=0), "0"),
    "velocity shape": (lambda: ws.calculus.exp_map(X, torch.zeros(2, 3, 4, 6), WASSERSTEIN), "6"),
    "tangent shape": (lambda: ws.calculus.christoffel(X, X[:1], X, WASSERSTEIN), "1, 3, 4, 5"),
    "drift of another size": (lambda: ws.calculus.beltrami_drift(torch.rand(1, 3, 6, 6), WASSERSTEIN), "6x6"),
    "tangent of the Hessian": (lambda: ws.calculus.hessian(total, X, None, X, WASSERSTEIN), "NoneType"),
    "f returns a scalar": (lambda: ws.calculus.gradient(lambda x: x.sum(), X, WASSERSTEIN), r"\(2,\)|\(B,\)"),
    "f returns a matrix": (lambda: ws.calculus.laplacian(lambda x: x.flatten(1), X, WASSERSTEIN), "60"),
    "negative image": (lambda: ws.calculus.log_volume(image(bad=-0.25), WASSERSTEIN), r"-0\.25"),
    "logdet probes 0": (lambda: WASSERSTEIN.cometric(X).logdet_estimate(0), "0"),
    "logdet probes negative": (lambda: WASSERSTEIN.cometric(X).logdet_estimate(-4), "-4"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_call_refuses(name: str) -> None:
    call, words = BAD_CALLS[name]
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert_explains(str(error.value), minimum=25)


@pytest.mark.parametrize("uniform", [1, 0, 1.0, "True", None, torch.tensor(True)])
def test_a_flag_is_true_or_false_and_no_number(uniform: object) -> None:
    with pytest.raises(ValueError, match="uniform must be one of False, True; got"):
        ws.Wasserstein(GRAPH, uniform=uniform)  # type: ignore[arg-type]


def test_names_and_flags_of_numpy_will_do() -> None:
    graph = ws.PixelGraph.grid(4, 5, 1, np.str_("square"))  # type: ignore[arg-type]
    assert ws.Wasserstein(graph, np.str_("unit"), uniform=np.bool_(False)) == WASSERSTEIN  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ws.Euclidean, ws.Wasserstein])
def test_a_class_is_no_metric(kind: type) -> None:
    with pytest.raises(ValueError, match=rf"metric must be .* got the class {kind.__name__} itself"):
        ws.calculus.gradient(lambda x: x.sum((1, 2, 3)), image(), kind)  # type: ignore[arg-type]
