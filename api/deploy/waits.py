"""What a process of a deployment waits for, and how it says so.

A start that was refused would end so again until somebody mends what it refused: weights that are
still being copied, a setting. So it looks at names, sizes and times of those files, and is tried
again once they have changed and are not written to any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from api.deploy.deployment import Deployment
from api.interrupts import StopSignals
from api.processes.commands import Notifier
from eplb.errors import EplbError

TELL_AFTER_S, TELL_EVERY_S = 5.0, 30.0  # length of a wait that is reported; between two reports
LOOK_S = 1.0  # files that did not change between two looks are whole


class WaitReports:
    """Reports what a process waits for: to its supervisor, the log and the store.

    Args:
        whose: the process, for sentences.
        record: stores a sentence as an event.
        notifier: of the process.
        say: prints a line for operators.
    """

    def __init__(
        self,
        whose: str,
        record: Callable[[str], object],
        notifier: Notifier,
        say: Callable[[str], None],
    ) -> None:
        self._whose, self._record, self._notifier, self._say = whose, record, notifier, say
        self._since: float | None = None
        self._tell_at, self._told = 0.0, ""

    def note(self, what: str) -> None:
        """Record what is waited for at present; "": nothing."""
        now = time.monotonic()
        if not what or self._since is None:
            self._since, self._told = (now if what else None), ""
            self._tell_at = now + TELL_AFTER_S
            return
        if now < self._tell_at and (what == self._told or not self._told):
            return
        line = f"{self._whose} waits for {what}, {now - self._since:.0f} s so far"
        if what != self._told:
            self._say(line)
        self._tell_at, self._told = now + TELL_EVERY_S, what
        self._notifier.status(line)
        self._record(line)


class StartFiles:
    """Files that a start depends on, as they were when it began: its checkpoint and configuration.

    Args:
        paths: files, or folders for the files in them.
    """

    def __init__(self, *paths: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.paths, self._clock = paths, clock
        self._before = self._last = self._look()
        self._look_at = clock() + LOOK_S

    @property
    def are_changed(self) -> bool:
        """Whether they have changed since, and were whole for ``LOOK_S``."""
        if self._clock() < self._look_at:
            return False
        now = self._look()
        self._look_at = self._clock() + LOOK_S
        is_whole, self._last = now == self._last, now
        return is_whole and now != self._before

    def wait_for_change(self, stop: StopSignals, tell: Callable[[], object]) -> bool:
        """Wait until they have changed; False: a signal came.

        Args:
            stop: the signals of this process.
            tell: called a few times a second.
        """
        while not stop.wait(LOOK_S, tell):
            if self.are_changed:
                return True
        return False

    def _look(self) -> frozenset[tuple[str, int, int]]:
        """Name, size and time of each; one that is not there is left out."""
        found = set[tuple[str, int, int]]()
        for path in self.paths:
            with suppress(OSError):
                for one in [*path.iterdir()] if path.is_dir() else [path]:
                    with suppress(OSError):
                        seen = one.stat()
                        found.add((os.fspath(one), seen.st_size, seen.st_mtime_ns))
        return frozenset(found)

    def __str__(self) -> str:
        return " or ".join(map(str, self.paths))


@dataclass(frozen=True)
class Reread:
    """How a process reads its deployment again.

    Args:
        config: its file; None: it has none.
        read: gives the deployment as it is configured now.
    """

    config: Path | None
    read: Callable[[], Deployment]

    def files_of(self, deployment: Deployment) -> StartFiles:
        """What a start of the deployment depends on."""
        paths = (deployment.settings.model.checkpoint, self.config)
        return StartFiles(*(path for path in paths if path is not None))

    def wait_for_start(
        self,
        refusal: str,
        files: StartFiles,
        waits: WaitReports,
        stop: StopSignals,
        alive: Callable[[], object],
    ) -> Deployment | None:
        """Wait until what a start refused has changed; None: a signal came.

        Args:
            refusal: its words.
            files: as they were when the start began.
            waits: tells of it.
            stop: the signals of this process.
            alive: called a few times a second.
        """
        while True:
            what = f"a change of {files}, after a refusal: {refusal}"

            def tell(what: str = what) -> None:
                alive()
                waits.note(what)

            if not files.wait_for_change(stop, tell):
                return None
            files = StartFiles(*files.paths)
            try:
                return self.read()
            except EplbError as exc:  # of the configuration, which is being edited
                refusal = str(exc)


def has_served(deployment: Deployment) -> bool:
    """Whether a deployment has begun a run; a store that cannot be read has none."""
    try:
        with closing(deployment.opened_store()) as store:
            return store.current_run() is not None
    except EplbError:
        return False
