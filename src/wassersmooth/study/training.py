"""The training loop (:func:`training`): crash-safe, and after a kill it resumes bit-identically on a CPU."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth._checks import NotFiniteError
from wassersmooth._torch_internals import foreach_lerp, is_batch_norm
from wassersmooth.learning.losses import SmoothedCrossEntropy
from wassersmooth.learning.objective import Objective
from wassersmooth.model_state import call_model
from wassersmooth.robustness.attacks import IFGSM
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.model_queries import isolated_model
from wassersmooth.study import checkpoints, models, provenance
from wassersmooth.study.acceleration import TrainingStep, fast_options, training_step
from wassersmooth.study.config import FREE_TO_CHANGE, RunConfig
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset, Part, batches
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.model_fingerprint import ON_ANY_DEVICE, fixed_scores, require_same_scores
from wassersmooth.study.runs import Run, with_new_fields
from wassersmooth.study.stored_json import PERCENT, list_of, number, object_with, one_line, optional, text, whole

TRAIN_ERROR_IMAGES = 2000  # images on which the training error is measured, in eval mode
ATTACK, ATTACKED_IMAGES = IFGSM(8 / 255, 2 / 255, 10), 500  # for patience_on = "robust"
CHECKPOINT = object_with(
    {"config": object_with({}), "data": text, "epoch": whole(0), "steps": whole(0)},
    {"best_error": optional(PERCENT), "best_epoch": whole(0), "scores": optional(list_of(list_of(number())))},
)
EVALUATION_BATCH = {"cpu": 500, "cuda": 2500}  # on a GPU few large batches, since kernel launches dominate


def training(run: Run, data: Dataset, world: World, console: Console, objective: Objective | None = None) -> Iterator[None]:
    """Train one run to its end, from its last checkpoint. Yields after each step, so that several runs can be interleaved.

    ``objective`` is minimized in place of that of the run's regularizer, without its ramp. It is not in the configuration: the
    caller keeps its runs in a folder of their own.
    """
    recipe, config = run.config.training, run.config.data
    state = TrainingState(run.config, data, world, objective)
    state.resume(run)
    models.require_training_in_batches(state.model, data, recipe.batch_size, world.size)
    step = state.build_step()
    if state.ramp > recipe.epochs:
        share = f"{recipe.epochs}/{state.ramp}"
        console.line(f"{run.config.name}: eta ends at {share} of its strength; shorten --eta-ramp, or train longer")
    task = console.task(run.config.name, recipe.epochs, state.epoch)
    while state.epoch < recipe.epochs and not state.out_of_patience:
        started = time.perf_counter()
        rate = state.begin_epoch()
        if state.norm_is_frozen and state.epoch == recipe.freeze_norm_after:
            step = state.build_step()  # a fast step is prepared for one mode of each module
        totals, seen = [], 0
        for images, labels in batches(data.train, recipe.batch_size, config.augment, state.order, config.elastic):
            if len(labels) < world.size:
                continue  # the last batch has fewer images than there are processes
            loss, penalty = _checked_step(step, *world.shard(images, labels), state, run)
            state.average()
            totals.append(torch.stack([loss, penalty]) * len(labels))
            seen += len(labels)
            task.within(state.epoch + seen / len(data.train))
            yield
        errors = (error_percent(state.result, data.train, TRAIN_ERROR_IMAGES), error_percent(state.result, data.validation))
        yield  # nothing has waited for the GPU yet: concurrent runs continue while it computes
        _require_finite(torch.stack(totals), state, run)
        loss_mean, penalty_mean = (world.mean(torch.stack(totals).sum(0)) / seen).tolist()
        # Batch-norm statistics differ between processes: the errors of rank 0 decide, else some would stop and others wait.
        train_error, validation_error = (None if one is None else float(world.broadcast(one)) for one in errors)
        if any(one is not None and math.isnan(one) for one in (train_error, validation_error)):
            # No loss shows the effect of the last step, and bad weights must not be saved as a checkpoint or as the result.
            raise _diverged(
                f"the network's scores are not finite after step {state.steps} (epoch {state.epoch + 1})", state, run
            )
        on_robust = recipe.patience is not None and recipe.patience_on == "robust"
        robust_error = float(world.broadcast(attacked_error(state.result, data.validation))) if on_robust else None
        state.end_epoch(robust_error if on_robust else validation_error)
        row = {"epoch": state.epoch, "loss": loss_mean, "penalty": penalty_mean}
        row |= {"train_error": train_error, "validation_error": validation_error}
        row |= {"robust_error": robust_error} if on_robust else {}
        row |= {"learning_rate": rate, "seconds": round(time.perf_counter() - started, 4)}
        if world.is_first:
            run.append_metrics(row)
            if state.epoch % recipe.checkpoint_every == 0 or state.epoch == recipe.epochs or state.out_of_patience:
                state.save(run)
        task.update(state.epoch, _note(row))
    if state.best:
        kept = f"epoch {state.best_epoch} of {state.epoch} is kept"
        console.line(f"{run.config.name}: {kept}, with a {recipe.patience_on} validation error of {state.best_error:.1f} %")
    state.restore_best()
    if world.is_first:
        run.finish(state.result, data, provenance.describe(world.device))


def ramp_of(config: RunConfig) -> int:
    """The first epoch at full eta; 0 without a ramp. Weights of earlier epochs are never kept as the best."""
    return config.training.eta_ramp if config.regularizer.can_grow else 0


class TrainingState:
    """Everything that changes during training, how it is saved in a checkpoint and how it is restored."""

    def __init__(self, config: RunConfig, data: Dataset, world: World, objective: Objective | None = None) -> None:
        self.config, self.data, self.world, self.objective = config, data, world, objective
        recipe, device = config.training, world.device
        self.model = models.build_for(config.model, data, config.seed).to(device)
        if device.type == "cuda" and any(fast_options(config.machine, device)):
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # fastest for convolutions
        self.wrapped: nn.Module | None = None
        self.averaged = copy.deepcopy(self.model) if recipe.average_weights else None
        self.moving = ([], []) if self.averaged is None else (_moving(self.averaged), _moving(self.model))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            recipe.learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=device.type == "cuda",
        )
        torch.manual_seed(config.seed + (world.rank << 32))  # for random layers, such as dropout
        self.order = torch.Generator().manual_seed(config.seed)
        self.noise = torch.Generator(device).manual_seed(config.seed + (world.rank << 32))
        self.eta = torch.tensor(config.regularizer.eta, device=device)  # a tensor, so that a captured step sees the ramp
        self.ramp = ramp_of(config)
        self.epoch = self.steps = 0
        self.saved_epoch: int | None = None
        self.best_error, self.best_epoch = math.inf, 0
        self.best: dict[str, Tensor] = {}

    def build_step(self) -> TrainingStep:
        config = self.config
        eta = self.eta if self.ramp else None
        smoothing = config.training.label_smoothing
        loss = SmoothedCrossEntropy(smoothing) if smoothing else None
        objective = self.objective or config.regularizer.objective(self.data.size, config.training.engine, eta, loss)
        self.wrapped = self.world.wrap(self.model) if self.wrapped is None else self.wrapped
        return training_step(self.wrapped, objective, self.optimizer, self.noise, config.machine, self.world.device)

    def begin_epoch(self) -> float:
        """Set the learning rate and eta of the next epoch; return the rate."""
        recipe = self.config.training
        rate = recipe.learning_rate * 0.1 ** sum(self.epoch >= milestone for milestone in recipe.milestones)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.ramp:
            self.eta.fill_(self.config.regularizer.eta * min(1.0, (self.epoch + 1) / self.ramp))
        self.model.train()
        if self.norm_is_frozen:
            for module in self.model.modules():
                if is_batch_norm(module):
                    module.eval()
        return rate

    @property
    def norm_is_frozen(self) -> bool:
        """Whether batch-norm uses its running statistics in this epoch, in training too."""
        after = self.config.training.freeze_norm_after
        return after is not None and self.epoch >= after

    @property
    def result(self) -> nn.Module:
        """What is evaluated and kept: the network with the average of its weights, or itself."""
        return self.model if self.averaged is None else self.averaged

    @torch.no_grad()
    def average(self) -> None:
        """Move the average of the weights and of the running statistics after a step; at first it forgets sooner."""
        if self.averaged is None:
            return
        share = 1 - min(self.config.training.average_weights, (1 + self.steps) / (10 + self.steps))
        foreach_lerp(*self.moving, share)

    def _copy_counts(self) -> None:
        """Give the average the integers of the network, such as how many batches its statistics are of."""
        if self.averaged is not None:
            for average, now in zip(self.averaged.buffers(), self.model.buffers(), strict=True):
                if not average.is_floating_point():
                    average.copy_(now)

    def end_epoch(self, validation_error: float | None) -> None:
        """Keep the weights if they are the best so far; weights of the ramp, which had a smaller eta, are not kept."""
        self.epoch += 1
        self._copy_counts()
        if self.config.training.patience is None or self.epoch < self.ramp:
            return
        if validation_error is not None and validation_error < self.best_error:
            self.best_error, self.best_epoch = validation_error, self.epoch
            self.best = {name: tensor.detach().clone() for name, tensor in self.result.state_dict().items()}

    @property
    def out_of_patience(self) -> bool:
        """Whether too many epochs at full eta have passed since the best one."""
        patience = self.config.training.patience
        return patience is not None and self.epoch - max(self.best_epoch, self.ramp - 1) >= patience

    def restore_best(self) -> None:
        if self.best:
            self.result.load_state_dict(self.best)

    def save(self, run: Run) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        if self.averaged is not None:
            tensors |= {f"averaged/{name}": tensor for name, tensor in self.averaged.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        tensors |= {"random/cpu": torch.get_rng_state(), "random/order": self.order.get_state()}
        tensors |= {"random/noise": self.noise.get_state()}
        if self.world.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.world.device)
        scores = {"scores": fixed_scores(self.model, self.data.shape)}
        checkpoints.save(run.checkpoint_path, tensors, self._identity() | self._progress() | scores)
        self.saved_epoch = self.epoch

    def resume(self, run: Run) -> None:
        """Continue from the run's checkpoint, if it has one, and cut the metrics back to it."""
        path = run.checkpoint_path
        raw = checkpoints.read(path) if self.world.is_first and path.exists() else None
        raw = self.world.broadcast_bytes(raw)
        if raw is not None:
            stored = checkpoints.parse(raw, path)
            if wrong := CHECKPOINT(stored.facts):
                raise StudyError(
                    f"{path} is not the checkpoint of a run: {wrong}; it was left as it is; choose another --output"
                )
            facts = stored.facts | {"config": with_new_fields(stored.facts["config"])}
            for key, value in self._identity().items():
                if facts.get(key) != value:
                    what = "another configuration" if key == "config" else "other training images"
                    raise StudyError(f"{path} belongs to {what}; it was left as it is; choose another --output")
            try:
                self._restore(stored, run)
            except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:  # torch refuses a state in many ways
                raise StudyError(
                    f"{path} does not hold the state of this run ({type(error).__name__}: {one_line(error)}); it was left as "
                    "it is; choose another --output"
                ) from None
        if self.world.is_first:
            run.cut_metrics(self.epoch)

    def _restore(self, stored: checkpoints.Stored, run: Run) -> None:
        checkpoints.load_into(self.model, stored.with_prefix("model"), run.checkpoint_path)
        require_same_scores(self.model, stored.facts, self.data.shape, run.checkpoint_path, ON_ANY_DEVICE)
        if self.averaged is not None:
            checkpoints.load_into(self.averaged, stored.with_prefix("averaged"), run.checkpoint_path)
        momentum: dict[int, dict[str, Any]] = {}
        parameters = list(self.model.parameters())
        for name, tensor in stored.with_prefix("optimizer").items():
            index, _, key = name.partition("/")
            like = parameters[int(index)].detach()  # the buffer gets the memory format of its parameter
            value = torch.empty_like(like).copy_(tensor) if tensor.shape == like.shape else tensor
            momentum.setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict({"state": momentum, "param_groups": self.optimizer.state_dict()["param_groups"]})
        facts = stored.facts
        self.epoch, self.steps, self.saved_epoch = facts["epoch"], facts["steps"], facts["epoch"]
        if facts.get("best_error") is not None and facts["best_epoch"] >= self.ramp:  # earlier versions kept epochs of the ramp
            self.best_error, self.best_epoch = facts["best_error"], facts["best_epoch"]
            self.best = {name: tensor.to(self.world.device) for name, tensor in stored.with_prefix("best").items()}
        self.order.set_state(stored.tensors["random/order"])
        if self.world.is_first:  # other processes keep the seed of their rank: the file holds one state
            torch.set_rng_state(stored.tensors["random/cpu"])
            if self.noise.device.type == self.world.device.type and len(stored.tensors["random/noise"]) == len(
                self.noise.get_state()
            ):
                self.noise.set_state(stored.tensors["random/noise"])
            if self.world.device.type == "cuda" and "random/cuda" in stored.tensors:
                torch.cuda.set_rng_state(stored.tensors["random/cuda"], self.world.device)

    def _identity(self) -> dict[str, Any]:
        """The facts by which a checkpoint is recognized as this run's."""
        config = {key: value for key, value in self.config.to_flat().items() if key not in FREE_TO_CHANGE}
        return {"config": config, "data": self.data.fingerprint}

    def _progress(self) -> dict[str, Any]:
        best = self.best_error if math.isfinite(self.best_error) else None
        return {"epoch": self.epoch, "steps": self.steps, "best_error": best, "best_epoch": self.best_epoch}


