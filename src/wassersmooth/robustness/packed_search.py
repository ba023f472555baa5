"""Iterated attacks on the images that still stand, packed into batches of few fixed sizes.

An ensemble of attacks spends its time on the images that withstand it. So a search works on rows, one for each image or for
each image and target class; rows whose image has fallen are dropped, and the others are packed into a smaller batch. On CUDA a
batch has one of few sizes, and one iteration on it, the model's forward and backward pass included, is captured into a graph
and replayed: small networks are otherwise bound by the launching of kernels. Between the checks of which images have fallen,
nothing waits for the device.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from wassersmooth.model_state import call_model
from wassersmooth.robustness.attack_copy import attack_copy
from wassersmooth.robustness.balls import per_image

# Named tensors with one row for each image, or for each image and target class. All searches have "original", "label",
# "fallen" (bool), "found" (the image that fooled the model, or the best so far) and "turn" (the iterations that are done).
State = dict[str, Tensor]

CHECK_EVERY = 10  # iterations on CUDA between two looks at which rows have fallen; each waits for the device
WARM_UP = 2  # iterations outside of a graph, in which libraries choose their kernels; then the first look, as many fall at once
REPACKING = 10_000_000  # rows times pixels times iterations that must be saved: about as long as to capture another graph
FEW_ELEMENTS = 2**20  # a batch of so many pixels always fits, however few images the caller has handed over


class Search(ABC):
    """An attack, one iteration at a time.

    ``advance`` changes the tensors of its state in place and depends on nothing else that changes from one iteration to the
    next, so that it can be replayed. It must not wait for the device: no value of a tensor is read.
    """

    iterations: int

    @abstractmethod
    def start(self, model: nn.Module, state: State, generator: torch.Generator | None) -> None:
        """Add the tensors that the search needs to a state with ``original``, ``label``, ``target``, ``found``, ``fallen``."""

    @abstractmethod
    def advance(self, model: nn.Module, state: State) -> None:
        """One iteration."""

    def prepare(self, state: State, iteration: int, generator: torch.Generator | None) -> None:  # noqa: B027
        """What is to be done before some iterations only."""

    def succeeds(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Which rows with these outputs have fallen. # shape: (B, K), (B,) -> (B,) bool"""
        return fooled(outputs, labels)


