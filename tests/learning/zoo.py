"""Tiny models, one for each kind of layer that a penalty has to go through, on images of 8 x 8 pixels."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3
SIZE = 8


def _conv(*between: nn.Module, channels: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4, 3, stride=2, padding=1), *between, nn.Flatten(), nn.Linear(4 * 16, CLASSES))


class FunctionalNorms(nn.Module):
    """Calls its norms as functions, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(F.batch_norm(self.first(x), None, None, self.scale, training=True))
        x = F.instance_norm(x, weight=self.scale)
        x = torch.layer_norm(x.flatten(1), (64,))
        return self.last(F.softmax(x, dim=1) * x.softmax(-1) + F.mish(x))


class VisionTransformer(nn.Module):
    """Patches, a class token, one encoder layer with fused attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 4) * 0.1)
        self.position = nn.Parameter(torch.randn(1, 5, 4) * 0.1)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout, "gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.block(x))[:, 0])


class FusedAttention(nn.Module):
    """Calls the fused kernel itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, 0]).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).flatten(1))


class Residual(nn.Module):
    """A pre-activation block with a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.depthwise(F.softplus(self.norm(x)))
        return self.last(x.square().mean((2, 3)))


class Masked(nn.Module):
    """Draws its own mask, as dropout does, by an operator that is the same traced and untraced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.softplus(self.first(x.flatten(1)))
        return self.last(hidden * (torch.rand_like(hidden) > 0.5))


# name -> (maker, whether the model is put in training mode)
ZOO: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "batch_norm_train": (lambda: _conv(nn.BatchNorm2d(4), nn.Softplus()), True),
    "batch_norm_eval": (lambda: _conv(nn.BatchNorm2d(4), nn.Softplus()), False),
    "layer_norm": (lambda: _conv(nn.LayerNorm((4, 4, 4)), nn.GELU()), True),
    "group_norm": (lambda: _conv(nn.GroupNorm(2, 4), nn.SiLU()), True),
    "instance_norm_train": (lambda: _conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Tanh()), True),
    "instance_norm_eval": (lambda: _conv(nn.InstanceNorm2d(4, affine=True), nn.Tanh()), False),
    "rms_norm": (lambda: _conv(nn.RMSNorm((4, 4)), nn.ELU()), True),
    "dropout": (lambda: _conv(nn.Softplus(), nn.Dropout(0.4), nn.Dropout2d(0.3)), True),
    "depthwise": (lambda: _conv(nn.GELU(), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.SiLU()), True),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        True,
    ),
    "glu_mish": (lambda: _conv(nn.Mish(), nn.Flatten(), nn.Linear(64, 128), nn.GLU()), True),
    "functional_norms": (FunctionalNorms, True),
    "residual_train": (Residual, True),
    "vision_transformer": (VisionTransformer, True),
    "vision_transformer_dropout": (lambda: VisionTransformer(0.3), True),
    "fused_attention": (FusedAttention, False),
}


def make(name: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> nn.Module:
    maker, training = ZOO[name]
    torch.manual_seed(1)
    model = maker().to(device=device, dtype=dtype).train(training)
    with torch.no_grad():  # away from the special values of an initialization
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=dtype).to(device))
    return model


def smooth_net(device: str = "cpu", dtype: torch.dtype = torch.float64, channels: int = 1) -> nn.Module:
    torch.manual_seed(2)
    return _conv(nn.Softplus(), channels=channels).to(device=device, dtype=dtype)


class DropsLayers(nn.Module):
    """Leaves out its second layer half of the time, by a random number that is not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.first, self.second, self.last = (nn.Linear(SIZE * SIZE, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        if self.draw() < 0.5:
            hidden = hidden + torch.tanh(self.second(hidden))
        scores: Tensor = self.last(hidden)
        return scores


def batch(
    size: int = 4, device: str = "cpu", dtype: torch.dtype = torch.float64, channels: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, channels, SIZE, SIZE, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return images.to(device=device, dtype=dtype), labels.to(device)
