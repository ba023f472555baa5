"""A grid that many workers share through optuna's storage: no point twice, and none lost with a worker.

Optuna's grid sampler may give one point to two workers, and forgets the point of a worker that died; both are dealt with
here. A point that a dead worker had begun goes on from its checkpoint where its folder is still there.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassersmooth import _checks
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.screen import Screen
from wassersmooth.study.search.selection import Measured

if TYPE_CHECKING:
    import optuna

LARGEST = 1e20


class SharedGrid:
    """What the workers know of each other through optuna's storage."""

    def __init__(self, points: list[Regularizer], name: str, storage: str, grace: float, recipe: dict[str, Any]) -> None:
        try:
            import optuna
        except ImportError:
            raise _checks.extra("optuna", "tune", "sweep") from None
        self.optuna, self.points, self.grace = optuna, points, grace
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = {field: sorted({getattr(point, field) for point in points}) for field in ("eta", "radius", "mass")}
        try:
            self.study = optuna.create_study(
                storage=self._storage(storage),
                sampler=_sampler(self.space),
                study_name=name,
                load_if_exists=True,
            )
        except Exception as error:  # a database's own errors come in many classes
            raise StudyError(
                f"--storage {storage}: cannot be used ({_checks.first_line(error)}); {_remedy(storage, error)}"
            ) from None
        known = self.study.user_attrs.get("recipe")
        if known is None:
            self.study.set_user_attr("recipe", recipe)
        elif known != recipe:
            changed = sorted(key for key in known.keys() | recipe.keys() if known.get(key) != recipe.get(key))
            raise StudyError(
                f"this sweep was begun with other values of {', '.join(changed)}; choose another --output or --storage"
            )

    def _storage(self, where: str) -> Any:
        if "://" in where:
            return where
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

        Path(where).parent.mkdir(parents=True, exist_ok=True)
        lock = JournalFileOpenLock(where)
        if _torn_at(Path(where)) is not None:
            lock.acquire()
            try:
                if (end := _torn_at(Path(where))) is not None:  # not what another worker was just writing
                    os.truncate(where, end)
            finally:
                lock.release()
        return JournalStorage(JournalFileBackend(where, lock_obj=lock))

    def measured(self) -> list[Measured]:
        """One result for each point that has one, in the order of the grid."""
        found: dict[Regularizer, Measured] = {}
        for trial in self._trials("COMPLETE"):
            attributes = trial.user_attrs
            point = self._point(trial.params)
            found.setdefault(point, Measured(point, attributes["clean"], attributes["robust"], attributes["seeds"]))
        return [found[point] for point in self.points if point in found]

    def next_trial(self, screen: Screen, wait: bool = True) -> optuna.Trial | None:
        """A point that nobody has measured or is measuring; waits while others work on the last ones; None at the end.

        Without ``wait``: None also where all that is left is being worked on, perhaps by this worker itself.
        """
        waited = False
        while True:
            self._take_up_lost_points()
            busy = self._points("RUNNING")
            missing = set(self.points) - {m.point for m in self.measured()}
            if not missing:
                return None
            if missing <= busy:
                if not wait:
                    return None
                if not waited:
                    screen.line(f"waiting for {len(missing)} points that other workers have")
                waited = True
                time.sleep(1.0)
                continue
            trial = self.study.ask()
            self._sign(trial)
            point = self.point_of(trial)
            earlier = [t for t in self._trials("RUNNING") if t.number < trial.number and t.params == trial.params]
            if earlier or point not in missing:
                self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)  # drawn twice: the first one keeps it
                continue
            return trial

    def point_of(self, trial: optuna.Trial) -> Regularizer:
        """Ranges wide enough for every grid, not lists of its values: a larger grid can then go on in the same storage."""
        eta, mass = trial.suggest_float("eta", 0.0, LARGEST), trial.suggest_float("mass", 0.0, LARGEST)
        return self._point({"eta": eta, "radius": trial.suggest_int("radius", 0, 10**6), "mass": mass})

    def finish(self, trial: optuna.Trial, result: Measured) -> None:
        for name, value in (("clean", result.clean), ("robust", result.robust), ("seeds", result.seeds)):
            trial.set_user_attr(name, value)
        self.study.tell(trial, result.robust)

    @contextmanager
    def alive(self, trial: optuna.Trial) -> Iterator[None]:
        """Signs of life while a point is worked on; after an error the point is given back."""
        done = threading.Event()

        def sign() -> None:
            while not done.wait(self.grace / 10):
                with suppress(Exception):  # a write that fails once, on a busy disk or database: the next one may not
                    self._sign(trial)

        thread = threading.Thread(target=sign, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            done.set()
            thread.join()
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
            raise
        done.set()
        thread.join()

    def _sign(self, trial: optuna.Trial) -> None:
        trial.set_user_attr("worker", [socket.gethostname(), os.getpid(), time.time()])

    def _take_up_lost_points(self) -> None:
        """Ends the trials of dead workers, and queues every point that was begun and neither goes on nor is done."""
        for trial in self._trials("RUNNING"):
            if not self._has_worker(trial):
                try:
                    self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                except (ValueError, RuntimeError):
                    continue  # another worker was faster
        done = {m.point for m in self.measured()}
        begun, going_on = self._points("FAIL", "PRUNED"), self._points("RUNNING")
        queued = [t.system_attrs.get("fixed_params") for t in self._trials("WAITING")]
        for point in self.points:
            values = {name: getattr(point, name) for name in self.space}
            if point in begun - done - going_on and values not in queued:
                self.study.enqueue_trial(values)

    def _has_worker(self, trial: optuna.trial.FrozenTrial) -> bool:
        host, process, signed = trial.user_attrs.get("worker", (None, None, None))
        if signed is None:  # asked for a moment ago, and not signed yet
            started = trial.datetime_start
            return started is None or time.time() - started.timestamp() < self.grace
        if host == socket.gethostname() and not _process_exists(process):
            return False
        return time.time() - float(signed) < self.grace

    def _trials(self, *states: str) -> list[optuna.trial.FrozenTrial]:
        wanted = tuple(self.optuna.trial.TrialState[state] for state in states)
        return self.study.get_trials(deepcopy=False, states=wanted)

    def _points(self, *states: str) -> set[Regularizer]:
        """Those of trials that have drawn all their values."""
        return {self._point(trial.params) for trial in self._trials(*states) if len(trial.params) == len(self.space)}

    def _point(self, params: dict[str, Any]) -> Regularizer:
        return Regularizer(self.points[0].kind, *(params[name] for name in self.space))


def _torn_at(journal: Path) -> int | None:
    """Where the last line begins, if a kill or a full disk has left a part of it: optuna would append to that."""
    content = journal.read_bytes() if journal.is_file() else b""
    if not content.startswith(b'{"op_code"'):  # empty, or no journal: not ours to cut
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
    return "move it away and give the command again: runs that are finished are found in their folders, and not trained again"


def _process_exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sampler(space: dict[str, list[Any]]) -> optuna.samplers.GridSampler:
    """Optuna's, without its way of ending: it stops a loop that does not run here, and counts lost points as done."""
    from optuna.samplers import GridSampler

    class EndlessGridSampler(GridSampler):
        def after_trial(self, *arguments: Any) -> None:
            return

    sampler = EndlessGridSampler(space, seed=0)  # the seed numbers the points: the same for all workers
    sampler.reseed_rng()  # among the points that are left each worker draws its own
    return sampler
