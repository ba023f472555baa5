"""Errors about models, their outputs and labels: each says what was received, what was expected, and the remedy."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from wassersmooth._checks import NotFiniteError, dense, finite, first_line, first_not_finite, kind_of
from wassersmooth.visibility import values_are_visible

# How torch reports operands of two dtypes. The word "dtype" alone is not enough: other errors contain it, too.
DTYPE_MISMATCH = re.compile(r"same dtype|expected scalar type|Input type \(|mixed dtype")

# How torch reports a layer that was made for inputs of another size or number of channels.
SHAPE_MISMATCH = re.compile(
    r"shapes cannot be multiplied|same reduction dim|size mismatch|expected (input|weight).* to have|[Ee]xpected \d+D"
    r"|Given (normalized_shape|groups)"
    r"|Kernel size can't be greater|Calculated padded input size|Output size is too small|[Pp]adding size should be"
    r"|must match the size|running_mean should contain|num_channels|is invalid for input of size|more than 1 spatial element"
    r"|must match the existing size|Dimension out of range|Expected size for first two dimensions"
    r"|equal to the number of channels in input|divisible by num_groups"
)


def module(received: object) -> None:
    """Check that a model is a module."""
    if not isinstance(received, torch.nn.Module):
        remedy = "wrap a function in a module"
        if isinstance(received, type) and issubclass(received, torch.nn.Module):
            remedy = f"make one: {received.__name__}(...)"
        raise ValueError(f"model must be a torch.nn.Module; got {kind_of(received)}; {remedy}")


def differentiable(model: torch.nn.Module) -> None:
    """Check that the parameters are not inference tensors, which autograd cannot use."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError("the model was created in torch.inference_mode and cannot have gradients; create or copy it outside")


def same_device(model: torch.nn.Module, images: Tensor) -> None:
    """Check that at least a part of the model is on the device of the images (a model may span several devices)."""
    module(model)
    devices = {tensor.device for group in (model.parameters(), model.buffers()) for tensor in group}
    if devices and images.device not in devices:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the model is on {found} and the images are on {images.device}; move one with .to(...)")


def explain_dtype_mismatch(model: torch.nn.Module, images: Tensor, error: Exception) -> None:
    """Raise a plainer error where torch failed because a model and its images have different dtypes."""
    held = (tensor for group in (model.parameters(), model.buffers()) for tensor in group)
    others = {tensor.dtype for tensor in held if tensor.is_floating_point()} - {images.dtype}
    if not others or not DTYPE_MISMATCH.search(str(error)):  # the model may cast by itself and fail for another reason
        return
    remedy = "model.float(), or a cast inside its forward" if images.dtype == torch.float32 else "images.float()"
    if others != {torch.float32} and images.dtype != torch.float32:
        remedy = "model.float() and images.float()"
    raise ValueError(
        f"the model has parameters or buffers in {', '.join(sorted(map(str, others)))} and cannot process images in "
        f"{images.dtype} ({first_line(error, 100)}); expected one precision; use {remedy}"
    ) from error


def explain_shape_mismatch(images: Tensor, error: Exception) -> None:
    """Raise a plainer error where torch failed because a model was made for images of another shape."""
    if "more than 1 value per channel" in str(error):
        raise ValueError(
            f"a batch norm in training mode needs more than one value per channel; got a batch of {tuple(images.shape)}; use "
            "larger batches, or model.eval()"
        ) from error
    if SHAPE_MISMATCH.search(str(error)):
        raise unfit(images, error) from error


def unfit(images: Tensor, error: Exception) -> ValueError:
    """The error about a model that cannot process these images."""
    last = images.dim() == 4 and images.shape[-1] <= 4 < images.shape[1]
    forward = " (channels come first: .permute(0, 3, 1, 2))" if last else ""
    return ValueError(
        f"the model cannot process images of {' x '.join(map(str, images.shape[1:]))} ({first_line(error, 120)}); convert "
        f"them to the channels and size that it was made for{forward}, or pass another model"
    )


