"""A grid that many workers share through optuna's storage: no point is measured twice, and none is lost with a worker.

A worker draws a point that is neither measured nor running; where two have drawn the same, the second leaves it to the first.
A point of a dead worker continues from its checkpoint if its folder still exists. Optuna's heartbeat is not used: it needs a
database in place of a journal file, which also works on network file systems, and it only runs inside ``study.optimize``.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import secrets
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
VARIED = ("eta", "radius", "mass")  # what the points of a grid differ in
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
        self.study = self._open(name)
        self._require_recipe(recipe)

    @_naming_the_storage
    def _open(self, name: str) -> optuna.Study:
        sampler = self.optuna.samplers.RandomSampler()  # never asked: all points are enqueued
        return self.optuna.create_study(
            storage=self._storage(self.storage), sampler=sampler, study_name=name, load_if_exists=True
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
            self._release_dead_workers()
            missing = set(self.points) - {m.point for m in self.measured()}
            if not missing:
                return None
            if free := missing - set(self._running().values()):
                drawn = secrets.choice(list(free))
                self.study.enqueue_trial({name: getattr(drawn, name) for name in VARIED})
                trial = self.study.ask()  # what was enqueued first, perhaps by another worker
                self._beat(trial)
                point = self.point_of(trial)
                earlier = [number for number, other in self._running().items() if number < trial.number and other == point]
                if point in missing and not earlier:
                    return trial
                self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)  # drawn twice: the first worker keeps it
                continue
            if not wait:
                return None
            if not announced:
                console.line(f"waiting for {len(missing)} points that other workers have")
            announced = True
            time.sleep(1.0)

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

    def _release_dead_workers(self) -> None:
        """End the trials of dead workers, so that their points are free again."""
        for trial in self._trials("RUNNING"):
            if not self._has_worker(trial):
                with suppress(ValueError, RuntimeError):  # another worker was faster
                    self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)

    def _has_worker(self, trial: optuna.trial.FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        host, process, signed = worker if isinstance(worker, list) and len(worker) == 3 else (None, None, None)
        if not isinstance(process, int) or not isinstance(signed, int | float):  # just created
            started = trial.datetime_start
            return started is None or time.time() - started.timestamp() < self.grace
        if host == socket.gethostname() and not _process_exists(process):
            return False
        return time.time() - float(signed) < self.grace

    def _trials(self, state: str) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState[state],))

    def _running(self) -> dict[int, Regularizer]:
        """The points that workers have, by the number of the trial; a trial of an earlier version has one a little later."""
        found = {trial.number: trial.system_attrs.get("fixed_params") or trial.params for trial in self._trials("RUNNING")}
        return {number: self._point(params) for number, params in found.items() if len(params) == len(VARIED)}

    def _point(self, params: dict[str, Any]) -> Regularizer:
        if wrong := POINT(params):
            raise ValueError(f"a trial is damaged: {wrong}")
        try:
            return dataclasses.replace(self.points[0], **{name: params[name] for name in VARIED})
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
