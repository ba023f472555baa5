"""Networks by name: the paper's ResNet-20, ResNet-18, a small one for digits, timm models and user factories."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wassersmooth import _checks
from wassersmooth.model_state import call_model, logits_of, preserve_state
from wassersmooth.normalized import Normalized, find_normalization
from wassersmooth.study import own_code
from wassersmooth.study.config import Model
from wassersmooth.study.data import Dataset
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.hf_models import HF, hf_model, import_package

WITHOUT_CODE = ("timm:", HF)  # names of models that run no code but that of an installed package
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "softplus": nn.Softplus,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A): subsampled, with new channels zero."""

    def __init__(self, channels: int, out_channels: int, stride: int, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.activation = ACTIVATIONS[activation]()
        self.stride, self.new_channels = stride, out_channels - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(x)))))
        result: Tensor = self.activation(y + self.skip(x))
        return result

    def skip(self, x: Tensor) -> Tensor:
        """What the shortcut adds."""
        half = self.new_channels // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half)) if self.new_channels else x


class ProjectedBlock(BasicBlock):
    """The same with a shortcut that a 1x1 convolution projects where the shape changes (option B)."""

    def __init__(self, channels: int, out_channels: int, stride: int, activation: str) -> None:
        super().__init__(channels, out_channels, stride, activation)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out_channels or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def skip(self, x: Tensor) -> Tensor:
        projected: Tensor = self.shortcut(x)
        return projected


class ResNet(nn.Module):
    """A 3x3 convolution, residual blocks, the mean over the pixels, and a linear layer."""

    def __init__(self, conv: nn.Conv2d, blocks: list[BasicBlock], features: int, classes: int, activation: str) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(conv.out_channels)
        self.activation = ACTIVATIONS[activation]()
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.activation(self.norm(self.conv(x))))
        scores: Tensor = self.head(features.mean((2, 3)))
        return scores


class ResNet20(ResNet):
    """He et al.'s network for CIFAR: 3 x 3 blocks of 16, 32 and 64 channels, 0.27 M parameters; `width` is the 16."""

    def __init__(self, channels: int, classes: int, activation: str = "softplus", width: int = 16) -> None:
        a, b, c = width, 2 * width, 4 * width
        conv = nn.Conv2d(channels, a, 3, 1, 1, bias=False)
        plan = [(a, a, 1)] * 3 + [(a, b, 2)] + [(b, b, 1)] * 2 + [(b, c, 2)] + [(c, c, 1)] * 2
        super().__init__(conv, [BasicBlock(*entry, activation) for entry in plan], c, classes, activation)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # the head keeps torch's default, smaller: softplus features are far from zero
                nn.init.kaiming_normal_(module.weight)


class ResNet18(ResNet):
    """The customary ResNet-18 for 32x32 pixels: a 3x3 stem, 64 to 512 channels, 11.2 M parameters; `width` is the 64."""

    def __init__(self, channels: int, classes: int, activation: str = "softplus", width: int = 64) -> None:
        a, b, c, d = (width * 2**stage for stage in range(4))
        plan = [(a, a, 1)] * 2 + [(a, b, 2), (b, b, 1), (b, c, 2), (c, c, 1), (c, d, 2), (d, d, 1)]
        blocks: list[BasicBlock] = [ProjectedBlock(*entry, activation) for entry in plan]
        conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)  # after the blocks: a seed belongs to an order
        super().__init__(conv, blocks, d, classes, activation)


