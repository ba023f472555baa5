"""Every complaint about numbers, images and metrics: what was received, what was expected, and the remedy.

Those about models and labels are in :mod:`wassersmooth._model_checks`. Shapes and dtypes are checked always, values where they
are visible (:mod:`wassersmooth.visibility`).
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassersmooth.visibility import values_are_visible

FLOATS = (torch.float32, torch.float64)
ROUNDING = 1e-3  # above 1: one step of float16, in which images may have been stored or changed


class NotFiniteError(ValueError):
    """NaN or infinity where numbers have to be finite. Training takes it for a loss that has diverged."""


class MissingExtraError(ImportError):
    """An optional package that is not installed; the message is the command that installs it."""


def choice(name: str, received: object, known: Iterable[object]) -> None:
    """An option that is one of a few names, numbers or flags, and of its kind: True is not 1, and neither is 1.0."""
    options = tuple(known)
    if not any(_kind(received) is _kind(option) and received == option for option in options):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}; got {received!r}")


def _kind(value: object) -> type:
    """NumPy's own are as good as Python's."""
    if isinstance(value, bool | np.bool_):
        return bool
    return next((kind for kind in (str, Integral) if isinstance(value, kind)), type(value))


def positive_integer(name: str, received: object, remedy: str = "") -> int:
    """Comes back as an integer of Python's own; one of NumPy's will do."""
    if isinstance(received, bool) or not isinstance(received, Integral) or received < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {received!r}{remedy and '; ' + remedy}")
    return int(received)


def plain_number(received: Any) -> Any:
    """A number of NumPy's, or of another kind, as the float that torch, a repr and the compiler know; all else as it is."""
    return float(received) if isinstance(received, Real) and type(received).__module__ != "builtins" else received