class StandingImages:
    """Images, the best perturbation found for each, and which of them still stand.

    Arguments:
        model: in the state to attack it in; the caller restores it.
        images, labels: already checked.
        stands: which images to attack.
        generator: where the searches draw from.
        fixed: pack into few sizes of batches, which are used again, and look seldom at what has fallen; by default on CUDA.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        stands: Tensor,
        generator: torch.Generator | None,
        fixed: bool | None = None,
    ) -> None:
        self.model, self.labels, self.generator = model, labels, generator
        self.fixed = images.is_cuda if fixed is None else fixed
        self.stands, self.found = stands.clone(), images.clone()
        self.images = _in_fast_format(model, images)
        self.asked = attack_copy(model, self.images)
        self.limit = max(len(images), FEW_ELEMENTS // images[0].numel()) if self.fixed else len(images)
        self.steps = _Steps(self.asked, images.device, self.fixed)

    def attack(self, search: Search, targets: Tensor | None = None) -> None:
        """Run the search on every image that stands, until it falls; with targets (B, T), towards each of them in turn."""
        standing = self.stands.nonzero()[:, 0]
        choices = self.labels[:, None] if targets is None else targets
        rows, target = standing.repeat(choices.shape[1]), choices[standing].T.flatten()  # one target after the other
        fallen = ~self.stands
        while True:
            left = (~fallen[rows]).nonzero()[:, 0]
            rows, target = rows[left], target[left]
            if not len(rows):
                break
            self._run(search, rows[: self.limit], target[: self.limit], fallen)
            rows, target = rows[self.limit :], target[self.limit :]
        self.steps.forget()
        self._confirm(fallen)

    def _run(self, search: Search, rows: Tensor, target: Tensor, fallen: Tensor) -> None:
        """Run the search on some rows, and note which images have fallen, and how."""
        state = self._begin(search, rows, target)
        step = self.steps.on(search, state)
        for iteration in range(search.iterations):
            search.prepare(step.state, iteration, self.generator)
            step()
            last = iteration + 1 == search.iterations
            if not last and not self._is_time_to_check(iteration + 1):
                continue
            fell = self._confirmed_rows(search, step.state, len(rows))
            if last or bool(fell.any()):
                self._note(step.state, rows, fell, fallen, last)
                keep = (~fallen[rows]).nonzero()[:, 0]
                if last or not len(keep):
                    return
                size = self._size(len(keep))
                if self._is_worth_packing(len(step.state["label"]) - size, search.iterations - iteration - 1):
                    rows = rows[keep]
                    step = self.steps.on(search, _rows_of(step.state, _padded(keep, size), len(keep)))

    def _begin(self, search: Search, rows: Tensor, target: Tensor) -> State:
        padded = _padded(torch.arange(len(rows), device=rows.device), self._size(len(rows)))
        original = _like_format(self.images[rows[padded]], self.images)
        state = {
            "original": original,
            "label": self.labels[rows[padded]],
            "target": target[padded],
            "found": original.clone(),
            "fallen": torch.arange(len(padded), device=rows.device) >= len(rows),
            "turn": torch.zeros_like(padded),
        }
        search.start(self.asked, state, self.generator)
        return {name: _like_format(held, original) if held.shape == original.shape else held for name, held in state.items()}

    def _confirmed_rows(self, search: Search, state: State, count: int) -> Tensor:
        """Which of the first rows have fallen. What fooled the copy of the model and not the model itself goes on."""
        fell = state["fallen"][:count]
        if self.asked is self.model or not bool(fell.any()):
            return fell
        at = fell.nonzero()[:, 0]
        with torch.no_grad():
            fell[at] = search.succeeds(call_model(self.model, state["found"][at]), state["label"][at])
        return fell

    def _note(self, state: State, rows: Tensor, fell: Tensor, fallen: Tensor, last: bool) -> None:
        """Keep the images that fooled the model; at the end also the best of the others, for the first row of each image."""
        order = torch.arange(len(rows), device=rows.device)
        none = len(rows)
        for chosen in (~fell & ~fallen[rows], fell) if last else (fell,):
            first = torch.full((len(fallen),), none, device=rows.device)
            first.scatter_reduce_(0, rows, torch.where(chosen, order, none), "amin")
            images = (first < none).nonzero()[:, 0]
            self.found[images] = state["found"][first[images]]
        fallen[rows[fell]] = True

    def _confirm(self, fallen: Tensor) -> None:
        """Count only what fools the model in a batch of all images, as the caller sees them: rounding differs by batch."""
        with torch.no_grad():
            self.stands &= ~(fallen & fooled(call_model(self.model, self.found), self.labels))

    def _is_time_to_check(self, done: int) -> bool:
        return not self.fixed or done == WARM_UP or done % CHECK_EVERY == 0

    def _is_worth_packing(self, saved: int, left: int) -> bool:
        """Whether so many rows less in each of the iterations that are left repay the capture of another graph."""
        pixels = self.images.shape[-2] * self.images.shape[-1]
        return saved > 0 and (not self.fixed or saved * left * pixels >= REPACKING)

    def _size(self, rows: int) -> int:
        """The size of a batch for so many rows: that number, or the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 36, 40, ...

        From 32 on there are eight sizes to each doubling, so that padding adds at most an eighth. None is above the limit.
        """
        if not self.fixed:
            return rows
        power = 1 << (rows - 1).bit_length()
        step = power // 16 if power > 32 else max(power // 4, 1)
        return min(self.limit, -(-rows // step) * step)


def fooled(outputs: Tensor, labels: Tensor) -> Tensor:
    """Which images are misclassified; scores that are not finite classify nothing. # shape: (B, K), (B,) -> (B,) bool"""
    return (outputs.argmax(1) != labels) & outputs.isfinite().all(1)


