"""Commands that prepare side by side and then take turns: each prints "ready" and goes on when it has read a line."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

READY = "ready"


class Processes:
    """Commands that are started in their order; whatever is left of them is ended at exit.

    Arguments:
        at_once: how many prepare at the same time.
        say: called with every other line that they print.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], at_once: int, say: Callable[[str], None]
    ) -> None:
        self.commands, self.environment, self.at_once, self.say = commands, dict(environment), at_once, say
        self.events: queue.Queue[tuple[int, bool]] = queue.Queue()  # (number, whether it is ready; otherwise it has ended)
        self.started: list[subprocess.Popen[str]] = []
        self.ready: set[int] = set()
        self.ended: set[int] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number in range(len(self.started)):
            self._end(number)

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until all are ready or have ended; at the deadline (``time.monotonic()``), end those that are not ready."""
        while len(self.ready | self.ended) < len(self.commands):
            while len(self.started) < len(self.commands) and self._preparing < self.at_once:
                self._start()
            if not self._wait(deadline):
                break
        for number in range(len(self.commands)):
            if number not in self.ready | self.ended:
                self.say(f"not ready in time: {self._name(number)}")
                if number < len(self.started):
                    self._end(number)

    @property
    def _preparing(self) -> int:
        return len(self.started) - len(self.ready | self.ended)

    def _start(self) -> None:
        process = subprocess.Popen(
            self.commands[len(self.started)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        threading.Thread(target=self._listen, args=(len(self.started) - 1,), daemon=True).start()

    def take_turns(self, deadline: float) -> None:
        """Let those that are ready go on, one after the other in the order of the commands, until the deadline."""
        for number in sorted(self.ready - self.ended):
            if time.monotonic() >= deadline:
                self.say(f"no time left for: {self._name(number)}")
                continue
            stdin = self.started[number].stdin
            assert stdin is not None
            try:
                stdin.write("go\n")
                stdin.flush()
            except BrokenPipeError:  # it has died since
                continue
            while number not in self.ended and self._wait(deadline):
                pass
            self._end(number)

    def _listen(self, number: int) -> None:
        stdout = self.started[number].stdout
        assert stdout is not None
        for line in stdout:
            if line.strip() == READY:
                self.events.put((number, True))
            else:
                self.say(line.rstrip())
        self.events.put((number, False))

    def _wait(self, deadline: float) -> bool:
        """Wait for the next event; False if the deadline comes first."""
        try:
            number, is_ready = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        (self.ready if is_ready else self.ended).add(number)
        return True

    def _end(self, number: int) -> None:
        """End a process and those that it has started."""
        process = self.started[number]
        if process.poll() is None:
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        self.ended.add(number)

    def _name(self, number: int) -> str:
        return " ".join(self.commands[number])