class SmallNet(nn.Module):
    """Three convolutions and a linear layer for images of 16 to 32 pixels; no layer couples the images of a batch."""

    def __init__(self, channels: int, classes: int, activation: str = "softplus") -> None:
        super().__init__()
        widths = [channels, 16, 32, 64]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(64 * 4, classes)
        gain = math.sqrt(2.0) if activation == "relu" else 2.0  # the others have slope 1/2 at zero
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, gain / math.sqrt(layer.weight[0].numel()))
                nn.init.zeros_(cast(Tensor, layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return scores


def names_code(config: Model) -> bool:
    """Whether the model is ``module:factory``, so that building it imports and runs that module."""
    return ":" in config.model and not config.model.startswith(WITHOUT_CODE)


def refuse_code(config: Model, named_by: Path, remedy: str) -> None:
    """Refuse a model whose code a file names: what is typed is consent, what somebody's file says is not."""
    if not names_code(config):
        return
    module, _, factory = config.model.partition(":")
    raise StudyError(
        f"{named_by} names the model {config.model}, so loading it would run the code of {factory} in the module {module} "
        f"({own_code.place_of(config.model)}); only built-in models are loaded from a file; if you trust that code: {remedy}"
    )


def build(config: Model, channels: int, classes: int, mean: list[float], std: list[float], seed: int) -> nn.Module:
    """The network, initialized by the seed, with normalization unless the configuration turns it off.

    The global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(config, channels, classes)
        return Normalized(network, mean, std) if config.normalize else network


def build_for(config: Model, data: Dataset, seed: int) -> nn.Module:
    return build(config, data.channels, data.classes, *data.normalization(), seed)


def require_fitting(config: Model, data: Dataset, to_train: bool = True) -> None:
    """Pass one image through the network, so that a mistake shows before anything is written.

    Arguments:
        to_train: whether some parameters must be trainable.
    """
    image = data.train.images[:1]
    model = build_for(config, data, seed=0)
    if isinstance(model, Normalized) and find_normalization(model.model) is not None:
        raise StudyError(
            f"model {config.model} has a wassersmooth.Normalized inside; expected a network that takes normalized images, "
            "since a study adds the normalization of its training images; return the network alone, or give --no-normalize"
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise StudyError(f"model {config.model} has lazy layers, which cannot be stored and loaded; give them their sizes")
    if to_train and not any(parameter.requires_grad for parameter in model.parameters()):
        raise StudyError(
            f"model {config.model} has frozen parameters only (requires_grad is False); expected some to train; leave out "
            "requires_grad_(False) for at least one layer"
        )
    model = model.to(image.device).eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            scores: object = logits_of(model(image))
    except Exception as error:  # a user's network can raise anything
        raise StudyError(
            f"model {config.model} does not take an image of shape {tuple(image.shape)} ({type(error).__name__}: "
            f"{_checks.first_line(error, 200)}); "
            "expected (1, channels, height, width) of the data set; fit the model to it, or images of a folder to the model by "
            "--image-size"
        ) from error
    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if got != (1, data.classes):
        raise StudyError(
            f"model {config.model} returns {got} for one image; expected scores of shape (1, {data.classes}), one for each "
            "class; end it with a layer of that many outputs"
        )


def require_training_in_batches(model: nn.Module, data: Dataset, batch_size: int, processes: int) -> None:
    """Refuse a last batch of one image if the model cannot train on it, as with batch-norm, before the others are trained."""
    images = data.train.images
    sizes = (batch_size, len(images) % batch_size)
    if 1 not in [size // processes for size in sizes]:  # of the process with the smallest part of a batch
        return
    with preserve_state(model, images.device), torch.no_grad():
        try:
            call_model(model.train(), images[:1])
        except ValueError as error:
            parts = f"{len(images)} training images in batches of {batch_size}"
            shared = f", which {processes} processes share," if processes > 1 else ""
            raise StudyError(
                f"the model does not train on one image alone ({_checks.first_line(error)}), and {parts}{shared} leave one; "
                "choose another --batch-size, or fewer images with --train-images"
            ) from error


def _network(config: Model, channels: int, classes: int) -> nn.Module:
    if config.model == "small":
        return SmallNet(channels, classes, config.activation)
    if config.model == "resnet20":
        return ResNet20(channels, classes, config.activation)
    if config.model == "resnet18":
        return ResNet18(channels, classes, config.activation)
    if config.model.startswith("timm:"):
        return _timm(config.model.removeprefix("timm:"), channels, classes)
    if config.model.startswith(HF):
        return hf_model(config.model, trained=False)
    if names_code(config):
        return _from_factory(config.model, channels, classes)
    near = did_you_mean(config.model, ("small", "resnet20", "resnet18"))
    known = "model must be small, resnet20, resnet18, timm:NAME, hf:FOLDER or module:factory"
    raise StudyError(f"{known}; got {config.model!r}{near and '; ' + near}")


def _timm(name: str, channels: int, classes: int) -> nn.Module:
    timm = import_package("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise StudyError(f"timm {timm.__version__} has no model {name!r}; timm.list_models() has the names")
    model: nn.Module = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes)
    return model


def _from_factory(path: str, channels: int, classes: int) -> nn.Module:
    model = own_code.made(path, "model", "factory(channels=..., classes=...)", channels=channels, classes=classes)
    if not isinstance(model, nn.Module):
        raise StudyError(f"model {path}: the factory returned {type(model).__name__}; expected a torch.nn.Module; return one")
    if next(model.parameters(), None) is None:
        raise StudyError(f"model {path}: the factory returned a model without parameters; expected some to train; add layers")
    return model
