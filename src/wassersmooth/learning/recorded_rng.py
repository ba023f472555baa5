"""Record the random numbers of a forward pass and replay them in further passes.

While compiling, and while a CUDA graph is captured, the random state cannot be restored. So the numbers themselves are kept:
within :class:`RecordedRng` a random operator returns numbers from a list, and a dropout becomes a product with such numbers.
Torch tags every random operator. One that has the tag and no rule here is refused in a further pass, where its numbers would
differ from those of the first pass. All of this is looked up on first use, not on import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wassersmooth._torch_internals import (
    OPERATORS,
    OpOverload,
    OpOverloadPacket,
    constant_while_compiling,
    functions_shown_to_modes,
)


class RecordedRng(TorchFunctionMode):
    """Record random numbers in a first pass, and replay them in further passes.

    While compiling, it adds functions to the compiler's list of those that modes see, and removes them on exit. The list is
    read while a function is traced, never by compiled code. If tracing stops inside, the next exit removes them.

    Arguments:
        recorded: the draws of the first pass, in their order; None records them.
    """

    def __init__(self, recorded: list[Tensor] | None = None) -> None:
        super().__init__()
        self.replaying = recorded is not None
        self.recorded: list[Tensor] = [] if recorded is None else recorded
        self.used = 0
        _fill_rules()
        if torch.compiler.is_compiling():
            _expose_rng_functions()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            _hide_rng_functions()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, *args, **kwargs)
        if isinstance(func, OPERATORS) and _is_random(func):
            self.refuse(str(func))
        return func(*args, **kwargs)

    def draw(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The next random numbers, as constants."""
        if not self.replaying:
            self.recorded.append(func(*args, **kwargs).detach())
        self.used += 1
        return self.recorded[self.used - 1]

    def refuse(self, name: str) -> None:
        """Raise in a further pass only: where there is none, as in double backward, numbers need not be repeated."""
        if self.replaying:
            raise ValueError(
                f"the model draws random numbers by {name}, which cannot be repeated in the second pass of a compiled or "
                "captured step; draw them by torch.rand or torch.randn, or take the step eagerly"
            )


