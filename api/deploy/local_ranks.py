"""The ranks of one host as processes: start, wait, end."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from api.interrupts import StopSignals
from api.processes.commands import REFUSED, end_with_parent, start_with_parent
from eplb.errors import ABSENT, ConfigError
from rebalance.assembly.places import HALT_FILE_VARIABLE

# After a first exit, or the record of a recovery: for survivors to end. They try a store that fails
# for 25 s, and a new group for 20 s.
END_DEADLINE_S = 45.0
START_END_DEADLINE_S = 5.0  # after a first exit in a start: nothing is to be agreed on
EXCLUDED_LOOK_S = 2.0  # interval of looks at the record of the latest recovery
HALT_DEADLINE_S = 30.0  # after a signal: for ranks to leave their serving loops, at one step
# After a rank has left its loop: for its last reports and the end of its interpreter, which takes
# long on a busy host. Its tokens are served by then, so nothing is lost by waiting.
EXIT_DEADLINE_S = 300.0
POLL_MS = 250
PIPE_BYTES = 65536  # pipe(7): all that may wait, so that a line is read whole

log = logging.getLogger(__name__)


class ForkedRank:
    """A rank that is forked from the launcher, where its program is imported.

    It is used as ``subprocess.Popen`` is.
    """

    def __init__(
        self, program: Callable[[], None], argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.returncode: int | None = None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # The launcher has no threads by now that could hold a lock over the fork.
        self.pid = os.fork()
        if self.pid == 0:
            end_with_parent(parent)
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(one, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environ)
            sys.argv[1:] = argv
            os._exit(_status_of(program))  # daemon threads of libraries must not keep it alive

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._reaped(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end."""
        return self._reaped(0)

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _reaped(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _status_of(program: Callable[[], None]) -> int:
    """Run a program; returns its exit status, as the interpreter gives it."""
    status = 0
    try:
        program()
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


RankProcess = subprocess.Popen[bytes] | ForkedRank


class LocalRanks:
    """The processes of one start of this host's ranks.

    Args:
        command: the program of each.
        environs: the environment of each, by rank.
        program: in place of a command's, run in a process that is forked from this one; ``command``
            has its arguments then.
        joins: whether all of them join others that serve.

    Raises:
        ConfigError: it is no program.
    """

    def __init__(
        self,
        command: Sequence[str],
        environs: Mapping[int, Mapping[str, str]],
        *,
        program: Callable[[], None] | None = None,
        joins: bool = False,
        halt_deadline_s: float = HALT_DEADLINE_S,
        exit_deadline_s: float = EXIT_DEADLINE_S,
    ) -> None:
        self._halt_deadline_s, self._exit_deadline_s = halt_deadline_s, exit_deadline_s
        self._processes: dict[int, RankProcess] = {}
        self._notices, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # pipe of the ranks' reports
        self._ends = [self._notices, theirs]
        self._halted: set[int] = set()  # ranks that have left their serving loops
        self._late: set[int] = set()  # halted ranks that were killed because they did not exit
        # Ranks without which the others serve on: dead, excluded, retired, or not admitted yet.
        self._lost: set[int] = set(environs) if joins else set()
        self._excluded: set[int] = set()  # lost ranks that the latest recovery record excludes
        self._starting = set(environs)  # ranks that have not served yet
        self._run = ""  # name of the run that the ranks begin, or serve in
        self._serves_on = joins  # whether the ranks serve in a later run than that of their start
        self.has_missed = False  # whether the others began without the ranks of this start
        # What a rank that starts waits for, or why its start failed; "": all serve.
        self.waits_for: str | None = None
        self._named = {HALT_FILE_VARIABLE: f"/proc/{os.getpid()}/fd/{theirs}"}
        self._command, self._program = command, program
        try:
            for rank, environ in environs.items():
                self._start(rank, environ)
        except ConfigError:
            self._kill()
            self._close()
            raise

    def _start(self, rank: int, environ: Mapping[str, str]) -> None:
        given = {**environ, **self._named}
        self._processes[rank] = (
            start_with_parent(self._command, given)
            if self._program is None
            else ForkedRank(self._program, self._command, given)
        )

    def join(self, rank: int, environ: Mapping[str, str]) -> None:
        """Start a rank that joins the others; while it waits to be admitted, its end is no failure.

        With a ``program`` this process must have no other thread.

        Raises:
            ConfigError: the command is no program.
        """
        self._lost.add(rank)
        self._halted.discard(rank)
        self._late.discard(rank)
        self._excluded.discard(rank)
        self._start(rank, environ)

    @property
    def is_starting(self) -> bool:
        """Whether it is a start of all ranks, of which none has served yet."""
        return not (self._serves_on or self._has_served)

    def end_start(self) -> None:
        """End ranks that wait for others which serve without them; no rank has failed."""
        self.has_missed = True
        self._late |= self._processes.keys()
        self._kill()

    def absent(self, ranks: Collection[int]) -> frozenset[int]:
        """Those of ``ranks`` that do not run; none before the others serve on without them."""
        running = self._running().keys()
        is_serving = (self._serves_on or not self._starting) and not self._halted & running
        ended = self._processes.keys() - running - (self._lost if self._serves_on else set())
        return frozenset(ranks) - running - ended if is_serving else frozenset()

    def left_as_planned(self, rank: int) -> bool:
        """Whether an absent rank was not started here, or left its loop and ended well."""
        process = self._processes.get(rank)
        return process is None or (rank in self._halted and process.poll() == 0)

    def wait(
        self,
        stop: StopSignals,
        alive: Callable[[], None] = lambda: None,
        excluded: Callable[[str], Collection[int] | None] = lambda _: None,
    ) -> str:
        """Wait for all to end; returns how the first failed, "" if none did.

        A rank that has ended on its own gives the others a deadline, and so does a signal, which
        they get too. A rank that has left its serving loop has a longer one to exit, and is no
        failure if it misses that. A rank that the survivors of a death have excluded is killed:
        they have agreed without it, and it may be stopped. Where survivors serve on, the death is
        over once they have begun their next run.

        Args:
            stop: the signals of this process.
            alive: called a few times a second.
            excluded: gives the ranks that are excluded from a run; None: it goes on.
        """
        first, deadline, is_told, is_exiting, run = "", float("inf"), False, False, ""
        look_at = time.monotonic() + EXCLUDED_LOOK_S
        try:
            while self._running():
                alive()  # it may start a rank
                left = self._running()
                self._wait_for_one(left)
                if self._serves_on and self._run != run:
                    first, deadline, run = "", float("inf"), self._run
                if not (first or is_exiting) and self._halted >= left.keys():
                    is_exiting, deadline = True, time.monotonic() + self._exit_deadline_s
                failed = self._first_failure() if not first else ""
                if failed and self._serves_on:  # an engine may not know of ranks that leave
                    self._leave_out(set(excluded(self._run) or ()))
                    failed = self._first_failure()
                if failed:
                    given_s = END_DEADLINE_S if self._has_served else START_END_DEADLINE_S
                    first, deadline = failed, min(deadline, time.monotonic() + given_s)
                    look_at = 0.0  # survivors record whom they exclude before they end
                    log.warning("%s; the other ranks have %g s to end", first, given_s)
                if self._run and time.monotonic() >= look_at:
                    if (those := excluded(self._run)) is not None and not self._serves_on:
                        deadline = min(deadline, time.monotonic() + END_DEADLINE_S)
                    self._leave_out(set(those or ()))
                    look_at = time.monotonic() + EXCLUDED_LOOK_S
                if stop.received and not is_told:
                    is_told = True
                    if not is_exiting:
                        deadline = min(deadline, time.monotonic() + self._halt_deadline_s)
                    for process in left.values():
                        process.send_signal(signal.SIGTERM)
                if time.monotonic() >= deadline:
                    self._end_late(left)
            return first or self._first_failure() or self._common_failure()
        finally:
            self._close()

    def _running(self) -> dict[int, RankProcess]:
        return {rank: one for rank, one in self._processes.items() if one.poll() is None}

    def _leave_out(self, those: set[int]) -> None:
        """End ranks that the latest record excludes, unless they join again or end by themselves.

        Where the others serve on, one that leaves as planned reads the record as late as this.
        """
        late = self._excluded if self._serves_on else those
        for rank in (those & self._processes.keys()) - self._lost:
            has_ended = self._processes[rank].poll() is not None
            if not has_ended and rank in late - self._halted:
                log.warning("rank %d was excluded by the others: killed", rank)
                self._processes[rank].kill()
                has_ended = True
            if has_ended and self._serves_on:
                self._lost.add(rank)
        self._excluded = those

    @property
    def has_refused(self) -> bool:
        """Whether a rank ended because it cannot start as things are; not one that was to join."""
        ignored = self._lost if self._has_served else frozenset()
        return any(map(self.has_rank_refused, self._processes.keys() - ignored))

    def has_rank_refused(self, rank: int) -> bool:
        """Whether a rank of this host ended because it cannot start as things are."""
        process = self._processes.get(rank)
        return process is not None and process.returncode == REFUSED

    @property
    def has_waited(self) -> bool:
        """Whether a start ended because a peer, a host cache or the store is absent."""
        statuses = {process.returncode for process in self._processes.values()}
        return not self._has_served and ABSENT in statuses <= {0, ABSENT, -signal.SIGKILL}

    @property
    def _has_served(self) -> bool:
        return self._starting < self._processes.keys()

    def _first_failure(self, ignored: Collection[int] | None = None) -> str:
        ignored = self._late | self._lost if ignored is None else ignored
        for rank, process in self._processes.items():
            status = None if rank in ignored else process.returncode
            if status and status < 0:
                return f"rank {rank} was killed by {signal.Signals(-status).name}"
            if status:
                return f"rank {rank} exited with status {status}"
        return ""

    def _common_failure(self) -> str:
        """How the first rank failed where none has ended well, lost ones among them."""
        has_failed = all(process.returncode for process in self._processes.values())
        return self._first_failure(self._late) if has_failed else ""

    def _end_late(self, left: Mapping[int, RankProcess]) -> None:
        for rank in left:
            if rank in self._halted:
                self._late.add(rank)
                log.warning("rank %d left its serving loop and did not exit: killed", rank)
            else:
                log.warning("rank %d did not leave its serving loop in time: killed", rank)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _wait_for_one(self, left: Mapping[int, RankProcess]) -> None:
        """Wait until a process ends or a rank reports something, for a moment at most."""
        with ExitStack() as stack:
            poll = select.poll()
            poll.register(self._notices, select.POLLIN)
            for process in left.values():
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(POLL_MS)]
        if self._notices not in ready:
            return
        for line in os.read(self._notices, PIPE_BYTES).decode().splitlines():
            what, rank, *words = line.split(maxsplit=2)
            if what == "halted":
                self._halted.add(int(rank))
            elif what == "waits":
                self.waits_for = "".join(words)
            elif what == "begins":
                self._begin("".join(words))
            elif what == "serves":
                self._starting.discard(int(rank))
                self._lost.discard(int(rank))
                self.waits_for = self.waits_for if self._starting else ""

    def _begin(self, run: str) -> None:
        """Note in which run ranks serve; after a start another one is that of survivors."""
        if self._run and not self._starting and run != self._run:
            self._serves_on = True
            self._lost |= {rank for rank, one in self._processes.items() if one.poll() is not None}
        self._run = run

    def _close(self) -> None:
        while self._ends:
            os.close(self._ends.pop())
