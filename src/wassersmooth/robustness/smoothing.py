"""Gaussian smoothing with a covariance that does not depend on the image: its noise, and the smoothed classifier.

Only such noise can be certified (docs/maths.md, section 9). The covariance is constant, so it is factored once: small images
are colored by a dense root of L, large ones by the edges of the graph, as :meth:`Cometric.sample` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wassersmooth import _checks, _model_checks
from wassersmooth.geometry.cometric import LARGEST_DENSE, Cometric
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.model_state import call_model
from wassersmooth.precision import without_tf32

KERNEL = 1e-13  # eigenvalues of L below this part of the largest one are zero


class SmoothingNoise:
    """Noise of covariance ``sigma^2 L`` for images of one shape.

    Arguments:
        metric: one for which :func:`check_certifiable` passes.
        sigma: the size of the noise, as ``NoisyInputs``' eta.
        images: for their shape, dtype and device. # shape: (B, C, H, W)
    """

    def __init__(self, metric: Metric, sigma: float, images: Tensor) -> None:
        self.metric, self.sigma = constant_metric(metric), sigma
        self.uniform = isinstance(metric, Wasserstein) and metric.uniform
        self.like = images.detach()[:1].clone(memory_format=torch.contiguous_format)  # a view would hold the whole batch
        self.root = self._root()

    def _root(self) -> Tensor | None:
        """sigma L^(1/2) of each channel, or of a whole image; None where noise is drawn without it.

        # shape: (C or 1, HW, HW), or (1, CHW, CHW)
        """
        if isinstance(self.metric, Euclidean):
            return None
        if not isinstance(self.metric, Wasserstein):
            cometric = self.metric.evaluate(self.like.double())
            dense = type(cometric).sample is Cometric.sample and self.like[0].numel() <= LARGEST_DENSE
            return self._root_of(cometric.as_matrix()) if dense else None
        if self.metric.graph.nodes > LARGEST_DENSE:
            return None
        channels = self.like.shape[1] if isinstance(self.metric.reference, Tensor) else 1
        point = torch.ones(1, channels, *self.like.shape[2:], dtype=torch.float64, device=self.like.device)
        return self._root_of(self.metric.evaluate(point).channel_matrices()[0])

    def _root_of(self, matrices: Tensor) -> Tensor:
        """sigma times the symmetric root of each matrix."""
        values, vectors = torch.linalg.eigh(matrices.detach())
        # Rounding must not give the kernel a variance: its root would be 1e-8, and noise would change the mass by that much.
        positive = torch.where(values > KERNEL * values.amax(-1, keepdim=True), values, 0.0)
        root: Tensor = self.sigma * (vectors * positive.sqrt()[..., None, :]) @ vectors.mT
        return root.to(self.like)

    @torch.no_grad()
    def fill(self, noise: Tensor, parts: list[tuple[int, int, torch.Generator]]) -> None:
        """Fill rows ``start`` to ``stop`` of a batch with draws of a generator, for each part. # shape: (n, C, H, W)

        Each part's draws depend on its generator and its size alone, so batches may be composed in any way. Products are
        never rounded to tf32 or bfloat16: the covariance would then be another one.
        """
        with torch.autocast(noise.device.type, enabled=False), without_tf32(noise):
            if self.root is None and not isinstance(self.metric, Euclidean):
                for start, stop, generator in parts:
                    point = self.like.expand(stop - start, *self.like.shape[1:])
                    noise[start:stop] = self.sigma * self.metric.evaluate(point).sample(generator)
                return
            white = noise if self.root is None else torch.empty_like(noise)
            for start, stop, generator in parts:
                white[start:stop].normal_(generator=generator)
            if self.root is None:
                noise.mul_(self.sigma)
            else:
                self._color(white, self.root, noise)

    def _color(self, white: Tensor, root: Tensor, noise: Tensor) -> None:
        pixels = root.shape[-1]
        if len(root) == 1:  # one product for all channels
            torch.mm(white.view(-1, pixels), root[0], out=noise.view(-1, pixels))
        else:
            noise.flatten(2).copy_((white.flatten(2).transpose(0, 1) @ root).transpose(0, 1))

    def scales(self, images: Tensor) -> Tensor | None:
        """What the noise of each image and channel is multiplied by; None for 1. # shape: (B, C, 1, 1)"""
        if not self.uniform:
            return None
        brightness = images.mean(tuple(range(2, images.dim())), keepdim=True)
        lit = brightness > 0
        return torch.where(lit, brightness, 1.0).sqrt() * lit  # at 0 the root has no derivative


def check_certifiable(metric: object) -> None:
    """Raise ValueError for a metric whose noise at ``x + d`` is another than at x for some d of finite length."""
    _checks.metric(metric)
    if isinstance(metric, Wasserstein) and metric.channels != "separate":
        raise ValueError(
            f"a certificate is for channels that conserve their mass each; got {metric!r}, which moves it between them; use "
            'channels="separate"'
        )
    if isinstance(metric, Metric) and metric.constant:
        return
    if isinstance(metric, Wasserstein) and metric.uniform and not metric.mass:
        return  # it depends on the channels' masses, which every d of finite length conserves
    why = "is not one of this library's"
    if isinstance(metric, Wasserstein):
        why = "depends on the brightness, which a mass term lets change" if metric.uniform else "depends on the image"
    raise ValueError(
        f"a certificate needs noise with the same covariance at all images; got {metric!r}, whose covariance {why}; "
        'use Euclidean(), Wasserstein(..., reference="ones"), or Wasserstein(..., uniform=True) without mass'
    )


