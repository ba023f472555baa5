"""The networks: classifiers of torchvision and timm by name, and a critic of the size of StyleGAN2's discriminator."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wassersmooth.study.errors import StudyError
from wassersmooth.study.models import ResNet20

CLASSES = 10

# One or two of each family.
SWEPT = (
    *(f"torchvision:{name}" for name in ("alexnet", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2")),
    *(f"torchvision:{name}" for name in ("densenet121", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small")),
    *(f"torchvision:{name}" for name in ("mobilenet_v3_large", "mnasnet0_5", "shufflenet_v2_x0_5", "efficientnet_b0")),
    *(f"torchvision:{name}" for name in ("efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "convnext_tiny")),
    *(f"torchvision:{name}" for name in ("vit_b_16", "swin_t", "swin_v2_t", "maxvit_t")),
    *(f"timm:{name}" for name in ("resnet26d", "resnest14d", "repvgg_a0", "ghostnet_100", "efficientnet_lite0", "rexnet_100")),
    *(f"timm:{name}" for name in ("mobilenetv4_conv_small", "convnextv2_atto", "edgenext_xx_small", "nf_regnet_b0")),
    *(f"timm:{name}" for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "cait_xxs24_224", "xcit_nano_12_p16_224")),
    *(f"timm:{name}" for name in ("mixer_s32_224", "poolformer_s12", "coatnet_nano_rw_224", "levit_128s", "visformer_tiny")),
)


class Discriminator(nn.Module):
    """A residual critic of the size of StyleGAN2's at 128 pixels: 24 million parameters, leaky relu, one score."""

    def __init__(self, size: int = 128, channels: int = 128, most: int = 512) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.blocks, self.skips = nn.ModuleList(), nn.ModuleList()
        while size > 4:
            out = min(2 * channels, most)
            convolutions = nn.Conv2d(channels, channels, 3, 1, 1), nn.Conv2d(channels, out, 3, 2, 1)
            self.blocks.append(nn.Sequential(convolutions[0], nn.LeakyReLU(0.2), convolutions[1], nn.LeakyReLU(0.2)))
            self.skips.append(nn.Conv2d(channels, out, 1, bias=False))
            channels, size = out, size // 2
        self.last = nn.Conv2d(channels + 1, channels, 3, 1, 1)
        self.dense = nn.Sequential(nn.Linear(channels * size * size, channels), nn.LeakyReLU(0.2), nn.Linear(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(x), 0.2)
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = (block(x) + skip(F.avg_pool2d(x, 2))) * 0.5**0.5
        spread = (x.var(0, unbiased=False) + 1e-8).sqrt().mean().expand(len(x), 1, *x.shape[2:])  # over the batch
        scores: Tensor = self.dense(F.leaky_relu(self.last(torch.cat([x, spread], 1)), 0.2).flatten(1))
        return scores


def build(name: str, size: int, classes: int = CLASSES) -> nn.Module:
    """A network without trained weights, in training mode, for images of this size."""
    library, _, architecture = name.partition(":")
    torch.manual_seed(0)
    if name == "resnet20":
        return ResNet20(3, classes, "softplus")
    if name == "discriminator":
        return Discriminator(size)
    if library == "torchvision":
        return _torchvision(architecture, size, classes)
    if library == "timm":
        return _timm(architecture, size, classes)
    raise StudyError(f"a network is resnet20, discriminator, torchvision:NAME or timm:NAME; got {name!r}")


def without_randomness(model: nn.Module) -> nn.Module:
    """The same network with all dropout and stochastic depth at rate 0, so that two passes are the same."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower() or "stochastic" in type(module).__name__.lower():
            for rate in ("p", "drop_prob"):
                if isinstance(getattr(module, rate, None), float):
                    setattr(module, rate, 0.0)
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def _torchvision(architecture: str, size: int, classes: int) -> nn.Module:
    models = _library("torchvision.models")
    maker = getattr(models, architecture, None)
    if maker is None:
        raise StudyError(f"torchvision has no network {architecture!r}")
    takes_size = architecture.startswith(("vit", "maxvit"))
    options: dict[str, Any] = {"weights": None, "num_classes": classes}
    if takes_size:
        options |= {"image_size": size} if architecture.startswith("vit") else {"input_size": (size, size)}
    model: nn.Module = maker(**options)
    return model


def _timm(architecture: str, size: int, classes: int) -> nn.Module:
    timm = _library("timm")
    model: nn.Module = timm.create_model(architecture, pretrained=False, num_classes=classes, drop_rate=0.0)
    if "img_size" in inspect.signature(type(model).__init__).parameters:
        model = timm.create_model(architecture, pretrained=False, num_classes=classes, drop_rate=0.0, img_size=size)
    return model


def library_version(name: str) -> dict[str, str]:
    """The library that a network comes from and its version; nothing for a network of this project."""
    library = name.partition(":")[0]
    try:
        return {library: importlib.metadata.version(library)} if ":" in name else {}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _library(name: str) -> Any:
    package = name.partition(".")[0]
    try:
        _import_torchvision()  # timm imports it, too
        return importlib.import_module(name)
    except ImportError as error:
        raise StudyError(f"{package} is not installed; pip install {package}") from error


def _import_torchvision() -> None:
    """Import torchvision, also beside a torch of another build, where its compiled operators, of detectors, do not load."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for registrations in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
            sys.modules[registrations] = ModuleType(registrations)
        importlib.import_module("torchvision")
