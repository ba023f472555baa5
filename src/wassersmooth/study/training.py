"""The training loop: crash-safe, resumable to the bit on a CPU, and read in one screen (:func:`training`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth._checks import NotFiniteError
from wassersmooth.model_state import answer
from wassersmooth.robustness.attacks import IFGSM
from wassersmooth.robustness.classifier import attacked
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.study import checkpoints, models, provenance
from wassersmooth.study.acceleration import Step, make_step, shortcuts
from wassersmooth.study.config import FREE_TO_CHANGE, RunConfig
from wassersmooth.study.data import Dataset, Part, batches
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.fixed_scores import ON_ANY_DEVICE, fixed_scores, require_same_scores
from wassersmooth.study.runs import Run, with_new_fields
from wassersmooth.study.screen import Screen

TRAIN_ERROR_IMAGES = 2000  # the training error is measured on so many, in eval mode
ATTACK, ATTACKED_IMAGES = IFGSM(8 / 255, 2 / 255, 10), 500  # what patience_on = "robust" looks at
EVALUATION_BATCH = {"cpu": 500, "cuda": 2500}  # where launches take longer than the images, few large batches


def training(run: Run, data: Dataset, world: World, screen: Screen) -> Iterator[None]:
    """Trains one run to its end, from its last checkpoint. Pauses after each step, so that several runs can take turns."""
    recipe = run.config.training
    state = TrainingState(run.config, data, world)
    state.resume(run)
    models.require_training_in_batches(state.model, data, recipe.batch_size, world.size)
    step = state.make_step()
    if state.ramp > recipe.epochs:
        share = f"{recipe.epochs}/{state.ramp}"
        screen.line(f"{run.config.name}: eta ends at {share} of its strength; shorten --eta-ramp, or train longer")
    task = screen.task(run.config.name, recipe.epochs, state.epoch)
    while state.epoch < recipe.epochs and not state.out_of_patience:
        started = time.perf_counter()
        rate = state.begin_epoch()
        totals, seen = [], 0
        for images, labels in batches(data.train, recipe.batch_size, run.config.data.augment, state.order):
            if len(labels) < world.size:
                continue  # a last batch that does not reach every process
            loss, penalty = _guarded(step, *world.share(images, labels), state, run)
            totals.append(torch.stack([loss, penalty]) * len(labels))
            seen += len(labels)
            task.within(state.epoch + seen / len(data.train))
            yield
        errors = error(state.model, data.train, TRAIN_ERROR_IMAGES), error(state.model, data.validation)
        yield  # nobody has waited for the GPU yet: runs beside this one go on while it computes
        _require_finite(torch.stack(totals), state, run)
        loss_mean, penalty_mean = (world.mean(torch.stack(totals).sum(0)) / seen).tolist()
        # Batch-norm has statistics of its own in each process: the first one's errors decide, or some stop and others wait.
        train_error, validation_error = (None if one is None else float(world.as_first(one)) for one in errors)
        if any(one is not None and math.isnan(one) for one in (train_error, validation_error)):
            # The last step shows in no loss: what it left must be saved neither as a good checkpoint nor as the result.
            raise _diverged(
                f"the network's scores are not finite after step {state.steps} (epoch {state.epoch + 1})", state, run
            )
        on_robust = recipe.patience is not None and recipe.patience_on == "robust"
        robust_error = float(world.as_first(attacked_error(state.model, data.validation))) if on_robust else None
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
        screen.line(f"{run.config.name}: {kept}, with a {recipe.patience_on} validation error of {state.best_error:.1f} %")
    state.restore_best()
    if world.is_first:
        run.finish(state.model, data, provenance.describe(world.device))


def ramp_of(config: RunConfig) -> int:
    """The first epoch with all of eta; 0 where nothing grows. Weights before it are never kept."""
    return config.training.eta_ramp if config.regularizer.can_grow else 0


class TrainingState:
    """Everything that changes while a run is trained, and how it goes into a checkpoint and comes back."""

    def __init__(self, config: RunConfig, data: Dataset, world: World) -> None:
        self.config, self.data, self.world = config, data, world
        recipe, device = config.training, world.device
        self.model = models.build_for(config.model, data, config.seed).to(device)
        if device.type == "cuda" and any(shortcuts(config.machine, device)):
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # fastest for convolutions
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            recipe.learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            fused=device.type == "cuda",
        )
        torch.manual_seed(config.seed + (world.rank << 32))  # for layers that draw, such as dropout
        self.order = torch.Generator().manual_seed(config.seed)
        self.noise = torch.Generator(device).manual_seed(config.seed + (world.rank << 32))
        self.eta = torch.tensor(config.regularizer.eta, device=device)  # a tensor, so that a captured step sees the ramp
        self.ramp = ramp_of(config)
        self.epoch = self.steps = 0
        self.saved_epoch: int | None = None
        self.best_error, self.best_epoch = math.inf, 0
        self.best: dict[str, Tensor] = {}

    def make_step(self) -> Step:
        config = self.config
        eta = self.eta if self.ramp else None
        try:
            objective = config.regularizer.objective(self.data.size, config.training.engine, eta)
        except ValueError as error:
            raise StudyError(f"{config.regularizer}: {error}") from None
        model = self.world.wrapped(self.model)
        return make_step(model, objective, self.optimizer, self.noise, config.machine, self.world.device)

    def begin_epoch(self) -> float:
        """Sets the learning rate and eta of the epoch to come; returns the rate."""
        recipe = self.config.training
        rate = recipe.learning_rate * 0.1 ** sum(self.epoch >= milestone for milestone in recipe.milestones)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.ramp:
            self.eta.fill_(self.config.regularizer.eta * min(1.0, (self.epoch + 1) / self.ramp))
        self.model.train()
        return rate

    def end_epoch(self, validation_error: float | None) -> None:
        """Keeps the weights where they are the best yet; none of a ramp, which belong to a smaller eta."""
        self.epoch += 1
        if self.config.training.patience is None or self.epoch < self.ramp:
            return
        if validation_error is not None and validation_error < self.best_error:
            self.best_error, self.best_epoch = validation_error, self.epoch
            self.best = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    @property
    def out_of_patience(self) -> bool:
        """Whether too many epochs at full eta have passed since the best one."""
        patience = self.config.training.patience
        return patience is not None and self.epoch - max(self.best_epoch, self.ramp - 1) >= patience

    def restore_best(self) -> None:
        if self.best:
            self.model.load_state_dict(self.best)

    def save(self, run: Run) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
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
        """Goes on from the run's checkpoint, where there is one, and cuts the metrics back to it."""
        path = run.checkpoint_path
        raw = path.read_bytes() if self.world.is_first and path.exists() else None
        raw = self.world.from_first(raw)
        if raw is not None:
            stored = checkpoints.parse(raw, path)
            facts = stored.facts | {"config": with_new_fields(stored.facts.get("config", {}))}
            for key, value in self._identity().items():
                if facts.get(key) != value:
                    what = "another configuration" if key == "config" else "other training images"
                    raise StudyError(f"{path} belongs to {what}; it was left as it is; choose another --output")
            self._restore(stored, run)
        if self.world.is_first:
            run.cut_metrics(self.epoch)

    def _restore(self, stored: checkpoints.Stored, run: Run) -> None:
        checkpoints.load_into(self.model, stored.under("model"), run.checkpoint_path)
        require_same_scores(self.model, stored.facts, self.data.shape, run.checkpoint_path, ON_ANY_DEVICE)
        momentum: dict[int, dict[str, Any]] = {}
        parameters = list(self.model.parameters())
        for name, tensor in stored.under("optimizer").items():
            index, _, key = name.partition("/")
            alike = parameters[int(index)].detach()
            laid_out = torch.empty_like(alike).copy_(tensor) if tensor.shape == alike.shape else tensor
            momentum.setdefault(int(index), {})[key] = laid_out
        self.optimizer.load_state_dict({"state": momentum, "param_groups": self.optimizer.state_dict()["param_groups"]})
        facts = stored.facts
        self.epoch, self.steps, self.saved_epoch = facts["epoch"], facts["steps"], facts["epoch"]
        if facts["best_error"] is not None and facts["best_epoch"] >= self.ramp:  # earlier versions kept some of the ramp
            self.best_error, self.best_epoch = facts["best_error"], facts["best_epoch"]
            self.best = {name: tensor.to(self.world.device) for name, tensor in stored.under("best").items()}
        self.order.set_state(stored.tensors["random/order"])
        if self.world.is_first:  # the others were seeded by their rank: one file cannot hold the states of all
            torch.set_rng_state(stored.tensors["random/cpu"])
            if self.noise.device.type == self.world.device.type and len(stored.tensors["random/noise"]) == len(
                self.noise.get_state()
            ):
                self.noise.set_state(stored.tensors["random/noise"])
            if self.world.device.type == "cuda" and "random/cuda" in stored.tensors:
                torch.cuda.set_rng_state(stored.tensors["random/cuda"], self.world.device)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be this run's."""
        config = {key: value for key, value in self.config.to_flat().items() if key not in FREE_TO_CHANGE}
        return {"config": config, "data": self.data.fingerprint}

    def _progress(self) -> dict[str, Any]:
        best = self.best_error if math.isfinite(self.best_error) else None
        return {"epoch": self.epoch, "steps": self.steps, "best_error": best, "best_epoch": self.best_epoch}