def outputs(received: object, images: int) -> None:
    """Check that a model returns a tensor with one row per image."""
    if not isinstance(received, Tensor):
        raise ValueError(
            f"the model must return a tensor of outputs; got {type(received).__name__}; pick the logits in a wrapper"
        )
    if received.dim() == 0 or len(received) != images:
        raise ValueError(f"the model must return one row of outputs per image, {images}; got shape {tuple(received.shape)}")
    _refuse_integers(received)


def _refuse_integers(outputs: Tensor) -> None:
    """Refuse integer and bool outputs, which are labels rather than scores. A custom loss may take complex outputs."""
    if not outputs.is_floating_point() and not outputs.is_complex():
        raise ValueError(
            f"the model must return floating-point scores; got {outputs.dtype}; return them before .long() or argmax, "
            "or convert with .float()"
        )


def depends_on_images(received: Tensor) -> None:
    """Check that the outputs can be differentiated with respect to the images."""
    if not received.requires_grad:
        raise ValueError(
            "the outputs do not depend on the images in a differentiable way; "
            "look for .detach(), torch.no_grad(), rounding or an argmax in the model"
        )


def logits(received: object, images: Tensor, labels: Tensor | None = None) -> Tensor:
    """Check that a classifier returns finite scores ``(B, K)`` with K >= 2, and that every label is below K."""
    if not isinstance(received, Tensor) or received.dim() != 2 or len(received) != len(images) or received.shape[1] < 2:
        got = tuple(received.shape) if isinstance(received, Tensor) else f"{type(received).__name__}; return the logits alone"
        single = isinstance(received, Tensor) and received.shape[1:] == (1,)
        remedy = "; for a single logit z return torch.cat([0 * z, z], 1)" if single else ""
        if isinstance(received, Tensor) and received.dim() == 1 and not received.is_floating_point():
            remedy = "; return the scores themselves, without argmax"
        raise ValueError(
            f"the model must return scores of shape ({len(images)}, classes >= 2), one row per image; got {got}{remedy}"
        )
    _refuse_integers(received)
    finite("the model's outputs", received)
    if labels is not None and values_are_visible(received, labels):
        low, high = torch.aminmax(labels)
        if bool((low < 0) | (high >= received.shape[1])):
            raise ValueError(
                f"labels must be class indices from 0 to {received.shape[1] - 1}, since the model has {received.shape[1]} "
                f"outputs; got {int(low)} to {int(high)}; count classes from 0, or give the model more outputs"
            )
    return received


def class_labels(received: object, images: Tensor) -> None:
    """Check that there is one class index per image, on the device of the images."""
    expected = f"an integer tensor of shape ({len(images)},), one class index per image"
    if not isinstance(received, Tensor):
        raise ValueError(f"labels must be {expected}; got {type(received).__name__}; convert with torch.as_tensor(labels)")
    if received.device == images.device:  # a tensor on another device is refused below
        dense("labels", received)
    if received.shape != (len(images),) or received.dtype != torch.int64:
        one_each = received.shape == (len(images),)
        if received.is_floating_point():
            soft = "; an attack needs one class for each image, such as targets.argmax(1)" if received.dim() == 2 else ""
            remedy = "; convert with .long()" if one_each else soft
        else:
            single = received.shape == (len(images), 1)
            several = received.dim() == 2 and len(received) == len(images)
            remedy = "; convert with .long()" if one_each else "; pick one class of each row, .argmax(1)" if several else ""
            remedy = "; remove the dimension with .squeeze(1)" if single else remedy
        raise ValueError(f"labels must be {expected} (int64); got {tuple(received.shape)} of {received.dtype}{remedy}")
    if received.device != images.device:
        raise ValueError(f"labels must be on the device of the images, {images.device}; got {received.device}")


def labels(received: object, images: Tensor) -> None:
    """Check that there is one class index or one row of targets per image; the number of classes is not known yet."""
    if not isinstance(received, Tensor):
        raise ValueError(f"labels must be a tensor; got {type(received).__name__}; convert with torch.as_tensor(labels)")
    if received.device == images.device:  # a tensor on another device is refused below
        dense("labels", received)
    if received.dim() == 0 or len(received) != len(images):
        length = "a single number" if received.dim() == 0 else f"{len(received)} labels"
        raise ValueError(f"labels must match the images, one for each of {len(images)}; got {length}")
    if received.device != images.device:
        raise ValueError(f"labels must be on the device of the images, {images.device}; got {received.device}; use .to()")


