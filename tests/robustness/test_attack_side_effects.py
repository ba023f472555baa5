"""An attack restores the state of the model, also after an exception, and in every gradient mode of the caller."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.robustness.attack_table import ALL
from tests.robustness.small_models import Around, digits, network, trained
from wassersmooth.normalized import Normalized
from wassersmooth.robustness.attacks import FGSM, PGD, Square, WassersteinFGSM
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.translations import label_flips

SEED = 11


def noisy_model():
    """A model with batch-norm and dropout, mixed modes, mixed requires_grad flags and accumulated gradients."""
    model = Normalized(nn.Sequential(nn.Dropout(0.2), network()), 0.3, 0.4).train()
    model.model[1][1].eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0)
        parameter.grad = torch.full_like(parameter, index) if index % 3 > 1 else None
    return model


def snapshot(model):
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()],
        "random": torch.get_rng_state(),
    }


def assert_same(before, after):
    assert before["modes"] == after["modes"]
    assert before["flags"] == after["flags"]
    assert torch.equal(before["random"], after["random"])
    assert all(torch.equal(before["state"][name], after["state"][name]) for name in before["state"])
    for first, second in zip(before["grads"], after["grads"], strict=True):
        assert (first is None and second is None) or torch.equal(first, second)


def batch(count=16):
    _, _, images, labels = digits()
    return images[:count].clone(), labels[:count]


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_an_attack_has_no_side_effects(attack):
    model, (images, labels) = noisy_model(), batch()
    images.requires_grad_()
    original = images.detach().clone()
    before = snapshot(model)
    attacked = attack(model, images, labels)
    assert_same(before, snapshot(model))
    assert torch.equal(images, original)
    assert images.grad is None
    assert not attacked.requires_grad
    assert attacked.data_ptr() != images.data_ptr()


def test_label_flips_have_no_side_effects():
    model, (images, _) = noisy_model(), batch()
    before = snapshot(model)
    label_flips(model, images, reach=3)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("attack", ALL, ids=repr)
def test_an_attack_has_no_side_effects_after_an_exception(attack):
    class FailsLater(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            torch.rand(3)
            if self.calls >= 2:
                raise RuntimeError("out of order")
            return self.model(x)

    model, (images, labels) = noisy_model(), batch()
    failing = FailsLater(model)
    single_pass = isinstance(attack, FGSM | WassersteinFGSM | Square)  # Square needs one pass to fool an untrained model
    failing.calls = 1 if single_pass else 0
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="out of order"):
        attack(failing, images, labels)
    assert_same(before, snapshot(model))


def test_train_mode_is_attacked_in_train_mode():
    """With batch statistics, not running ones: the attack differs, and works in the mode it was made in."""
    images, labels = batch(64)
    model = copy.deepcopy(trained())
    model.model[1].running_mean += 3.0  # running statistics that have nothing to do with the batch
    attack = FGSM(32 / 255)
    evaluated = attack(model.eval(), images, labels)
    training = attack(model.train(), images, labels)
    assert not torch.equal(evaluated, training)
    with torch.no_grad():
        clean = (model(images).argmax(1) != labels).float().mean()
        assert (model(training).argmax(1) != labels).float().mean() > clean + 0.1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_disabled(mode):
    model, (images, labels) = trained(), batch()
    expected = FGSM(8 / 255)(model, images, labels)
    with mode():
        assert torch.equal(FGSM(8 / 255)(model, images.clone(), labels.clone()), expected)
        assert torch.is_grad_enabled() is False


def test_without_a_generator_the_global_seed_determines_the_attack():
    model, (images, labels) = trained(), batch()
    attack = PGD(8 / 255, 2 / 255, 1)
    torch.manual_seed(SEED)
    first = attack(model, images, labels)
    torch.manual_seed(SEED)
    assert torch.equal(attack(model, images, labels), first)
    torch.manual_seed(SEED + 1)
    assert not torch.equal(attack(model, images, labels), first)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_distributed_training_goes_on_after_an_attack(one_process):
    images, labels = batch()
    inner = Normalized(network(), 0.3, 0.4)
    model = nn.parallel.DistributedDataParallel(inner)
    waits = []  # a forward pass of the wrapper would wait for the other processes, which may not be measuring
    handle = model.register_forward_hook(lambda *_: waits.append(True))
    attacked = FGSM(8 / 255, "normalized")(model, images, labels)
    label_flips(model, images, reach=1)
    handle.remove()
    assert not waits
    assert torch.equal(attacked, FGSM(8 / 255, "normalized")(inner, images, labels))
    for _ in range(2):  # the reducer raises in the second step if the first left something unfinished
        nn.functional.cross_entropy(model(images), labels).backward()
        PGD(8 / 255, 2 / 255, 2)(model, images, labels)
    assert all(parameter.grad is not None for parameter in inner.parameters())


def in_place(x):
    """Normalize the images in place."""
    return x.sub_(0.3).div_(0.4)


@pytest.mark.parametrize("attack", [FGSM(0.1), PGD(0.1, 0.05, 3), Square(0.1, queries=10)], ids=repr)
def test_models_may_change_their_input_in_place(attack):
    inner, (images, labels) = trained(), batch()
    original = images.clone()
    seeded = [torch.Generator().manual_seed(SEED) for _ in range(2)]
    received = attack(Around(inner, in_place), images, labels, seeded[0])
    assert torch.equal(images, original)
    assert torch.equal(received, attack(Normalized(inner, 0.3, 0.4), images, labels, seeded[1]))


@pytest.mark.slow
def test_an_evaluation_protects_its_images_from_the_model():
    images, labels = batch(40)
    original = images.clone()
    report = evaluate(Around(trained(), in_place), images, labels, "quick", seed=0)
    assert torch.equal(images, original)
    assert report.errors == evaluate(Normalized(trained(), 0.3, 0.4), images, labels, "quick", seed=0).errors