@torch.no_grad()
def error(model: nn.Module, part: Part, limit: int | None = None) -> Tensor | None:
    """The error on the first ``limit`` images in eval mode, in percent, on their device; None where there are no images.

    It is nan where a score is not finite: the class that argmax names then means nothing.
    """
    if not len(part):
        return None
    was_training = model.training
    model.eval()
    images, labels = part.images[:limit], part.labels[:limit]
    size = EVALUATION_BATCH.get(images.device.type, 500)
    wrong, good = [], []
    for x, y in zip(torch.split(images, size), torch.split(labels, size), strict=True):
        scores = answer(model, x)
        wrong.append((scores.argmax(1) != y).sum())
        good.append(scores.isfinite().all())
    model.train(was_training)
    share = 100 * torch.stack(wrong).sum().double() / len(labels)
    return torch.where(torch.stack(good).all(), share, torch.nan)


def attacked_error(model: nn.Module, part: Part) -> Tensor:
    """The error of the first images under a short attack, in percent, on their device; it steers, and measures nothing."""
    images, labels = part.images[:ATTACKED_IMAGES], part.labels[:ATTACKED_IMAGES]
    with attacked(model, images) as inner:
        inner.eval()
        wrong = Measurement(inner, images, labels, seed=0).wrong("robust", ATTACK)
    return 100 * wrong.double().mean().to(images.device)


def _guarded(
    step: Step, images: Tensor, labels: Tensor, weight: float, state: TrainingState, run: Run
) -> tuple[Tensor, Tensor]:
    """A step that names where it was when the loss stopped being a number. On CUDA that shows at the end of the epoch."""
    state.steps += 1
    try:
        loss, penalty = step(images, labels, weight)
    except NotFiniteError as error:
        raise _diverged(f"the loss is nan at step {state.steps} (epoch {state.epoch + 1})", state, run) from error
    except ValueError as error:  # the library's own complaints are one line with a remedy already
        raise StudyError(f"{run.folder}: {error}") from error
    if loss.device.type == "cpu":
        _require_finite(torch.stack([loss, penalty])[None], state, run)
    return loss, penalty


def _require_finite(latest: Tensor, state: TrainingState, run: Run) -> None:
    """Stops the run at the first of the latest steps whose loss or penalty is not finite. # shape: (steps, 2)"""
    good = torch.isfinite(latest).all(1)
    if bool(good.all()):
        return
    first = int(good.int().argmin())
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
