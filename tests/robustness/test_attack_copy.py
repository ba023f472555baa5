"""The copy that attacks ask computes the same, has no batch norm left, and is given up where it would compute anything else."""

import copy

import pytest
import torch
from torch import nn

from tests.compare import assert_matches
from wassersmooth import Normalized
from wassersmooth.convolutions import Convolution2d
from wassersmooth.robustness import attack_copy as attack_copy_module
from wassersmooth.robustness import packed_search
from wassersmooth.robustness.apgd import APGD
from wassersmooth.robustness.attack_copy import attack_copy
from wassersmooth.robustness.model_queries import isolated_model
from wassersmooth.robustness.packed_search import StandingImages
from wassersmooth.robustness.square import Square, SquareSearch
from wassersmooth.study.models import ResNet20

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def with_statistics(model):
    """In eval mode, with batch norms that change what they are given."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.track_running_stats:
            layer.running_var.uniform_(0.5, 2)
            layer.running_mean.normal_()
            if layer.affine:
                layer.weight.data.uniform_(0.5, 2)
                layer.bias.data.normal_()
    return model.eval()


def images(count=6, dtype=torch.float64):
    return torch.rand(count, 3, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def copied(model, dtype=torch.float64):
    model = with_statistics(model).to(DEVICE, dtype)
    with isolated_model(model, images()) as inner:
        return inner, attack_copy(inner, images(dtype=dtype))


def answers(model, x):
    x = x.clone().requires_grad_()
    outputs = model(x)
    return outputs.detach(), torch.autograd.grad(outputs.square().sum(), x)[0]


def norms(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]


class Block(nn.Module):
    """A convolution and a batch norm, called in some way that a subclass says."""

    def __init__(self, convolution=None, norm=None):
        super().__init__()
        self.convolution = convolution or nn.Conv2d(3, 4, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 5, 8)

    def body(self, x):
        return self.norm(self.convolution(x))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).flatten(1)


class InPlace(Block):
    def body(self, x):
        return super().body(x).relu_()


class SumsBoth(Block):
    def body(self, x):
        x = self.convolution(x)
        return self.norm(x) + x


class NormTwice(Block):
    def body(self, x):
        return self.norm(self.norm(self.convolution(x)))


class ConvolutionTwice(Block):
    def body(self, x):
        return self.norm(self.convolution(x)) + self.convolution(x.flip(1))


class ChangedBetween(Block):
    def body(self, x):
        return self.norm(self.convolution(x).relu_())


class Random(Block):
    def body(self, x):
        return super().body(x + torch.rand_like(x))


class NotCopied(Block):
    def __deepcopy__(self, memo):
        raise RuntimeError("cannot be copied")


class WithoutGradient(Block):
    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize(
    "model",
    [
        Normalized(ResNet20(3, 10), 0.5, 0.25),
        InPlace(),
        Block(),
        Block(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, affine=False)),
        Block(nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect")),
    ],
    ids=["resnet", "relu in place", "bias", "neither bias nor weight", "reflect"],
)
def test_the_copy_computes_the_same_without_batch_norms(model):
    model, found = copied(model)
    assert found is not model
    assert not norms(found)
    assert norms(model)
    for ours, theirs in zip(answers(found, images(9)), answers(model, images(9)), strict=True):
        assert_matches(ours, theirs, 1e-10)


def test_the_model_stays_as_it_is():
    model = with_statistics(ResNet20(3, 10, "relu")).to(DEVICE)
    before, layers = copy.deepcopy(model.state_dict()), [type(layer) for layer in model.modules()]
    with isolated_model(model, images()) as inner:
        assert attack_copy(inner, images(dtype=torch.float32)) is not inner
    assert [type(layer) for layer in model.modules()] == layers
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.parametrize("kind", [SumsBoth, ChangedBetween, Random, NotCopied, WithoutGradient])
def test_where_a_copy_differs_or_cannot_be_made_the_model_is_asked(kind):
    model, found = copied(kind())
    assert found is model


@pytest.mark.parametrize("kind", [NormTwice, ConvolutionTwice])
def test_layers_that_are_called_twice_are_not_folded(kind):
    model, found = copied(kind())
    assert len(norms(found)) == 1
    for ours, theirs in zip(answers(found, images()), answers(model, images()), strict=True):
        assert_matches(ours, theirs, 1e-10)


def test_a_batch_norm_of_the_batch_is_not_folded():
    for norm in (nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)):
        model = with_statistics(Block(norm=norm)).to(DEVICE, torch.float64)
        model.norm.train(norm.track_running_stats)
        with isolated_model(model, images()) as inner:
            assert len(norms(attack_copy(inner, images()))) == 1


def test_layers_with_hooks_are_left_alone():
    hooked = Block()
    hooked.norm.register_forward_hook(lambda layer, inputs, output: 2 * output)
    weight_norm = Block(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)))
    for model in (hooked, weight_norm):
        model, found = copied(model)
        assert len(norms(found)) == 1


def test_models_without_such_layers_and_compiled_ones_are_not_copied():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    assert copied(plain)[1] is plain
    compiled = torch.compile(with_statistics(Block()), backend="eager")
    assert copied(compiled)[1] is compiled


def test_on_cuda_the_convolutions_use_the_kernels():
    model, found = copied(ResNet20(3, 10, "relu"), torch.float32)
    kinds = {type(layer) for layer in found.modules() if isinstance(layer, nn.Conv2d)}
    assert kinds == {Convolution2d if DEVICE == "cuda" else nn.Conv2d}
    for ours, theirs in zip(answers(found, images(9, torch.float32)), answers(model, images(9, torch.float32)), strict=True):
        assert_matches(ours, theirs, 1e-2 if DEVICE == "cuda" else 1e-4)  # tf32, and its kinks


def test_where_triton_fails_the_convolutions_stay_torch_s(monkeypatch):
    def fails(layer, images):
        raise ImportError("no C compiler")

    model = with_statistics(ResNet20(3, 10, "relu")).to(DEVICE).requires_grad_(False)
    sizes = attack_copy_module._fold_batch_norms(model, images(dtype=torch.float32))
    for forward, kind in ((Convolution2d.forward, Convolution2d), (fails, nn.Conv2d)):
        monkeypatch.setattr(Convolution2d, "forward", forward)
        found = attack_copy_module._with_kernels(model, sizes)
        assert {type(layer) for layer in sizes} == {kind}
        assert found(images(dtype=torch.float32)).isfinite().all()


def test_a_kernel_that_is_wrong_is_noticed(monkeypatch):
    """Its answers are compared as they are asked, not only in full precision."""
    model = with_statistics(ResNet20(3, 10)).to(DEVICE)
    answers_of_the_copy = []

    def off(asked, x):
        answers_of_the_copy.append(asked is not model)
        return asked(x) * (1 if torch.is_grad_enabled() or asked is model else 1.1)

    monkeypatch.setattr(attack_copy_module, "call_model", off)
    with isolated_model(model, images()) as inner:
        assert attack_copy(inner, images(dtype=torch.float32)) is model
    assert True in answers_of_the_copy


class Liar(nn.Module):
    """Calls every image wrong, which the model itself does not."""

    def forward(self, x):
        return x.flatten(1)[:, :5] * 0 + torch.eye(5, device=x.device, dtype=x.dtype)[4]


@pytest.mark.parametrize("search", [APGD(0.01, "linf", iterations=5), SquareSearch(0.01, "linf", 5)], ids=repr)
def test_what_fools_the_copy_alone_has_not_fallen(search, monkeypatch):
    model = with_statistics(Block()).to(DEVICE, torch.float64)
    turns = []

    class Counting(Liar):
        def forward(self, x):
            turns.append(len(x))
            return super().forward(x)

    monkeypatch.setattr(packed_search, "attack_copy", lambda *_: Counting())
    with isolated_model(model, images()) as inner:
        x = images()
        everything = StandingImages(inner, x, inner(x).argmax(1), torch.ones(6, dtype=torch.bool, device=DEVICE), None, False)
        everything.steps.capture = False
        everything.attack(search)
    assert everything.stands.all()
    assert turns == [6] * 6  # the first look, and every iteration


def test_a_targeted_square_is_confirmed_by_its_target(monkeypatch):
    model = with_statistics(Block()).to(DEVICE, torch.float64)
    x = images()
    with torch.no_grad():
        reached = model(x).argmax(1)
    monkeypatch.setattr(packed_search, "attack_copy", lambda model, _: copy.deepcopy(model))
    found = Square(0.001, queries=4, targeted=True)(model, x, reached, torch.Generator(DEVICE).manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(found).argmax(1), reached)
