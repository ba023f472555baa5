"""Reference implementations: scalar objectives from first-order gradients and dense matrices, with central differences."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wassersmooth.geometry.metrics import Metric


def gradient_penalty(model: nn.Module, images: Tensor, labels: Tensor, metric: Metric, eta: float, of: str = "loss") -> Tensor:
    """eta^2 * mean g' L g, with g by one backward pass and L as a dense matrix."""
    L = metric.cometric(images).as_matrix()
    x = images.detach().requires_grad_()
    outputs = model(x)
    functions = [F.cross_entropy(outputs, labels, reduction="sum")] if of == "loss" else outputs.sum(0).unbind()
    total = torch.zeros((), dtype=images.dtype, device=images.device)
    for function in functions:
        g = torch.autograd.grad(function, x, retain_graph=True)[0].flatten(1)
        total = total + torch.einsum("bi,bij,bj->b", g, L, g).mean()
    return eta**2 * total


def differences(value: Callable[[], Tensor], parameters: list[Tensor], h: float = 3e-4, seed: int = 0) -> Tensor:
    """The derivative of a scalar along one random direction in each parameter, to fourth order in h."""
    generator = torch.Generator().manual_seed(seed)
    slopes = []
    for parameter in parameters:
        direction = _direction(parameter, generator)
        total = 0.0
        for steps, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
            with torch.no_grad():
                parameter.add_(direction, alpha=steps * h)
            total += weight * float(value())
            with torch.no_grad():
                parameter.add_(direction, alpha=-steps * h)
        slopes.append(total / (12 * h))
    return torch.tensor(slopes, dtype=torch.float64)


def along(gradients: list[Tensor], parameters: list[Tensor], seed: int = 0) -> Tensor:
    """The same derivatives from gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [(g * _direction(p, generator)).sum().double().cpu() for g, p in zip(gradients, parameters, strict=True)]
    )


def _direction(parameter: Tensor, generator: torch.Generator) -> Tensor:
    direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return (direction / direction.norm()).to(device=parameter.device, dtype=parameter.dtype)


def gradients_of(scalar: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True, materialize_grads=True))


def flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])
