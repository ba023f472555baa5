"""Errors about numbers, images and metrics: each says what was received, what was expected, and the remedy.

Errors about models and labels are in :mod:`wassersmooth._model_checks`. Shapes and dtypes are always checked, values where
they are visible (:mod:`wassersmooth.visibility`).
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassersmooth.visibility import values_are_visible

_warned: set[str] = set()  # warnings that were given, each once in a process
FLOATS = (torch.float32, torch.float64)
WITHOUT_FLOAT64 = ("mps",)  # types of devices: Apple's GPUs compute in float32 at most
LARGEST_STRENGTH = 1e18  # of a penalty, of noise or of an attack: its square is a float32
# Optional packages by extra, as pyproject.toml has them: how each is imported, and its name.
_SAME = ("filelock", "jinja2", "matplotlib", "optuna", "pooch", "rich", "safetensors", "scipy", "tyro")
EXTRAS = {"study": {**dict(zip(_SAME, _SAME, strict=True)), "PIL": "pillow", "sklearn": "scikit-learn"}, "ot": {"ot": "POT"}}
ROUNDING = 1e-3  # allowed above 1: one step of float16, in which images may have been stored


class NotFiniteError(ValueError):
    """NaN or infinity where numbers must be finite. Training treats it as a diverged loss."""


class MissingExtraError(ImportError):
    """An optional package is not installed; the message has the command that installs it."""


def choice(name: str, received: object, known: Iterable[object]) -> None:
    """Check that an option is one of the known values, and of the same type: neither True nor 1.0 is 1."""
    options = tuple(known)
    if not any(_option_type(received) is _option_type(option) and received == option for option in options):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}; got {shown(received)}")


def float64_on(device: torch.device, purpose: str) -> None:
    """Check that a device has float64."""
    if device.type in WITHOUT_FLOAT64:
        raise ValueError(f"{purpose} needs float64, which the device {device} does not have; move model and images to the CPU")


def _option_type(value: object) -> type:
    """Treat NumPy scalars like Python scalars."""
    if isinstance(value, (bool, np.bool_)):
        return bool
    return next((base for base in (str, Integral) if isinstance(value, base)), type(value))


def shown(received: object, longest: int = 60) -> str:
    """The repr of what was received on one line, or its type where that is too long."""
    if isinstance(received, Tensor):
        return f"a tensor of shape {tuple(received.shape)}" if not received.is_nested else "a nested tensor"
    text = " ".join(repr(received).split())
    return text if len(text) <= longest else type(received).__name__


def positive_integer(name: str, received: object, remedy: str = "") -> int:
    """Check an integer of at least 1, and return it as a Python int; NumPy integers are accepted."""
    if isinstance(received, bool) or not isinstance(received, Integral) or received < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {shown(received)}{remedy and '; ' + remedy}")
    return int(received)


def python_number(received: Any) -> Any:
    """Convert numbers of other libraries, such as NumPy's, to float; return anything else unchanged, also what is too large."""
    try:
        return float(received) if isinstance(received, Real) and type(received).__module__ != "builtins" else received
    except OverflowError:  # a fraction may be larger than any float
        return received