def shortest(number: float) -> str:
    """As a repr writes a number: 0.5 and 1 as they are, and no number as another one."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def non_negative_number(name: str, received: object, remedy: str = "") -> float:
    """Comes back as a number of Python's own; one of NumPy's will do."""
    number = plain_number(received)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0; got {received!r}{remedy and '; ' + remedy}")
    return number


def generator(received: object) -> None:
    """Where random numbers come from; a seed is not yet one."""
    if received is not None and not isinstance(received, torch.Generator):
        got, seed = (received, int(received)) if isinstance(received, Integral) else (type(received).__name__, 0)
        raise ValueError(f"generator must be a torch.Generator or None; got {got}; use torch.Generator().manual_seed({seed})")


def batch(name: str, tensor: object, height: int | None = None, width: int | None = None) -> None:
    """A floating-point batch ``(B, C, H, W)`` with at least one image, of the given size where one is given."""
    if not isinstance(tensor, Tensor):
        remedy = f"convert with torch.as_tensor({name})"
        raise ValueError(f"{name} must be a tensor of shape (B, C, H, W); got {type(tensor).__name__}; {remedy}")
    if tensor.dim() != 4:
        remedy = "; add what is missing: [None] for a single image, [:, None] for channels" if tensor.dim() == 3 else ""
        raise ValueError(f"{name} must have shape (B, C, H, W); got {tuple(tensor.shape)}{remedy}")
    if tensor.dtype not in FLOATS:
        remedy = " (divide 8-bit images by 255)" if not tensor.is_floating_point() else ""
        raise ValueError(f"{name} must be float32 or float64; got {tensor.dtype}; convert with .float(){remedy}")
    if tensor.numel() == 0:
        raise ValueError(f"{name} must hold at least one image; got shape {tuple(tensor.shape)}; skip empty batches")
    if height is not None and tuple(tensor.shape[-2:]) != (height, width):
        received = "x".join(map(str, tensor.shape[-2:]))
        last = tuple(tensor.shape[1:3]) == (height, width)
        rows, columns = tensor.shape[-2:]
        remedy = (
            "bring channels forward with .permute(0, 3, 1, 2)" if last else f"use PixelGraph.grid({rows}, {columns}, radius)"
        )
        raise ValueError(f"{name} must be {height}x{width} pixels, the size of the graph; got {received}; {remedy}")


def like(name: str, tensor: object, reference: Tensor) -> None:
    """A covector or perturbation that belongs to the images ``reference``: same shape, dtype and device."""
    batch(name, tensor)
    assert isinstance(tensor, Tensor)
    for what in ("shape", "dtype", "device"):
        received, expected = getattr(tensor, what), getattr(reference, what)
        if received != expected:
            remedy = f"; convert with .to({expected})" if what == "dtype" else ""
            raise ValueError(f"{name} must have the {what} of the images, {_plain(expected)}; got {_plain(received)}{remedy}")


def finite(name: str, tensor: Tensor) -> None:
    if values_are_visible(tensor) and not bool(torch.isfinite(tensor).all()):
        raise NotFiniteError(f"{name} must be finite; got {first_not_finite(tensor)}")


def masses(name: str, images: Tensor, most: float = float("inf")) -> None:
    """Images as masses on pixels: finite, never negative, and not above ``most``. Refused rather than clamped."""
    if not values_are_visible(images):
        return
    low, high = torch.aminmax(images.detach())
    if bool((low >= 0) & (high < float("inf")) & (high <= most)):  # one look, and so one synchronization
        return
    finite(name, images)
    if low < 0:
        raise ValueError(
            f"{name} must be non-negative masses; got a minimum of {low.item():.4g}; "
            "hand over images in [0, 1] and put the normalization inside the model (wassersmooth.Normalized)"
        )
    raise ValueError(
        f"{name} must be in [0, 1]; got a maximum of {high.item():.6g}; "
        "divide 8-bit images by 255, and put the normalization inside the model (wassersmooth.Normalized)"
    )


def pixels(name: str, images: Tensor) -> None:
    """Images whose values are in [0, 1], or above by rounding: a resized white image need not be 1 exactly."""
    masses(name, images, 1 + ROUNDING)


def weights(received: Tensor, relations: int) -> None:
    """One positive weight per neighbor relation."""
    if received.shape != (relations,) or received.dtype not in FLOATS:
        raise ValueError(
            f"weight must be a float tensor with one weight per relation, shape ({relations},); "
            f"got {tuple(received.shape)} of {received.dtype}"
        )
    if values_are_visible(received) and not bool(((received > 0) & torch.isfinite(received)).all()):
        raise ValueError(
            f"weight must be positive and finite; got a minimum of {received.min().item():.4g}; "
            "learn the logarithm and pass .exp(), or leave the relation out with a smaller radius"
        )


def extra(package: str, name: str, purpose: str) -> MissingExtraError:
    """The error for a missing optional package; raised by the caller so that the traceback points there."""
    return MissingExtraError(f"{purpose} needs the package {package}; install it with: pip install 'wassersmooth[{name}]'")


def first_line(error: Exception, longest: int | None = None) -> str:
    """What an error says, in one line of a complaint of our own; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def first_not_finite(tensor: Tensor) -> str:
    bad = ~torch.isfinite(tensor)
    return f"{tensor[bad].flatten()[0].item()} ({int(bad.sum())} of {tensor.numel()} values)"


def strength(name: str, received: object) -> None:
    """A float, or a 0-d tensor (which can change without a new compilation); finite and not negative."""
    if not isinstance(received, Tensor):
        non_negative_number(name, received)
        return
    if received.dim() != 0 or not received.is_floating_point():
        raise ValueError(
            f"{name} must be a float or a floating-point tensor without dimensions; "
            f"got {received.dtype} of shape {tuple(received.shape)}"
        )
    if values_are_visible(received) and not 0 <= received.item() < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0; got {received.item()}")


def metric(received: object) -> None:
    """Something that gives every image its cometric."""
    if isinstance(received, type) or not callable(getattr(received, "cometric", None)):
        got = f"the class {received.__name__} itself" if isinstance(received, type) else type(received).__name__
        raise ValueError(
            f"metric must be a metric such as Euclidean() or Wasserstein(graph); got {got}; "
            "a PixelGraph is wrapped as Wasserstein(graph)"
        )
