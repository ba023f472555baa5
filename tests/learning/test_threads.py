"""Several threads that train their own models at once: each gets the gradients that it gets alone."""

import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from tests.compare import assert_matches
from tests.learning.central import flat, gradients_of
from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import Euclidean, FastGradients, doctor
from wassersmooth.learning.attention import unfused_attention
from wassersmooth.learning.objectives import GradientPenalty

PENALTY = GradientPenalty(Euclidean(), 0.5, engine="forward_mode")


def in_threads(*functions):
    """What each function returns; all start together, and the first error is raised here."""
    found, errors, barrier = [None] * len(functions), [], threading.Barrier(len(functions))

    def run(index):
        try:
            barrier.wait()
            found[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def test_one_thread_leaves_unfused_attention_while_another_is_inside():
    before = torch.backends.cuda.flash_sdp_enabled()
    first, second = unfused_attention(), unfused_attention()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.flash_sdp_enabled() is before is True


@pytest.mark.parametrize("name", ["vision_transformer", "dropout"])
def test_forward_mode_in_several_threads(name):
    """With dropout each pass goes back to the random state of the first, which all threads share."""
    images, labels = batch()
    models = [make(name) for _ in range(4)]

    def steps(model):
        def run():
            penalties = []
            for _ in range(6):
                penalty = PENALTY(model, images, labels).penalty
                penalties.append(flat(gradients_of(penalty, model)))
            return penalties

        return run

    found = in_threads(*map(steps, models))
    if name == "dropout":  # the masks differ from call to call
        assert all(torch.isfinite(g).all() for penalties in found for g in penalties)
        return
    for model, penalties in zip(models, found, strict=True):
        alone = flat(gradients_of(PENALTY(model, images, labels).penalty, model))
        for received in penalties:
            assert_matches(received, alone, 1e-12)


def test_forward_mode_beside_the_doctor_and_a_compiled_step():
    images, labels = batch()
    models = [smooth_net() for _ in range(3)]
    expected = [flat(gradients_of(PENALTY(model, images, labels).total, model)) for model in models]

    def forward_mode():
        return [flat(gradients_of(PENALTY(models[0], images, labels).total, models[0])) for _ in range(10)]

    def examine():
        return doctor(models[1], images, labels, repeats=1)

    def compiled():
        FastGradients(GradientPenalty(Euclidean(), 0.5), models[2], compile=False)(images, labels)
        return flat([p.grad for p in models[2].parameters()])

    received, diagnosis, fast = in_threads(forward_mode, examine, compiled)
    for gradient in received:
        assert_matches(gradient, expected[0], 1e-12)
    assert "forward_mode" in str(diagnosis)
    assert_matches(fast, expected[2], 1e-9)


def test_steps_are_prepared_in_several_threads():
    images, labels = batch()
    models = [smooth_net() for _ in range(6)]
    objective = GradientPenalty(Euclidean(), 0.5)
    expected = [flat(gradients_of(objective(model, images, labels).total, model)) for model in models]

    def prepare(model):
        def run():
            FastGradients(objective, model, compile=False)(images, labels)
            return flat([p.grad for p in model.parameters()])

        return run

    for received, wanted in zip(in_threads(*map(prepare, models)), expected, strict=True):
        assert_matches(received, wanted, 1e-9)


def test_a_level_of_the_caller_is_refused_in_one_line():
    model, (images, labels) = smooth_net(), batch()
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"^forward mode needs .*; got .*; leave it first, or use"):
        PENALTY(model, images, labels)
    PENALTY(model, images, labels)
