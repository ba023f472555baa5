"""Random numbers that a compiled step needs twice: every operator that draws is remembered, or refused."""

import copy
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import get_overridable_functions

from tests.compare import assert_matches
from tests.learning.zoo import batch
from wassersmooth import PixelGraph, Wasserstein
from wassersmooth.learning import recorded_rng as module
from wassersmooth.learning.attention import DECOMPOSITIONS
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.recorded_rng import RULES, RecordedRng, _random_names

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))
X = batch()[0] - 0.4
LSTM, LSTM_WITH_DROPOUT = nn.LSTM(8, 4).double(), nn.LSTM(8, 4, 2, dropout=0.5).double()
RARE_ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5, add_zero_attn=True, dtype=X.dtype)  # left to torch
EVAL_ATTENTION = copy.deepcopy(RARE_ATTENTION).eval()
GAMMA = torch.distributions.Gamma(torch.ones(4, 1, 8, 8, dtype=X.dtype), 1.0)


def in_place(input):
    F.dropout(input, 0.5, True, inplace=True)
    return input


def into(input):
    torch.rand(input.shape, dtype=input.dtype, out=input)
    return input


def changed(input):
    return torch.rand_like(input).mul_(2).floor_()


REMEMBERED = {
    "bernoulli_": lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5).div_(0.5),  # stochastic depth
    "bernoulli_ by probabilities": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "Tensor.bernoulli": lambda x: torch.full_like(x, 0.3).bernoulli(),
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype, device=x.device),
    "rand, changed by the model": changed,
    "rand, into a tensor": lambda x: into(x.clone()),
    "randn": lambda x: torch.randn(*x.shape, dtype=x.dtype, device=x.device),
    "randint": lambda x: torch.randint(0, 3, x.shape, device=x.device),
    "randperm": lambda x: x.flatten(1)[:, torch.randperm(64, device=x.device)].reshape(x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 2.0),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).abs(), 64).reshape(x.shape),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 4), torch.full_like(x, 0.5)),
    "normal_": lambda x: torch.empty_like(x).normal_(0, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "random_": lambda x: torch.empty_like(x).random_(3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.5),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "F.dropout": F.dropout,
    "F.dropout in place": lambda x: in_place(x.clone()),
    "F.dropout1d": lambda x: F.dropout1d(x[:, 0])[:, None],
    "F.dropout2d": F.dropout2d,
    "F.dropout3d": lambda x: F.dropout3d(x[:, None])[:, 0],
    "torch.dropout": lambda x: torch.dropout(x, p=0.5, train=True),
    "torch.feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "F.alpha_dropout in place": lambda x: F.alpha_dropout(x.clone(), 0.3, True, True),
    "alpha_dropout of everything": lambda x: F.alpha_dropout(x, 1.0, True),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(x, 0.3, train=True),
    "F.rrelu": lambda x: F.rrelu(-x.abs(), training=True),
    "torch.rrelu": lambda x: torch.rrelu(-x.abs(), 0.1, 0.9, True),
}
WITHOUT_DRAWS = {
    "F.dropout in eval": lambda x: F.dropout(x, 0.5, False),
    "F.dropout of nothing": lambda x: F.dropout(x, 0.0),
    "torch.dropout in eval": lambda x: torch.dropout(x, 0.5, train=False),
    "F.alpha_dropout in eval": F.alpha_dropout,
    "torch.alpha_dropout in eval": lambda x: torch.alpha_dropout(x, 0.5, False),
    "F.rrelu in eval": lambda x: F.rrelu(x - 0.5),
    "lstm": lambda x: LSTM(x[:, 0])[0],
    "multi_head_attention in eval": lambda x: EVAL_ATTENTION(x[:, 0], x[:, 0], x[:, 0])[0],
    "aten.mul": lambda x: torch.ops.aten.mul(x, torch.ops.aten.mul.Tensor(x, x)),
}


@torch.library.custom_op("wassersmooth_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


REFUSED = {
    "gumbel_softmax": F.gumbel_softmax,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout_": lambda x: torch.dropout_(x.clone(), 0.5, True),
    "lstm": lambda x: LSTM_WITH_DROPOUT(x[:, 0])[0],
    "multi_head_attention_forward": lambda x: RARE_ATTENTION(x[:, 0], x[:, 0], x[:, 0])[0],
    "_standard_gamma": lambda x: GAMMA.rsample(),
    "normal_": lambda x: nn.init.normal_(x.clone()),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, 3),
    "aten.bernoulli": lambda x: torch.ops.aten.bernoulli(torch.full_like(x, 0.3)),
    "aten.bernoulli_.float": lambda x: torch.ops.aten.bernoulli_.float(torch.empty_like(x), 0.3),
    "wassersmooth_tests.noise.default": noise,
}


def seeded(call):
    torch.manual_seed(0)
    return call(X)


@pytest.mark.parametrize("call", REMEMBERED.values(), ids=REMEMBERED.keys())
def test_draws_are_those_of_torch_and_the_same_twice(call):
    native = seeded(call)
    first = RecordedRng()
    with first:
        received = seeded(call).clone()
    assert len(first.recorded) == 1
    assert_matches(received, native, 1e-12)
    for _ in range(2):
        further = RecordedRng(first.recorded)
        with further:
            again = call(X)
        assert torch.equal(again, received)
        assert further.used == 1