def constant_metric(metric: Metric) -> Metric:
    """The metric itself; for ``uniform=True``, that of the white image, whose noise is scaled by the root of the brightness."""
    if isinstance(metric, Wasserstein) and metric.uniform:
        return Wasserstein(metric.graph, metric.scale, reference="ones")
    return metric


def check_sigma(sigma: object) -> float:
    """Check the size of the noise, and return it as a Python number."""
    number = _checks.non_negative_number("sigma", sigma, "it is NoisyInputs' eta")
    if number == 0:
        raise ValueError("sigma must be positive: without noise there is nothing to certify; got 0; train with NoisyInputs")
    return float(number)


class Smoothed(nn.Module):
    """The smoothed classifier: for each class, the share of noisy copies that the model assigns to it. # shape: (B, K)

    ``argmax`` of the shares is its prediction. Copies with NaN or infinite scores vote for no class. The shares are those of
    counted votes. Counts have no gradient, so the gradient in the images is that of the mean softmax (straight-through). So
    attacks run through the noise, by expectation over it.

    Arguments:
        model: in eval mode, with scores that depend on each image alone.
        metric: a constant metric, as in :func:`wassersmooth.certify`.
        sigma: the size of the noise, as eta of ``NoisyInputs``.
        samples: noisy copies of each image; all images of a batch get the same noise.
        seed: the seed of the noise, which is then the same in every call. None draws new noise in every call.
        batch_size: noisy images at a time. In a differentiated pass, each such batch is computed again for its gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        metric: Metric,
        sigma: float,
        samples: int = 1000,
        seed: int | None = 0,
        batch_size: int = 1000,
    ) -> None:
        super().__init__()
        _model_checks.module(model)
        check_certifiable(metric)
        self.model, self.metric, self.sigma = model, metric, check_sigma(sigma)
        self.samples = _checks.positive_integer("samples", samples)
        self.batch_size = _checks.positive_integer("batch_size", batch_size)
        self.seed = _checks.seed(seed, "None draws other noise in every call")
        self._noise: tuple[tuple[object, ...], SmoothingNoise] | None = None  # and what it is for

    def forward(self, images: Tensor) -> Tensor:
        constant_metric(self.metric).check(images)
        noise = self._noise_like(images)
        shares = torch.zeros((), dtype=images.dtype, device=images.device)
        scales = noise.scales(images)
        per_pass = max(1, self.batch_size // len(images))
        generator = torch.Generator(images.device)
        if self.seed is None:
            generator.manual_seed(int(torch.randint(2**62, (), device="cpu")))
        else:
            generator.manual_seed(self.seed)
        for start in range(0, self.samples, per_pass):
            xi = torch.empty(min(per_pass, self.samples - start), *images.shape[1:], dtype=images.dtype, device=images.device)
            # One draw at a time, so that the noise does not depend on how many fit into a pass.
            noise.fill(xi, [(row, row + 1, generator) for row in range(len(xi))])
            if torch.is_grad_enabled() and images.requires_grad:
                shares = shares + checkpoint(self._votes, images, xi, scales, use_reentrant=False)
            else:
                shares = shares + self._votes(images, xi, scales)
        return shares / self.samples

    def _votes(self, images: Tensor, xi: Tensor, scales: Tensor | None) -> Tensor:
        """The number of copies with each class, with the gradient of the sum of their softmax. # shape: (B, K)"""
        noisy = (images[:, None] + (xi if scales is None else scales[:, None] * xi)).flatten(0, 1)
        scores = check_scores(call_model(self.model, noisy), noisy)
        finite = scores.isfinite().all(1, keepdim=True)
        counted = F.one_hot(scores.argmax(1), scores.shape[1]) * finite
        single = torch.promote_types(scores.dtype, torch.float32)
        soft = torch.where(finite, scores, 0.0).to(single).softmax(1) * finite
        votes = counted.to(soft.dtype) + (soft - soft.detach())
        return votes.reshape(len(images), len(xi), -1).sum(1).to(images.dtype)

    def _noise_like(self, images: Tensor) -> SmoothingNoise:
        key = (self.metric, self.sigma, images.shape[1:], images.dtype, images.device)
        if self._noise is None or self._noise[0] != key:
            self._noise = key, SmoothingNoise(self.metric, self.sigma, images)
        return self._noise[1]

    def extra_repr(self) -> str:
        return f"metric={self.metric!r}, sigma={_checks.format_number(self.sigma)}, samples={self.samples}, seed={self.seed}"


def check_scores(received: object, images: Tensor) -> Tensor:
    """Check the shape of a classifier's scores; unlike elsewhere, NaN and infinity are allowed."""
    shown = received.detach().nan_to_num(0.0, 0.0, 0.0) if isinstance(received, Tensor) else received
    _model_checks.logits(shown, images)
    assert isinstance(received, Tensor)
    return received
