"""Tensors follow the device of the images, whatever torch.set_default_device says.

A program that sets "cuda" there would otherwise mix devices. Here the default is the device "meta", whose tensors have no
values: whatever takes part in a result and is made there raises an error.
"""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws

SOURCE = Path(ws.__file__).parent
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
X = torch.rand(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Softplus(), nn.Flatten(), nn.Linear(144, 4)).eval()


def penalty(metric: ws.Wasserstein | ws.Deformations) -> Tensor:
    return ws.GradientPenalty(metric, 0.1)(MODEL, X, Y).total.detach()


MODEL = model()
EDGES = torch.tensor([[0, 1], [1, 2], [2, 0]])
GRAPHS: dict[str, Callable[[], ws.PixelGraph]] = {
    "constant": lambda: ws.PixelGraph.grid(8, 8, 2),
    "gaussian": lambda: ws.PixelGraph.grid(8, 8, 6, weight="gaussian"),
    "function": lambda: ws.PixelGraph.grid(8, 8, 2, weight=lambda dy, dx: 1 / (dy * dy + dx * dx)),
}
CASES: dict[str, Callable[[], Tensor]] = {
    **{f"penalty, {name}": lambda graph=graph: penalty(ws.Wasserstein(graph())) for name, graph in GRAPHS.items()},
    "penalty, joined": lambda: penalty(ws.Wasserstein(GRAPHS["constant"](), channels="joined")),
    "penalty, deformations": lambda: penalty(ws.Deformations(8, 8)),
    "table": lambda: GRAPHS["function"]().weight_table(X),
    "edges": lambda: ws.Wasserstein(ws.PixelGraph.from_edges(3, EDGES)).cometric(X[:, :, 0, :3]).logdet(),
    "volume": lambda: ws.Wasserstein(ws.PixelGraph.volume(2, 8, 8)).cometric(X[:, None]).quad(X[:, None]),
    "adversarial training": lambda: ws.AdversarialTraining(ws.attacks.PGD(0.1, 0.05, 2))(MODEL, X, Y).loss.detach(),
    "square": lambda: ws.attacks.Square(0.1, 5, norm="l2")(MODEL, X, Y),
    "jpeg": lambda: ws.variations.corrupt(X, "jpeg", 3),
    "pixelate": lambda: ws.variations.corrupt(X, "pixelate", 3),
    "evaluate": lambda: torch.tensor(list(ws.evaluate(MODEL, X, Y, "quick", seed=0).errors.values()), device="cpu"),
    "certify": lambda: ws.certify(MODEL, X, ws.Wasserstein(GRAPHS["constant"](), reference="ones"), 0.1, 100).geodesic(True),
    "smoothed": lambda: ws.Smoothed(MODEL, ws.Euclidean(), 0.1, 10, seed=None)(X).detach(),
    "ground metric": lambda: ws.fit_ground_metric((X, X.flip(3)), GRAPHS["function"](), iterations=1).standard_errors,
}


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_default_device(name: str) -> None:
    torch.manual_seed(0)
    expected = CASES[name]()
    torch.manual_seed(0)
    with torch.device("meta"):
        received = CASES[name]()
    torch.testing.assert_close(received, expected, equal_nan=True)


def test_every_new_tensor_says_where_it_is() -> None:
    for path in (path for folder in ("geometry", "learning", "robustness") for path in (SOURCE / folder).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES:
                of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
                named = any(keyword.arg in ("device", None) for keyword in call.keywords)
                assert named or not of_torch, f"{path}:{call.lineno} makes a tensor on the default device; give device="