def _random_tensor(rng: RecordedRng, func: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """A tensor of random numbers. Derivatives in their parameters are zero or do not exist."""
    numbers = rng.draw(func, *args, **kwargs)
    return numbers.clone() if out is None else out.copy_(numbers)  # the model may change what it gets


def _fill_in_place(rng: RecordedRng, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Fill a tensor with random numbers."""
    return input.copy_(rng.draw(func, torch.empty_like(input), *args, **kwargs))


def _dropout(
    rng: RecordedRng,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,  # torch.dropout calls it train, F.dropout training
) -> Tensor:
    """Dropout as the product with the dropout of ones."""
    if not (training and train) or p == 0:
        return input
    result = input * rng.draw(func, torch.ones_like(input), p, True)
    return input.copy_(result) if inplace else result


def _alpha_dropout(
    rng: RecordedRng,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool = False,
) -> Tensor:
    """Alpha-dropout from that of zeros, which is positive where the input is kept, plus the scaled input there."""
    if not (training or train) or p == 0:
        return input
    of_zeros = rng.draw(func, torch.zeros_like(input), p, True)
    scale = 0.0 if p == 1 else ((1 - p) * (1 + p * SELU_MINIMUM**2)) ** -0.5
    result = torch.where(of_zeros > 0, of_zeros + scale * input, of_zeros)
    return input.copy_(result) if inplace else result


def _rrelu(
    rng: RecordedRng,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Randomized leaky relu; the random slopes are minus its value at -1."""
    slopes: float | Tensor = (lower + upper) / 2
    if training:
        slopes = -rng.draw(func, -torch.ones_like(input), lower, upper, True)
    result = torch.where(input < 0, slopes * input, input)
    return input.copy_(result) if inplace else result


def _layer_with_dropout(rng: RecordedRng, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Recurrent layers, and attention that is not decomposed. The only float among their arguments is the dropout rate."""
    if kwargs.get("training", True) and any(isinstance(argument, float) and argument > 0 for argument in args):
        rng.refuse(func.__name__)
    return func(*args, **kwargs)


def _refuse(rng: RecordedRng, func: Any, *args: Any, **kwargs: Any) -> Any:
    rng.refuse(func.__name__)
    return func(*args, **kwargs)


@constant_while_compiling
def _fill_rules() -> bool:
    """Fill ``RULES`` on first use, since it takes a quarter of a second."""
    if not RULES:
        RULES.update(_rules())
    return True


@constant_while_compiling
def _expose_rng_functions() -> bool:
    """Add all random functions to those that modes see while compiling, as they do in eager mode. Without this, the compiler
    hides torch.rand_like, torch.normal and others from them."""
    shown = _functions_shown_to_modes()
    _exposed.update(function for function in RULES if function not in shown)
    shown.update(_exposed)
    return True


@constant_while_compiling
def _hide_rng_functions() -> bool:
    _functions_shown_to_modes().difference_update(_exposed)
    _exposed.clear()
    return True


def _functions_shown_to_modes() -> set[Any]:
    """The compiler's set of such functions, which is private. Without it, draws would silently differ between passes."""
    try:
        return functions_shown_to_modes()
    except (ImportError, AttributeError) as missing:
        raise RuntimeError(
            f"random numbers cannot be repeated in a compiled step with torch {torch.__version__}, whose compiler has no "
            "get_overridable_functions; take the step eagerly, or use engine='double_backward'"
        ) from missing


@constant_while_compiling
def _is_random(operator: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> bool:
    """Whether an operator in torch.ops, of torch or of another library, draws random numbers."""
    names: list[str] = [] if isinstance(operator, OpOverload) else operator.overloads()  # type: ignore[no-untyped-call]
    overloads = [getattr(operator, name) for name in names] or [operator]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _functions_named(names: Iterable[str]) -> list[Any]:
    """The functions and methods with these names."""
    found = (getattr(namespace, name, None) for name in names for namespace in (torch, Tensor, F))
    return [function for function in found if callable(function)]


def _random_names() -> set[str]:
    """The names of functions and methods that are random operators of torch."""
    names = {name for namespace in (torch, Tensor, F) for name in dir(namespace)}
    operators = {name: getattr(torch.ops.aten, name, None) for name in names if not name.startswith("__")}
    return {name for name, found in operators.items() if isinstance(found, OpOverloadPacket) and _is_random(found)}


def _rules() -> dict[Any, Callable[..., Any]]:
    return {
        **dict.fromkeys((*_functions_named(_random_names()), *PYTHON_FUNCTIONS), _refuse),
        **dict.fromkeys(_functions_named(BY_SHAPE + BY_PARAMETERS), _random_tensor),
        **dict.fromkeys(_functions_named(IN_PLACE), _fill_in_place),
        **dict.fromkeys(DROPOUTS, _dropout),
        **dict.fromkeys(ALPHA_DROPOUTS, _alpha_dropout),
        **dict.fromkeys((F.rrelu, torch.rrelu), _rrelu),
        **dict.fromkeys(LAYERS_WITH_DROPOUT, _layer_with_dropout),
    }


SELU_MINIMUM = -1.7580993408473766  # alpha-dropout sets dropped values to the minimum of SELU

BY_SHAPE = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
BY_PARAMETERS = ("bernoulli", "normal", "multinomial", "poisson", "binomial")
IN_PLACE = ("bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_")
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout)
ALPHA_DROPOUTS = (F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
LAYERS_WITH_DROPOUT = (F.multi_head_attention_forward, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
PYTHON_FUNCTIONS = (  # made of random operators; modes see the whole function
    *(F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d),
    *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
)

RULES: dict[Any, Callable[..., Any]] = {}  # by function or method; filled on first use
_exposed: set[Any] = set()  # added to the compiler's set for now