def format_number(number: float) -> str:
    """The shortest text that reads back as exactly this number: 0.5, and 1 rather than 1.0."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def non_negative_number(name: str, received: object, remedy: str = "", most: float = LARGEST_STRENGTH) -> float:
    """Check a finite number from 0 to ``most``, and return it as a Python number; NumPy numbers are accepted."""
    number = python_number(received)
    real = isinstance(number, int | float) and not isinstance(number, bool)
    if not real or not 0 <= number <= most:
        limit = f" and at most {most:g}" if real and most < number < float("inf") else ""
        raise ValueError(
            f"{name} must be a finite number of at least 0{limit}; got {shown(received)}{remedy and '; ' + remedy}"
        )
    return number  # type: ignore[no-any-return]


def refuse_gray_levels(epsilon: float) -> None:
    """Refuse an L-infinity epsilon above 1 in pixel units: 1 already allows every image, so it must be meant in gray levels."""
    if epsilon > 1:
        raise ValueError(f"epsilon must be at most 1 in pixel units; got {epsilon:g}; write {epsilon:g}/255 for gray levels")


def pixel_epsilon(received: object) -> float:
    """Check an L-infinity epsilon in pixel units, and return it as a Python number."""
    epsilon = non_negative_number("epsilon", received, "an epsilon is a number in pixel units: 8/255 in [0, 1], not 8")
    refuse_gray_levels(epsilon)
    return epsilon


def generator(received: object) -> None:
    """Check a random generator; a seed is not one."""
    if received is not None and not isinstance(received, torch.Generator):
        got, seed = (received, int(received)) if isinstance(received, Integral) else (type(received).__name__, 0)
        raise ValueError(f"generator must be a torch.Generator or None; got {got}; use torch.Generator().manual_seed({seed})")


def seed(received: object, remedy: str) -> int | None:
    """Check a seed, an integer that every generator takes, or None, and return it as a Python number."""
    if received is None:
        return None
    if isinstance(received, bool) or not isinstance(received, Integral) or not 0 <= int(received) < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, or None; got {shown(received)}; {remedy}")
    return int(received)


def without_inference_mode(received: Tensor) -> Tensor:
    """A copy of a tensor made under torch.inference_mode, which autograd cannot use; anything else unchanged."""
    if torch.compiler.is_compiling() or not isinstance(received, Tensor) or not received.is_inference():
        return received
    return received.clone()


def dense(name: str, tensor: Tensor) -> None:
    """Check that a tensor has values in memory: it is neither on the meta device, nor sparse or nested."""
    if torch.compiler.is_compiling():
        return
    kind, remedy = "", "convert with .to_dense()"
    if tensor.is_nested:
        kind, remedy = "a nested tensor", "pad it to one size, torch.nested.to_padded_tensor(...)"
    elif tensor.layout is not torch.strided:
        kind = f"the layout {tensor.layout}"
    elif tensor.is_meta:
        kind, remedy = "a tensor on the meta device, which has no values", "create it on another device"
    if kind:
        raise ValueError(f"{name} must be an ordinary dense tensor; got {kind}; {remedy}")


SHAPES = {3: "(B, C, L)", 4: "(B, C, H, W)", 5: "(B, C, D, H, W)"}


def batch(
    name: str,
    tensor: object,
    size: tuple[int, ...] | None = None,
    remedy_for_size: tuple[str, str] = ("graph", "PixelGraph.grid({}, {}, radius)"),
    dims: tuple[int, ...] = (4,),
) -> None:
    """Check a floating-point batch of images ``(B, C, H, W)`` with at least one, and its size if one is given.

    Arguments:
        size: what follows the channels, for signals and volumes too.
        remedy_for_size: what has that size, and how to make one of another.
        dims: how many dimensions are accepted where no size is given.
    """
    dims = dims if size is None else (2 + len(size),)
    shape = " or ".join(SHAPES[dim] for dim in dims)
    if not isinstance(tensor, Tensor):
        remedy = f"convert with torch.as_tensor({name})"
        raise ValueError(f"{name} must be a tensor of shape {shape}; got {type(tensor).__name__}; {remedy}")
    dense(name, tensor)
    if tensor.dim() not in dims:
        remedy = "; add the missing dimension: [None] for a single image, [:, None] for channels"
        remedy = remedy if tensor.dim() == dims[0] - 1 else ""
        raise ValueError(f"{name} must have shape {shape}; got {tuple(tensor.shape)}{remedy}")
    if tensor.dtype not in FLOATS:
        remedy = " (divide 8-bit images by 255)" if not tensor.is_floating_point() else ""
        raise ValueError(f"{name} must be float32 or float64; got {tensor.dtype}; convert with .float(){remedy}")
    if tensor.numel() == 0:
        raise ValueError(f"{name} must hold at least one image; got shape {tuple(tensor.shape)}; skip empty batches")
    if size is not None and tuple(tensor.shape[2:]) != size:
        received, expected = ("x".join(map(str, shape)) for shape in (tensor.shape[2:], size))
        channels_last = tuple(tensor.shape[1:-1]) == size
        owner, maker = remedy_for_size
        forward = f"move the channels forward with .permute(0, {len(size) + 1}, {', '.join(map(str, range(1, len(size) + 1)))})"
        remedy = forward if channels_last else f"use {maker.format(*tensor.shape[2:])}"
        raise ValueError(f"{name} must be {expected} pixels, the size of the {owner}; got {received}; {remedy}")


def labeled_batch(name: str, tensor: object, labels: object) -> None:
    """:func:`batch` of pictures, or of signals or volumes where there is a label for each: a picture has 3 dimensions too."""
    several = all(isinstance(t, Tensor) and not t.is_nested and t.dim() > 0 for t in (tensor, labels))
    batch(name, tensor, dims=(4, 3, 5) if several and len(tensor) == len(labels) else (4,))  # type: ignore[arg-type]


def like(name: str, tensor: object, reference: Tensor) -> Tensor:
    """Check that a covector or perturbation has the shape, dtype and device of the images ``reference``, and return it."""
    batch(name, tensor, dims=(reference.dim(),))
    assert isinstance(tensor, Tensor)
    for what in ("shape", "dtype", "device"):
        received, expected = getattr(tensor, what), getattr(reference, what)
        if received != expected:
            remedy = f"; convert with .to({expected})" if what == "dtype" else ""
            raise ValueError(f"{name} must have the {what} of the images, {_plain(expected)}; got {_plain(received)}{remedy}")
    return without_inference_mode(tensor)


def finite(name: str, tensor: Tensor) -> None:
    """Check that no value is NaN or infinite."""
    if values_are_visible(tensor) and not bool(torch.isfinite(tensor).all()):
        raise NotFiniteError(f"{name} must be finite; got {first_not_finite(tensor)}")


def masses(name: str, images: Tensor, most: float = float("inf")) -> None:
    """Check that images are finite, non-negative and at most ``most``. They are refused rather than clamped."""
    if not values_are_visible(images):
        return
    low, high = torch.aminmax(images.detach())
    if bool((low >= 0) & (high < float("inf")) & (high <= most)):  # one read, and so one synchronization
        return
    finite(name, images)
    if low < 0:
        raise ValueError(
            f"{name} must be non-negative masses; got a minimum of {low.item():.4g}; "
            "pass images in [0, 1] and put the normalization inside the model (wassersmooth.Normalized)"
        )
    raise ValueError(
        f"{name} must be in [0, 1]; got a maximum of {high.item():.6g}; "
        "divide 8-bit images by 255, and put the normalization inside the model (wassersmooth.Normalized)"
    )


def pixels(name: str, images: Tensor) -> None:
    """Check that images are in [0, 1], up to rounding: a resized white image need not be exactly 1."""
    masses(name, images, 1 + ROUNDING)


def expected_pixels(name: str, images: Tensor) -> None:
    """Check that images are finite, and warn once in a process where they are not in [0, 1]: eta then means something else."""
    if not values_are_visible(images):
        return
    low, high = torch.aminmax(images.detach())
    if bool((low >= 0) & (high <= 1 + ROUNDING)):  # one read, and so one synchronization
        return
    finite(name, images)
    if "scale" not in _warned:
        warnings.warn(
            f"{name} are not in [0, 1] but from {low.item():.3g} to {high.item():.3g}, and eta counts in these units: "
            "after transforms.Normalize with a std of 0.25, the penalty is 16 times weaker than for images in [0, 1]; take "
            "transforms.Normalize(mean, std) out of the data, and train wassersmooth.Normalized(model, mean, std)",
            stacklevel=2,
        )
        _warned.add("scale")


def weights(received: Tensor, relations: int, name: str = "weight", what: str = "relation") -> None:
    """Check that there is one positive weight per neighbor relation, or edge."""
    dense(name, received)
    if received.shape != (relations,) or received.dtype not in FLOATS:
        remedy = "convert with .flatten()" if received.numel() == relations else f"give one for each {what}"
        remedy = remedy if received.shape != (relations,) else "convert with .float()"
        raise ValueError(
            f"{name} must be a float tensor with one weight per {what}, shape ({relations},); "
            f"got {tuple(received.shape)} of {received.dtype}; {remedy}"
        )
    if values_are_visible(received) and not bool((usable := (received > 0) & torch.isfinite(received)).all()):
        remedy = "with a smaller radius" if what == "relation" else "of the list"
        raise ValueError(
            f"{name} must be positive and finite; got {received[~usable][0].item():.4g}; "
            f"learn the logarithm and pass .exp(), or leave the {what} out {remedy}"
        )


def extra(package: str, name: str, purpose: str) -> MissingExtraError:
    """The error for a missing optional package, with all others of its extra that are missing too.

    The caller raises it, so that the traceback points there.
    """
    listed = EXTRAS[name].items()
    missing = [title for module, title in listed if title == package or importlib.util.find_spec(module) is None] or [package]
    what, them = (f"package {missing[0]}", "it") if len(missing) == 1 else (f"packages {', '.join(missing)}", "them")
    return MissingExtraError(f"{purpose} needs the {what}; install {them} with: pip install 'wassersmooth[{name}]'")


def first_line(error: Exception, longest: int | None = None) -> str:
    """The first line of an error's message, to quote in another one; its class name if the message is empty."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if longest is None or len(line) <= longest else f"{line[:longest].rsplit(' ', 1)[0]} ..."


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def first_not_finite(tensor: Tensor) -> str:
    """The first NaN or infinity, and how many there are."""
    bad = ~torch.isfinite(tensor)
    return f"{tensor[bad].flatten()[0].item()} ({int(bad.sum())} of {tensor.numel()} values)"