def _moving(model: nn.Module) -> list[Tensor]:
    """What an average is of, listed once: walking through the modules in every step would cost more than the average."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]


@torch.no_grad()
def error_percent(model: nn.Module, part: Part, limit: int | None = None) -> Tensor | None:
    """The error on the first ``limit`` images in eval mode, in percent, as a tensor on their device; None without images.

    It is nan if a score is not finite, since argmax then means nothing.
    """
    if not len(part):
        return None
    was_training = model.training
    model.eval()
    images, labels = part.images[:limit], part.labels[:limit]
    size = EVALUATION_BATCH[images.device.type]
    wrong, finite = [], []
    for x, y in zip(torch.split(images, size), torch.split(labels, size), strict=True):
        scores = call_model(model, x)
        wrong.append((scores.argmax(1) != y).sum())
        finite.append(scores.isfinite().all())
    model.train(was_training)
    percent = 100 * torch.stack(wrong).sum().double() / len(labels)
    return torch.where(torch.stack(finite).all(), percent, torch.nan)


def attacked_error(model: nn.Module, part: Part) -> Tensor:
    """The error of the first images under a short attack, in percent, on their device; for early stopping only."""
    images, labels = part.images[:ATTACKED_IMAGES], part.labels[:ATTACKED_IMAGES]
    with isolated_model(model, images) as inner:
        inner.eval()
        wrong = Measurement(inner, images, labels, seed=0).misclassified("robust", ATTACK)
    return 100 * wrong.double().mean().to(images.device)


def _checked_step(
    step: TrainingStep, images: Tensor, labels: Tensor, weight: float, state: TrainingState, run: Run
) -> tuple[Tensor, Tensor]:
    """Take a step; raise if the loss is not finite. On CUDA that is checked at the end of the epoch."""
    state.steps += 1
    try:
        loss, penalty = step(images, labels, weight)
    except NotFiniteError as error:
        raise _diverged(f"the loss is nan at step {state.steps} (epoch {state.epoch + 1})", state, run) from error
    except ValueError as error:  # the library's messages are one line with a remedy already
        raise StudyError(f"{run.folder}: {error}") from error
    if loss.device.type == "cpu":
        _require_finite(torch.stack([loss, penalty])[None], state, run)
    return loss, penalty


def _require_finite(latest: Tensor, state: TrainingState, run: Run) -> None:
    """Stop the run at the first of the latest steps whose loss or penalty is not finite. # shape: (steps, 2)"""
    finite = torch.isfinite(latest).all(1)
    if bool(finite.all()):
        return
    first = int(finite.int().argmin())
    step = state.steps - len(latest) + first + 1
    raise _diverged(f"the loss is {latest[first].sum().item()} at step {step} (epoch {state.epoch + 1})", state, run)


def _diverged(what: str, state: TrainingState, run: Run) -> DivergedError:
    rate = state.optimizer.param_groups[0]["lr"]
    saved = (
        f"{run.checkpoint_path} of epoch {state.saved_epoch}" if state.saved_epoch else "none: it happened before the first one"
    )
    return DivergedError(
        f"{run.folder}: {what} with learning rate {rate:g}; the last good checkpoint is {saved}; "
        "lower --learning-rate or eta, or let eta grow with --eta-ramp"
    )


def _note(row: dict[str, Any]) -> str:
    validation = "" if row["validation_error"] is None else f"  validation error {row['validation_error']:.1f} %"
    validation += f", robust {row['robust_error']:.1f} %" if "robust_error" in row else ""
    return f"loss {row['loss']:.3f} + {row['penalty']:.3f}{validation}"
