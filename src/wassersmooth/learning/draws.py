"""The random draws of a pass, remembered, and handed out once more in the passes that follow.

While compiling, and while a CUDA graph is captured, the random state cannot be set back. So the numbers themselves are kept:
within :class:`Draws` an operator that draws hands out numbers of a list, and a dropout becomes a product with such numbers.
Torch tags every operator that draws. One that has the tag and no rule here is refused in a further pass, where its numbers
would be others than in the first one. All of this is looked up on first use, not on import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode


class Draws(TorchFunctionMode):
    """In a first pass draws are made and kept in ``made``; in a further one they are read from there.

    While compiling it adds to the compiler's list of functions that modes are shown, and takes them off on exit: the list is
    asked while a function is traced, and never by what is compiled. Where tracing stops inside, the next exit takes them off.

    Arguments:
        made: the draws of the first pass, in their order; None while they are made.
    """

    def __init__(self, made: list[Tensor] | None = None) -> None:
        super().__init__()
        self.further = made is not None
        self.made: list[Tensor] = [] if made is None else made
        self.used = 0
        _know_the_rules()
        if torch.compiler.is_compiling():
            _show_every_draw_to_modes()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            _hide_them_again()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, *args, **kwargs)
        if isinstance(func, OpOverload | OpOverloadPacket) and _is_tagged(func):
            self.refuse(str(func))
        return func(*args, **kwargs)

    def draw(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The next numbers, as constants."""
        if not self.further:
            self.made.append(func(*args, **kwargs).detach())
        self.used += 1
        return self.made[self.used - 1]

    def refuse(self, name: str) -> None:
        """In a further pass only: where there is none, as in double backward, numbers need not be kept."""
        if self.further:
            raise ValueError(
                f"the model draws random numbers by {name}, which cannot be repeated in the second pass of a compiled or "
                "captured step; draw them by torch.rand or torch.randn, or take the step eagerly"
            )


def _new(draws: Draws, func: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """A tensor of random numbers. Derivatives in their parameters are zero, or there are none."""
    numbers = draws.draw(func, *args, **kwargs)
    return numbers.clone() if out is None else out.copy_(numbers)  # the model may change what it gets


def _filled(draws: Draws, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Random numbers in place of what was there."""
    return input.copy_(draws.draw(func, torch.empty_like(input), *args, **kwargs))


def _dropout(
    draws: Draws,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,  # what torch.dropout calls training
) -> Tensor:
    """The product with what becomes of ones."""
    if not (training and train) or p == 0:
        return input
    result = input * draws.draw(func, torch.ones_like(input), p, True)
    return input.copy_(result) if inplace else result


def _alpha_dropout(
    draws: Draws,
    func: Any,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    train: bool = False,
) -> Tensor:
    """What becomes of zeros, which is positive where the input is kept, and there the input on a smaller scale."""
    if not (training or train) or p == 0:
        return input
    of_zeros = draws.draw(func, torch.zeros_like(input), p, True)
    scale = 0.0 if p == 1 else ((1 - p) * (1 + p * SELU_DEPTH**2)) ** -0.5
    result = torch.where(of_zeros > 0, of_zeros + scale * input, of_zeros)
    return input.copy_(result) if inplace else result


def _rrelu(
    draws: Draws,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """Negative values times random slopes, which are what becomes of -1, negated."""
    slopes: float | Tensor = (lower + upper) / 2
    if training:
        slopes = -draws.draw(func, -torch.ones_like(input), lower, upper, True)
    result = torch.where(input < 0, slopes * input, input)
    return input.copy_(result) if inplace else result


def _dropout_inside(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Recurrent layers, and attention that is not written out. The only float among their arguments is the rate."""
    if kwargs.get("training", True) and any(isinstance(argument, float) and argument > 0 for argument in args):
        draws.refuse(func.__name__)
    return func(*args, **kwargs)


def _refused(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    draws.refuse(func.__name__)
    return func(*args, **kwargs)


def _run_while_compiling(function: Callable[..., bool]) -> Callable[..., bool]:
    """torch.compiler.assume_constant_result, without its import of the compiler, which takes longer than that of torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_run_while_compiling
def _know_the_rules() -> bool:
    """Fills ``RULES``, which takes a quarter of a second, once somebody needs them."""
    if not RULES:
        RULES.update(_rules())
    return True


@_run_while_compiling
def _show_every_draw_to_modes() -> bool:
    """The compiler, other than eager code, has a list of functions that modes are shown, and hides all others from them:
    torch.rand_like, torch.normal and more."""
    shown = _shown_to_modes()
    _added.update(function for function in RULES if function not in shown)
    shown.update(_added)
    return True


@_run_while_compiling
def _hide_them_again() -> bool:
    _shown_to_modes().difference_update(_added)
    _added.clear()
    return True


def _shown_to_modes() -> set[Any]:
    """The compiler's list, which only a private name reaches. Without it draws would differ from pass to pass, unseen."""
    try:
        from torch._dynamo.variables.torch import get_overridable_functions

        return get_overridable_functions()
    except (ImportError, AttributeError) as missing:
        raise RuntimeError(
            f"random numbers cannot be repeated in a compiled step with torch {torch.__version__}, whose compiler has no "
            "get_overridable_functions; take the step eagerly, or use engine='double_backward'"
        ) from missing


@_run_while_compiling
def _is_tagged(operator: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> bool:
    """Whether an operator of torch.ops, of torch or of another library, draws."""
    names: list[str] = [] if isinstance(operator, OpOverload) else operator.overloads()  # type: ignore[no-untyped-call]
    overloads = [getattr(operator, name) for name in names] or [operator]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _named(names: Iterable[str]) -> list[Any]:
    """The functions and methods of these names."""
    found = (getattr(place, name, None) for name in names for place in (torch, Tensor, F))
    return [function for function in found if callable(function)]


def _tagged_names() -> set[str]:
    """The names of functions and methods that are operators of torch's and draw."""
    names = {name for place in (torch, Tensor, F) for name in dir(place)}
    operators = {name: getattr(torch.ops.aten, name, None) for name in names if not name.startswith("__")}
    return {name for name, found in operators.items() if isinstance(found, OpOverloadPacket) and _is_tagged(found)}


def _rules() -> dict[Any, Callable[..., Any]]:
    return {
        **dict.fromkeys((*_named(_tagged_names()), *MADE_OF_TAGGED), _refused),
        **dict.fromkeys(_named(NEW + NEW_BY_PARAMETERS), _new),
        **dict.fromkeys(_named(FILLED), _filled),
        **dict.fromkeys(DROPOUTS, _dropout),
        **dict.fromkeys(ALPHA_DROPOUTS, _alpha_dropout),
        **dict.fromkeys((F.rrelu, torch.rrelu), _rrelu),
        **dict.fromkeys(WITH_DROPOUT_INSIDE, _dropout_inside),
    }


SELU_DEPTH = 1.7580993408473766  # SELU goes down to minus this, and so does what an alpha-dropout drops

NEW = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
NEW_BY_PARAMETERS = ("bernoulli", "normal", "multinomial", "poisson", "binomial")
FILLED = ("bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_")
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout)
ALPHA_DROPOUTS = (F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
WITH_DROPOUT_INSIDE = (F.multi_head_attention_forward, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
MADE_OF_TAGGED = (  # functions in Python, which are seen as a whole
    *(F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d),
    *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
)

RULES: dict[Any, Callable[..., Any]] = {}  # of functions and methods; filled on first use
_added: set[Any] = set()  # to the compiler's list, for the time being
