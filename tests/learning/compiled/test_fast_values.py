"""Bad values in later batches: on the CPU a compiled step refuses what an eager one does, and nothing changes."""

import copy

import pytest
import torch

import wassersmooth as ws
from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.steps import assert_same_step, eager, gradients, traced
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


@pytest.fixture(scope="module", params=OBJECTIVES.values(), ids=OBJECTIVES.keys())
def prepared(request):
    """A step that has seen one good batch; bad ones do not change it."""
    fast = traced(request.param, make("batch_norm_train"))
    fast(*batch())
    return fast


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_later_batches_are_refused_as_in_eager_mode(prepared, spoil):
    fast, objective, model, good = prepared, prepared.objective, prepared.model, batch()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_weights_that_are_nan_are_refused_as_in_eager_mode(name, when):
    objective, model, good = OBJECTIVES[name], make("batch_norm_train"), batch()
    fast = ws.FastGradients(objective, model, compile=False, verify=False)
    if when == "later":
        fast(*good)
    with torch.no_grad():
        next(model.parameters()).mul_(torch.nan)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    with pytest.raises(ValueError, match="finite; got nan") as expected:
        objective(copy.deepcopy(model), *good)
    with pytest.raises(type(expected.value), match="finite; got nan"):
        fast(*good)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


@pytest.mark.parametrize("name", ["compile", "cuda_graph", "verify"])
def test_a_word_is_not_taken_for_true(name):
    for received in ("no", 1, 0, None, "False"):
        with pytest.raises(ValueError, match=rf"^{name} must be one of .*; got {received!r}"):
            ws.FastGradients(ws.Plain(), smooth_net(), **{name: received})
    with pytest.raises(ValueError, match=r"^verify must be one of False, True; got 'no'"):
        ws.engines.ForwardMode(verify="no")


def test_the_messages_about_later_batches():
    """Not only that the two agree."""
    model, (images, labels) = smooth_net(), batch()
    fast = traced(PENALTY, model)
    fast(images, labels)
    for given, words in [
        ((images - 1, labels), "non-negative masses"),
        ((images * torch.nan, labels), "images must be finite; got nan"),
        ((255 * images, labels), "divide 8-bit images by 255"),
        ((images, labels + 5), r"labels must be in 0\.\.2, since the model has 3 outputs"),
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


def test_targets_of_a_smaller_batch_run_eagerly():
    model, (images, labels) = smooth_net(), batch()
    twin, targets = copy.deepcopy(model), torch.nn.functional.one_hot(labels, 3).double()
    fast = traced(PENALTY, model)
    fast(images, targets)
    expected = eager(PENALTY, twin, images[:2], targets[:2])
    received = fast(images[:2], targets[:2])
    assert_matches(received.total.detach(), expected.total.detach(), 1e-12)
    with pytest.raises(ValueError, match="targets must be finite"):
        fast(images, targets * torch.nan)
    assert_same_step(fast(images, targets), eager(PENALTY, twin, images, targets), model, twin, 1e-9)


def test_custom_losses_may_read_labels_as_they_like():
    def ignoring(outputs, labels):
        return outputs.square().sum(1) * (labels >= 0)

    model, (images, labels) = smooth_net(), batch()
    fast = traced(ws.Plain(ignoring), model)
    fast(images, labels)
    assert float(fast(images, labels - 100).total) == 0