@pytest.mark.parametrize("call", WITHOUT_DRAWS.values(), ids=WITHOUT_DRAWS.keys())
def test_what_draws_nothing_is_left_alone(call):
    with RecordedRng([]) as draws:
        received = seeded(call)
    assert_matches(received, seeded(call), 1e-12)
    assert draws.used == 0


@pytest.mark.parametrize(("name", "call"), REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_be_repeated_is_refused_in_a_further_pass(name, call):
    with RecordedRng():
        seeded(call)
    with RecordedRng([]), pytest.raises(ValueError, match=f"random numbers by {name}, which .* draw them by torch.rand"):
        seeded(call)


def tagged_in_all_of_torch():
    """By a private list of every operator, with or without a function of its name."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.rpartition("::")
        overload = torch._C._get_operation_overload(schema.name, schema.overload_name) if space == "aten" else None
        if overload is not None and torch.Tag.nondeterministic_seeded in overload[2]:
            found.add(name)
    return found


def test_nothing_in_torch_draws_unseen():
    """By the tag that torch gives to its operators, and by the names in its functions that are written in Python."""
    RecordedRng()  # fills the rules
    tagged = tagged_in_all_of_torch()
    assert {"bernoulli_", "randperm", "feature_dropout", "rrelu_"} <= _random_names() <= tagged
    assert set(module._functions_named(tagged)) <= set(RULES)
    unseen = [
        function
        for functions in get_overridable_functions().values()
        for function in functions
        if isinstance(function, types.FunctionType) and tagged & {function.__name__, *function.__code__.co_names}
        if function not in RULES and function not in DECOMPOSITIONS
    ]
    assert not unseen


class Everything(nn.Module):
    """All draws of a table around one weight, in which the outputs are linear."""

    def __init__(self, calls):
        super().__init__()
        self.calls = list(calls)
        self.weight = nn.Parameter(torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        factors = [torch.ones_like(x), *[call(x).clamp(-2, 2) for call in self.calls]]
        return (x * torch.stack(factors).mean(0)).flatten(1) @ self.weight


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_penalty(calls):
    objective, (images, labels) = GradientPenalty(METRIC, 1.0, of="logits", engine="forward_mode"), batch()
    model = Everything(calls)
    return torch.compile(lambda: objective(model, images, labels).penalty, fullgraph=True, backend="aot_eager"), model


@pytest.mark.slow
def test_each_draw_is_the_same_in_both_passes_of_a_compiled_step():
    """The penalty is homogeneous of degree two in the weight, so W . dq/dW = 2 q (Euler); with other draws it would not be."""
    calls = {name: call for name, call in REMEMBERED.items() if name != "random_"}  # which the compiler does not take
    step, model = compiled_penalty(calls.values())
    penalty, other = step(), step()
    assert penalty != other  # draws differ from step to step
    (gradient,) = torch.autograd.grad(penalty, model.weight)
    assert_matches((gradient * model.weight).sum(), 2 * penalty, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gumbel_softmax", "dropout_", "_standard_gamma", "aten.bernoulli"])
def test_a_compiled_step_names_the_draw_that_it_cannot_repeat(name):
    step, _ = compiled_penalty([REFUSED[name]])
    with pytest.raises(RuntimeError, match=f"random numbers by {name}, which cannot be repeated"):
        step()


@pytest.mark.slow
def test_a_compiled_step_leaves_the_compilers_list_of_functions_as_it_was_and_stays_right():
    """Also on later calls, when the list is short again, and when the step is compiled once more."""
    shown = module._functions_shown_to_modes()
    before = set(shown)
    assert torch.normal not in before  # or there would be nothing to add
    objective, (images, labels) = GradientPenalty(METRIC, 1.0, of="logits", engine="forward_mode"), batch()
    model = Everything([REMEMBERED["normal"], REMEMBERED["F.dropout"]])

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)  # another size is recompiled
    def step(count):
        return objective(model, images[:count], labels[:count]).penalty

    for count in (4, 4, 3, 4):
        penalty = step(count)
        (gradient,) = torch.autograd.grad(penalty, model.weight)
        assert_matches((gradient * model.weight).sum(), 2 * penalty, 1e-10)
        assert shown == before


def test_a_compiler_without_the_list_is_told_in_one_line(monkeypatch):
    """Asked by itself: this compiler would miss the name too."""
    monkeypatch.delattr("torch._dynamo.variables.torch.get_overridable_functions")
    with pytest.raises(RuntimeError, match=r"random numbers cannot be repeated in a compiled step .* take the step eagerly"):
        module._expose_rng_functions()


@pytest.mark.slow
def test_the_import_needs_none_of_torchs_private_lists_and_looks_nothing_up():
    code = "import torch; del torch._C._jit_get_all_schemas; "
    code += "from wassersmooth.learning import recorded_rng; assert not recorded_rng.RULES"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