def strength(name: str, received: object) -> None:
    """Check a non-negative float or 0-d tensor whose square is a float32; a tensor can change without recompiling."""
    if not isinstance(received, Tensor):
        non_negative_number(name, received)
        return
    dense(name, received)
    if received.dim() != 0 or not received.is_floating_point():
        raise ValueError(
            f"{name} must be a float or a floating-point tensor without dimensions; "
            f"got {received.dtype} of shape {tuple(received.shape)}"
        )
    if values_are_visible(received) and not 0 <= received.item() <= LARGEST_STRENGTH:
        raise ValueError(f"{name} must be finite, at least 0 and at most {LARGEST_STRENGTH:g}; got {received.item()}")


def metric(received: object) -> None:
    """Check that an object has a ``cometric`` method."""
    if isinstance(received, type) or not callable(getattr(received, "cometric", None)):
        if isinstance(received, type):
            remedy = "call it"
        else:
            graph = hasattr(received, "node_volumes")
            remedy = "wrap the graph as Wasserstein(graph)" if graph else "use Euclidean() if in doubt"
        raise ValueError(
            f"metric must be a metric such as Euclidean() or Wasserstein(graph); got {kind_of(received)}; {remedy}"
        )


def function(name: str, received: object, signature: str, arguments: int, **keywords: object) -> None:
    """Check that something can be called with so many arguments, as far as that is known without calling it."""
    if isinstance(received, type) or not callable(received):
        raise ValueError(f"{name} must be a function {signature}; got {kind_of(received)}; a lambda is one")
    if torch.compiler.is_compiling():
        return
    try:
        known = inspect.signature(getattr(received, "forward", received))
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        known.bind(*[None] * arguments, **keywords)
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function {signature}; got {shown(received, 40)}, which takes other arguments ({error}); "
            "wrap it in a lambda"
        ) from error


def kind_of(received: object) -> str:
    """The name of its type; a class is not one of its own instances."""
    return f"the class {received.__name__} itself" if isinstance(received, type) else type(received).__name__