def labels_for_outputs(received: Tensor, outputs: Tensor, softmax: bool = False) -> None:
    """Check that labels fit outputs of shape (B, k): indices below k, or targets of the same shape."""
    if outputs.dim() != 2:
        remedy = "add a dimension, outputs[:, None]" if outputs.dim() == 1 else "flatten them"
        raise ValueError(
            f"the model must return outputs of shape (B, classes); got {tuple(outputs.shape)}; {remedy}, or pass your own loss"
        )
    classes = outputs.shape[1]
    if softmax and classes < 2:
        raise ValueError(
            f"cross_entropy needs at least 2 outputs, since the softmax of a single one is always 1; got {classes}; "
            "use loss='binary_cross_entropy' with float targets of shape (B, 1)"
        )
    if received.is_floating_point():
        if received.shape != outputs.shape:
            one_each = "; add a dimension, targets[:, None]" if classes == 1 else "; convert class indices with .long()"
            raise ValueError(
                f"targets must have the shape of the outputs, {tuple(outputs.shape)}; got {tuple(received.shape)}"
                f"{one_each if received.dim() == 1 else ''}"
            )
        finite("targets", received)
        return
    if received.dtype != torch.int64 or received.dim() != 1:
        single = ".squeeze(1)" if received.dtype == torch.int64 else ".long()"
        rows = classes > 1 and received.shape == outputs.shape
        raise ValueError(
            f"labels must be class indices, int64 of shape (B,), or float targets of shape (B, {classes}); "
            f"got {received.dtype} of {tuple(received.shape)}; "
            f"{'convert rows of targets with .float()' if rows else f'convert indices with {single}'}"
        )
    if values_are_visible(received):
        low, high = torch.aminmax(received)
        if int(low) < 0 or int(high) >= classes:
            several, single = (
                "count classes from 0, or give the model more outputs",
                "a single output takes float targets (B, 1)",
            )
            raise ValueError(
                f"labels must be in 0..{classes - 1}, since the model has {classes} outputs; got {int(low)}..{int(high)}; "
                f"{single if classes == 1 else several}"
            )


def per_image_losses(received: object, images: int, what: str = "the loss") -> None:
    """Check that a loss, or another function of the outputs, returns one finite value per image."""
    if not isinstance(received, Tensor) or received.shape != (images,):
        shape = f"shape {tuple(received.shape)}" if isinstance(received, Tensor) else type(received).__name__
        several = isinstance(received, Tensor) and received.dim() > 1 and len(received) == images
        remedy = "average over the rest, .flatten(1).mean(1)" if several else "use reduction='none'"
        raise ValueError(f"{what} must return one value per image, shape ({images},); got {shape}; {remedy}")
    finite_losses(received, what)


def finite_losses(received: Tensor, what: str = "the loss") -> None:
    """Check that no loss is NaN or infinite."""
    if values_are_visible(received) and not bool(torch.isfinite(received).all()):
        raise NotFiniteError(
            f"{what} must be finite; got {first_not_finite(received.detach())}; "
            "lower the learning rate or eta, or look for NaN in the model's parameters"
        )


def depends_on_outputs(received: Tensor) -> None:
    """Check that the penalized function of the outputs, the loss or another one, can be differentiated."""
    if not received.requires_grad:
        raise ValueError(
            "what is penalized does not depend on the outputs in a differentiable way; look for .detach(), torch.no_grad(), "
            "rounding or an argmax in the loss, or in what was given as of="
        )


def per_image_penalties(received: object, images: int) -> None:
    """Check that a penalty has one finite value per image."""
    if not isinstance(received, Tensor) or received.shape != (images,):
        shape = f"shape {tuple(received.shape)}" if isinstance(received, Tensor) else type(received).__name__
        raise ValueError(
            f"penalty must return one value per image, shape ({images},); got {shape}; sum over the rest, .flatten(1).sum(1)"
        )
    if values_are_visible(received) and not bool(torch.isfinite(received).all()):
        raise NotFiniteError(
            f"the penalty must be finite; got {first_not_finite(received.detach())}; look for a division by zero, or a root "
            "or a logarithm of zero in it, or lower the learning rate"
        )