def keep(state: State, name: str, where: Tensor, values: Tensor) -> None:
    """Overwrite the rows of a tensor of the state where ``where`` is true. # shape: (B,) bool"""
    held = state[name]
    held.copy_(torch.where(per_image(where, held), values, held))


class _Step:
    """One iteration of a search on a batch of one size, replayed from a graph where that is possible."""

    def __init__(self, steps: _Steps, search: Search, state: State) -> None:
        self.steps, self.search, self.state = steps, search, state
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, state: State) -> None:
        """Continue with other rows, in the memory that the graph reads and writes."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    def __call__(self) -> None:
        if self.steps.capture and self.graph is None and self.calls >= WARM_UP:
            self.graph = self.steps.captured(self._advance)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.steps.eagerly(self._advance)
        self.calls += 1

    def _advance(self) -> None:
        self.search.advance(self.steps.model, self.state)


class _Steps:
    """The steps of one search, one for each size of a batch. Their graphs never run side by side, so they share their memory.

    Arguments:
        model: what every iteration asks.
        device: of the images; graphs are used on CUDA.
        fixed: keep the steps for later batches of the same size.
    """

    def __init__(self, model: nn.Module, device: torch.device, fixed: bool) -> None:
        self.model, self.device, self.fixed = model, device, fixed
        self.steps: dict[int, _Step] = {}
        self.capture = device.type == "cuda" and _is_on(model, device)
        if self.capture:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()

    def on(self, search: Search, state: State) -> _Step:
        """The step for a batch of this size, with this state."""
        size = len(state["label"])
        if size in self.steps:
            self.steps[size].load(state)
            return self.steps[size]
        step = _Step(self, search, state)
        if self.fixed:
            self.steps[size] = step
        return step

    def forget(self) -> None:
        """Free the graphs: the next search has others."""
        self.steps.clear()
        if self.capture:
            self.pool = torch.cuda.graph_pool_handle()

    def eagerly(self, advance: Callable[[], None]) -> None:
        """Run one iteration without a graph; if the model draws random numbers on the CPU, no graph will be captured."""
        if not self.capture:
            advance()
            return
        before, current = _cpu_randomness(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            advance()
        current.wait_stream(self.stream)
        self.capture = _cpu_randomness() == before  # a graph would repeat the numbers of its capture for ever

    def captured(self, advance: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """A graph of one iteration, which is not run; None where the model cannot be captured, such as one that waits."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                advance()
        except RuntimeError:  # also out of memory: without a graph less is needed
            self.capture = False
            self.steps.clear()
            torch.cuda.synchronize(self.device)
            return None
        return graph


def _is_on(model: nn.Module, device: torch.device) -> bool:
    """Whether all of the model is on one device, and knows no other."""
    tensors = (tensor for group in (model.parameters(), model.buffers()) for tensor in group)
    parallel = any(isinstance(module, nn.DataParallel) for module in model.modules())
    return not parallel and all(tensor.device == device for tensor in tensors)


def _cpu_randomness() -> tuple[bytes, object, str]:
    """The state of the global generators on the CPU."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state(legacy=False))


def _in_fast_format(model: nn.Module, images: Tensor) -> Tensor:
    """The images with channels last, in which convolutions on CUDA are fastest, unless the model needs them otherwise."""
    if not images.is_cuda or not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return images
    fast = images.contiguous(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            call_model(model, fast[:2])
    except (RuntimeError, ValueError):  # it has a view that needs channels first
        return images
    return fast


def _like_format(tensor: Tensor, reference: Tensor) -> Tensor:
    """Indexing may change the memory format: restore it."""
    last = reference.dim() == 4 and reference.is_contiguous(memory_format=torch.channels_last)
    return tensor.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _padded(index: Tensor, size: int) -> Tensor:
    """Repeat the first entries until there are ``size`` of them."""
    return index[torch.arange(size, device=index.device) % len(index)]


def _rows_of(state: State, index: Tensor, count: int) -> State:
    """These rows of the state, of which those after the first ``count`` are padding."""
    packed = {name: _like_format(tensor[index], tensor) for name, tensor in state.items()}
    packed["fallen"] |= torch.arange(len(index), device=index.device) >= count
    return packed
