"""Small classifiers of sklearn's digits, trained in about a second, and models masked by construction."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from wassersmooth.normalized import Normalized


@lru_cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels: 8x8, one channel, in [0, 1]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )


@lru_cache
def trained(eta_sq: float = 0.0, seed: int = 0, epochs: int = 10) -> nn.Module:
    """A trained network in eval mode with its normalization inside; `eta_sq` is the factor of a Euclidean penalty."""
    images, labels, *_ = digits()
    model = Normalized(network(seed), 0.3, 0.38)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=generator).split(100):
            x = images[index].clone().requires_grad_(eta_sq > 0)
            loss = F.cross_entropy(model(x), labels[index])
            if eta_sq:
                (g,) = torch.autograd.grad(loss * len(index), x, create_graph=True)
                loss = loss + eta_sq * g.square().sum((1, 2, 3)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


class QuantizedInput(nn.Module):
    """Rounds the image to a few gray levels: the gradient is exactly zero."""

    def __init__(self, model: nn.Module, levels: int = 16) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x * self.levels).round() / self.levels)


class Saturated(nn.Module):
    """Scores so large that the softmax rounds to 1 and the cross-entropy has no gradient."""

    def __init__(self, model: nn.Module, factor: float = 1e3) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.model(x)


class Shattered(nn.Module):
    """Adds an oscillation to the image whose amplitude is negligible and whose slope dominates the gradient."""

    def __init__(self, model: nn.Module, size: float = 0.005, frequency: float = 1e4) -> None:
        super().__init__()
        self.model, self.size, self.frequency = model, size, frequency

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x + self.size * torch.sin(self.frequency * x))


class AutocastInside(nn.Module):
    """Computes in half precision and returns float32, so that it looks like any other model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.dtype):
            scores: Tensor = self.model(x)
        return scores.float()


class RandomOutput(nn.Module):
    """Noise on the scores."""

    def __init__(self, model: nn.Module, size: float = 3.0) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, x: Tensor) -> Tensor:
        scores = self.model(x)
        return scores + self.size * torch.randn_like(scores)


Change = Callable[[Tensor], Tensor]


class Around(nn.Module):
    """Applies a function before and another after a model."""

    def __init__(self, model: nn.Module, before: Change | None = None, after: Change | None = None) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before or (lambda x: x), after or (lambda z: z)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.model(self.before(x)))
