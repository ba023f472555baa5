"""Bad values in later batches: on the CPU the fast way refuses what the ordinary one does, and nothing moves."""

import copy

import pytest
import torch

import wassersmooth as ws
from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.steps import assert_same_step, gradients, ordinary, traced
from tests.learning.zoo import batch, make, smooth_net

METRIC = ws.Wasserstein(ws.PixelGraph.grid(8, 8, radius=2))
PENALTY = ws.GradientPenalty(METRIC, 0.5)
OBJECTIVES = {
    "plain": ws.Plain(),
    "binary": ws.Plain("binary_cross_entropy"),
    "gradient": PENALTY,
    "tikhonov": ws.Tikhonov(METRIC, 0.3),
    "curvature": ws.Tikhonov(METRIC, 0.3, laplacian=None),
    "noisy": ws.NoisyInputs(METRIC, 0.1),
    "adversarial": ws.AdversarialTraining(ws.attacks.FGSM(0.1)),
    "both": ws.AdversarialTraining(ws.attacks.FGSM(0.1), penalty=PENALTY),
}
BAD = {
    "nan": lambda x, y: (x.where(x < 0.5, torch.nan), y),
    "infinite": lambda x, y: (x.where(x < 0.5, torch.inf), y),
    "negative": lambda x, y: (x - 1, y),
    "gray levels": lambda x, y: (255 * x, y),
    "labels": lambda x, y: (x, y + 2),
    "negative labels": lambda x, y: (x, y - 3),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_later_batches_are_refused_as_by_the_ordinary_way(objective, spoil):
    model, good = make("batch_norm_train"), batch()
    fast = traced(objective, model)
    fast(*good)
    buffers, before, bad = [b.clone() for b in model.buffers()], flat(gradients(model)), spoil(*good)
    try:
        objective(copy.deepcopy(model), *bad)
    except ValueError:
        with pytest.raises(ValueError, match=r"^(images|labels) must be .*; got "):
            fast(*bad)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
        assert torch.equal(flat(gradients(model)), before)
    else:
        assert torch.isfinite(fast(*bad).total)
    assert torch.isfinite(fast(*good).total)


def test_what_the_ordinary_way_says_of_later_batches():
    """Not only that the two agree."""
    model, (images, labels) = smooth_net(), batch()
    fast = traced(PENALTY, model)
    fast(images, labels)
    for given, words in [
        ((images - 1, labels), "non-negative masses"),
        ((images * torch.nan, labels), "images must be finite; got nan"),
        ((255 * images, labels), "divide 8-bit images by 255"),
        ((images, labels + 5), r"labels must be in 0\.\.2, by the model's outputs"),
    ]:
        with pytest.raises(ValueError, match=words):
            fast(*given)


def test_attacked_images_are_looked_at_in_every_batch():
    class Darker(ws.attacks.FGSM):
        def perturb(self, model, images, labels, generator):
            return images - 0.5

    model, (images, labels) = smooth_net(), batch()
    objective = ws.AdversarialTraining(Darker(0.1), penalty=PENALTY)
    fast = traced(objective, model)
    fast(0.5 + images / 2, labels)
    with pytest.raises(ValueError, match="non-negative masses; got a minimum of -0"):
        fast(images, labels)


def test_targets_of_a_smaller_batch_go_the_ordinary_way():
    model, (images, labels) = smooth_net(), batch()
    twin, targets = copy.deepcopy(model), torch.nn.functional.one_hot(labels, 3).double()
    fast = traced(PENALTY, model)
    fast(images, targets)
    expected = ordinary(PENALTY, twin, images[:2], targets[:2])
    received = fast(images[:2], targets[:2])
    assert_matches(received.total.detach(), expected.total.detach(), 1e-12)
    with pytest.raises(ValueError, match="targets must be finite"):
        fast(images, targets * torch.nan)
    assert_same_step(fast(images, targets), ordinary(PENALTY, twin, images, targets), model, twin, 1e-9)


def test_losses_of_ones_own_may_read_labels_as_they_like():
    def ignoring(outputs, labels):
        return outputs.square().sum(1) * (labels >= 0)

    model, (images, labels) = smooth_net(), batch()
    fast = traced(ws.Plain(ignoring), model)
    fast(images, labels)
    assert float(fast(images, labels - 100).total) == 0
