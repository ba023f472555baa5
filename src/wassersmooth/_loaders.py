"""Images and labels out of a data loader, checked batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from wassersmooth import _checks, _model_checks
from wassersmooth.model_state import RandomState

MOST_BYTES = 8 * 2**30  # of images held in memory without max_images: 13,000 of ImageNet, 700,000 of CIFAR-10


def gather(loader: object, max_images: int | None) -> tuple[Tensor, Tensor]:
    """The first ``max_images`` images of a loader and their labels, on the CPU; the random state stays as it was.

    # shape: (B, C, H, W) and (B,)
    """
    images: list[Tensor] = []
    labels: list[Tensor] = []
    count, bytes_held = 0, 0
    state = RandomState(torch.device("cpu"))  # a shuffling loader draws from it
    try:
        for x, y in pairs(loader, "images must be a tensor (B, C, H, W), or"):
            _check(x, y, len(images) + 1, images[0] if images else None)
            x, y = x.detach(), y.detach()
            if max_images is not None:
                x, y = x[: max_images - count], y[: max_images - count]
            images.append(x.cpu())
            labels.append(y.cpu())
            count += len(x)
            bytes_held += x.numel() * x.element_size()
            if count == max_images:
                break
            if max_images is None and bytes_held > MOST_BYTES:
                raise ValueError(
                    f"the loader's images must fit into memory, {MOST_BYTES // 2**30} GiB; got more after {count} images; "
                    f"measure on a part of them with max_images={max(1, count // 2)}"
                )
    finally:
        state.restore()
    return torch.cat(images), torch.cat(labels)


def pairs(loader: object, expected: str = "loader must be") -> Iterator[tuple[Tensor, Tensor]]:
    """The batches (images, labels) of a loader, at least one, as they come; their values are not checked.

    Arguments:
        expected: how the error about something else than a loader begins.
    """
    if isinstance(loader, (str, bytes, Mapping, Tensor)) or not isinstance(loader, Iterable):
        remedy = "; wrap it: DataLoader(dataset, batch_size=128)" if isinstance(loader, Dataset) else ""
        raise ValueError(
            f"{expected} an iterable of batches (images, labels) such as a DataLoader; got {type(loader).__name__}{remedy}"
        )
    number = 0
    for number, batch in enumerate(loader, 1):
        pair = batch if isinstance(batch, Sequence) and not isinstance(batch, Tensor) and len(batch) == 2 else None
        if pair is None or not all(isinstance(part, Tensor) for part in pair) or pair[0].dim() < 2:
            got = (
                f"{type(batch).__name__} of {', '.join(type(part).__name__ for part in pair)}" if pair else type(batch).__name__
            )
            raise ValueError(
                f"a loader must give batches (images, labels) of tensors; got {got} as batch {number}; {_remedy(batch)}"
            )
        yield pair[0], pair[1]
    if not number:
        raise ValueError(
            "the loader must have at least one batch (images, labels); got none; a generator can be used only once"
        )


def _remedy(batch: object) -> str:
    """How batches of another kind become pairs."""
    if isinstance(batch, Mapping):
        keys = ", ".join(map(repr, batch))
        return f"it has {keys}: pick two of these, such as ((batch['image'], batch['label']) for batch in loader)"
    if isinstance(batch, Sequence) and len(batch) > 2 and all(isinstance(part, Tensor) for part in batch[:2]):
        return "leave out the rest, such as (batch[:2] for batch in loader)"
    return "a data set is wrapped in torch.utils.data.DataLoader(dataset, batch_size=128)"


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first tensor, to which batches of a loader are moved; the CPU for a model without any."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _check(images: Tensor, labels: Tensor, number: int, first: Tensor | None) -> None:
    where = f"images of the loader's batch {number}"
    _checks.batch(where, images)
    _model_checks.class_labels(labels, images)
    _checks.pixels(where, images)
    if first is not None and (images.shape[1:], images.dtype) != (first.shape[1:], first.dtype):
        raise ValueError(
            f"{where} must be like those of the first, {tuple(first.shape[1:])} of {first.dtype}; "
            f"got {tuple(images.shape[1:])} of {images.dtype}; resize and convert them in the loader"
        )
