"""A grid that many workers share through optuna's storage: no point is measured twice, and none is lost with a worker.

Optuna's grid sampler may give one point to two workers, and forgets the point of a worker that died; both are handled here.
A point of a dead worker continues from its checkpoint if its folder still exists. Optuna's heartbeat is not used: it needs a
database in place of a journal file, which also works on network file systems, and it only runs inside ``study.optimize``.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from wassersmooth import _checks
from wassersmooth.study import durable, provenance
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import LARGEST_RADIUS, Regularizer
from wassersmooth.study.search.selection import Measured
from wassersmooth.study.stored_json import PERCENT, number, object_with, whole

if TYPE_CHECKING:
    import optuna

P = ParamSpec("P")
T = TypeVar("T")
LARGEST = 1e20
LONGEST_BEAT = 60.0  # seconds between two heartbeats, however long the grace is
POINT = object_with({"eta": number(0, LARGEST), "radius": whole(0, LARGEST_RADIUS), "mass": number(0, LARGEST)})
RESULT = object_with({"clean": PERCENT, "robust": PERCENT, "seeds": whole(1, 10**6)})


def _naming_the_storage(method: Callable[P, T]) -> Callable[P, T]:
    """A method of a grid whose errors name the storage: databases and damaged journals raise errors of many classes."""

    @functools.wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return method(*arguments, **options)
        except StudyError:
            raise
        except Exception as error:
            grid = arguments[0]
            assert isinstance(grid, SharedGrid)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise durable.cannot_write(Path(grid.storage), error) from None
            said = f"--storage {grid.storage}: cannot be used ({_checks.first_line(error)}); {_remedy(grid.storage, error)}"
            raise StudyError(provenance.without_passwords(said, [grid.storage])) from None

    return call


class SharedGrid:
    """One worker's view of the grid in optuna's storage."""

    def __init__(self, points: list[Regularizer], name: str, storage: str, grace: float, recipe: dict[str, Any]) -> None:
        try:
            import optuna
        except ImportError:
            raise _checks.extra("optuna", "study", "sweep") from None
        self.optuna, self.points, self.grace, self.storage = optuna, points, grace, storage
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = {field: sorted({getattr(point, field) for point in points}) for field in ("eta", "radius", "mass")}
        self.study = self._open(name)
        self._require_recipe(recipe)

    @_naming_the_storage
    def _open(self, name: str) -> optuna.Study:
        return self.optuna.create_study(
            storage=self._storage(self.storage), sampler=_sampler(self.space), study_name=name, load_if_exists=True
        )

    @_naming_the_storage
    def _require_recipe(self, recipe: dict[str, Any]) -> None:
        known = self.study.user_attrs.get("recipe")
        if known is None:
            self.study.set_user_attr("recipe", recipe)
        elif wrong := object_with({})(known):
            raise ValueError(f"recipe: {wrong}")
        elif known != recipe:
            changed = sorted(key for key in known.keys() | recipe.keys() if known.get(key) != recipe.get(key))
            raise StudyError(
                f"this sweep was started with other values of {', '.join(changed)}; choose another --output or --storage"
            )

    def _storage(self, where: str) -> Any:
        if "://" in where:
            return where
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

        Path(where).parent.mkdir(parents=True, exist_ok=True)
        lock = JournalFileOpenLock(where)
        if _incomplete_line(Path(where)) is not None:
            lock.acquire()
            try:
                if (end := _incomplete_line(Path(where))) is not None:  # not a line that another worker was still writing
                    os.truncate(where, end)
            finally:
                lock.release()
        return JournalStorage(JournalFileBackend(where, lock_obj=lock))

    @_naming_the_storage
    def measured(self) -> list[Measured]:
        """The results so far, one for each point, in the order of the grid."""
        found: dict[Regularizer, Measured] = {}
        for trial in self._trials("COMPLETE"):
            attributes = trial.user_attrs
            if wrong := RESULT(attributes):
                raise ValueError(f"trial {trial.number} is damaged: {wrong}")
            point = self._point(trial.params)
            numbers = (attributes["clean"], attributes["robust"], attributes["seeds"])
            one_answer = bool(attributes.get("one_answer", False))  # not in files of earlier versions
            found.setdefault(point, Measured(point, *numbers, one_answer))
        return [found[point] for point in self.points if point in found]

    @_naming_the_storage
    def next_trial(self, console: Console, wait: bool = True) -> optuna.Trial | None:
        """A point that no worker has measured or is measuring; None when all are measured.

        If other workers have the last points, wait for them; without ``wait``, return None.
        """
        announced = False
        while True:
            self._requeue_lost_points()
            busy = self._points("RUNNING")
            missing = set(self.points) - {m.point for m in self.measured()}
            if not missing:
                return None
            if missing <= busy:
                if not wait:
                    return None
                if not announced:
                    console.line(f"waiting for {len(missing)} points that other workers have")
                announced = True
                time.sleep(1.0)
                continue
            trial = self.study.ask()
            self._beat(trial)
            point = self.point_of(trial)
            earlier = [t for t in self._trials("RUNNING") if t.number < trial.number and t.params == trial.params]
            if earlier or point not in missing:
                self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)  # drawn twice: the first worker keeps it
                continue
            return trial

    @_naming_the_storage
    def point_of(self, trial: optuna.Trial) -> Regularizer:
        """The point of a trial. Its ranges fit every grid, so that a larger grid can continue in the same storage."""
        eta, mass = trial.suggest_float("eta", 0.0, LARGEST), trial.suggest_float("mass", 0.0, LARGEST)
        return self._point({"eta": eta, "radius": trial.suggest_int("radius", 0, LARGEST_RADIUS), "mass": mass})

    @_naming_the_storage
    def finish(self, trial: optuna.Trial, result: Measured) -> None:
        for name in ("clean", "robust", "seeds", "one_answer"):
            trial.set_user_attr(name, getattr(result, name))
        self.study.tell(trial, result.robust)

    @contextmanager
    def heartbeat(self, trial: optuna.Trial) -> Iterator[None]:
        """Record regularly that this worker is alive while it works on a point; release the point after an error."""
        done = threading.Event()

        def keep_beating() -> None:
            while not done.wait(min(self.grace / 10, LONGEST_BEAT)):
                with suppress(Exception):  # a busy disk or database may refuse one write and accept the next
                    self._beat(trial)

        thread = threading.Thread(target=keep_beating, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            done.set()
            thread.join()
            with suppress(Exception):  # a storage that is gone must not hide why the work stopped; others wait for the grace
                self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
            raise
        done.set()
        thread.join()

    def _beat(self, trial: optuna.Trial) -> None:
        trial.set_user_attr("worker", [socket.gethostname(), os.getpid(), time.time()])

    def _requeue_lost_points(self) -> None:
        """End the trials of dead workers, and enqueue every point that was started and is neither running nor done."""
        for trial in self._trials("RUNNING"):
            if not self._has_worker(trial):
                try:
                    self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                except (ValueError, RuntimeError):
                    continue  # another worker was faster
        done = {m.point for m in self.measured()}
        started, running = self._points("FAIL", "PRUNED"), self._points("RUNNING")
        queued = [t.system_attrs.get("fixed_params") for t in self._trials("WAITING")]
        for point in self.points:
            values = {name: getattr(point, name) for name in self.space}
            if point in started - done - running and values not in queued:
                self.study.enqueue_trial(values)

    def _has_worker(self, trial: optuna.trial.FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        host, process, signed = worker if isinstance(worker, list) and len(worker) == 3 else (None, None, None)
        if not isinstance(process, int) or not isinstance(signed, int | float):  # just created
            started = trial.datetime_start
            return started is None or time.time() - started.timestamp() < self.grace
        if host == socket.gethostname() and not _process_exists(process):
            return False
        return time.time() - float(signed) < self.grace

    def _trials(self, *states: str) -> list[optuna.trial.FrozenTrial]:
        wanted = tuple(self.optuna.trial.TrialState[state] for state in states)
        return self.study.get_trials(deepcopy=False, states=wanted)

    def _points(self, *states: str) -> set[Regularizer]:
        """The points of the trials in these states that have all their values."""
        return {self._point(trial.params) for trial in self._trials(*states) if len(trial.params) == len(self.space)}

    def _point(self, params: dict[str, Any]) -> Regularizer:
        if wrong := POINT(params):
            raise ValueError(f"a trial is damaged: {wrong}")
        try:
            return Regularizer(self.points[0].kind, *(params[name] for name in self.space))
        except StudyError as error:
            raise ValueError(f"a trial belongs to another search: {error}") from None


def _incomplete_line(journal: Path) -> int | None:
    """Where the last line begins if a kill or a full disk left only a part of it, to which optuna would append."""
    content = journal.read_bytes() if journal.is_file() else b""
    if not content.startswith(b'{"op_code"'):  # empty, or not a journal
        return None
    begin = content.rfind(b"\n", 0, -1) + 1
    try:
        json.loads(content[begin:])
        return None if content.endswith(b"\n") else begin
    except ValueError:
        return begin


def _remedy(storage: str, error: Exception) -> str:
    if "://" in storage:
        return "give a journal file, or the URL of a database that can be reached"
    if isinstance(error, OSError):
        return "fix its permissions, or give another journal file"
    return "move it away and run the command again: finished runs are found in their folders and not trained again"


def _process_exists(process: int) -> bool:
    """Whether a process of this machine lives; where that cannot be asked, yes, until its heartbeat stops."""
    if sys.platform == "win32":  # there, os.kill with signal 0 is Ctrl-C, and stops the process it should ask about
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sampler(space: dict[str, list[Any]]) -> optuna.samplers.GridSampler:
    """Optuna's grid sampler without its end, which stops ``study.optimize`` and counts lost points as done."""
    from optuna.samplers import GridSampler

    class EndlessGridSampler(GridSampler):
        def after_trial(self, *arguments: Any) -> None:
            return

    sampler = EndlessGridSampler(space, seed=0)  # the seed numbers the points, alike for all workers
    sampler.reseed_rng()  # each worker draws differently among the remaining points
    return sampler
