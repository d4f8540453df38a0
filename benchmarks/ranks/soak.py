"""Decode steps of real ranks under random migrations: the processes, their progress, their rows.

Real ranks, agents, votes, store and host cache; only the plans are random. Every minute a line on
the error stream says how far all are; SIGINT or SIGTERM has the ranks halt together, and the rows
are those of what was reached.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any, NoReturn

from benchmarks.ranks.children import Child, import_for_children
from benchmarks.ranks.serving import (
    FIRST_PERCENT,
    WARM_UP_STEPS,
    Decode,
    Served,
    begin_run,
    plan_of,
    run_decode,
    run_host_cache,
)
from benchmarks.ranks.soak_readings import MIB, Level, Progress, progress_line
from benchmarks.result_table import Row

# -- The processes of a soak: start, messages, end. All end before their folder is removed.

POLL_S = 0.5
GRACE_S = 2.0  # after a first failure, for reports of the others
END_DEADLINE_S = 30.0  # a rank hands its last samples over first
KILL_DEADLINE_S = 5.0
LAST_MESSAGE = "served"  # after it a child may end

OnMessage = Callable[[Child, str, Any], None]


class Interrupts:
    """Records SIGINT and SIGTERM, for an orderly end.

    Processes that are started in its ``with`` block ignore SIGTERM (and SIGINT, by
    ``benchmarks.ranks.children``): ``timeout`` and service managers send it to the whole group, and
    ranks that exit by it could report nothing.
    """

    def __init__(self) -> None:
        self.found: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import_for_children()  # the server that forks them starts now, and what it ignores they do
        signal.signal(signal.SIGTERM, self._note)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first one counts: a group is often sent the same twice.
        self.found = self.found or signal.Signals(number)


class BenchmarkProcesses:
    """The child processes of a benchmark."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._done: set[str] = set()  # children that need say no more

    def start(self, name: str, main: Callable[..., None], *args: Any) -> Child:
        """Start one."""
        self._children.append(Child(name, main, *args))
        return self._children[-1]

    def wait_for(
        self,
        kind: str,
        children: Sequence[Child],
        *,
        silence_s: float,
        on_message: OnMessage,
        at_each_turn: Callable[[], None],
    ) -> list[Any]:
        """Wait for a message ``kind`` of each child, and return the bodies.

        Args:
            silence_s: longest time without any message of a child.
            on_message: called with other messages.
            at_each_turn: called twice a second or more often.

        Raises:
            SystemExit: the error of a child that failed, or names of children without messages.
        """
        said: dict[str, Any] = {}
        heard_at = {child.name: time.monotonic() for child in children}
        while len(said) < len(children):
            at_each_turn()
            for child, message in self._messages(POLL_S):
                if message is None or message[0] == "failed":
                    self._give_up(child, message)
                heard_at[child.name] = time.monotonic()
                if message[0] == LAST_MESSAGE:
                    self._done.add(child.name)
                if message == ("progress", None):
                    continue  # a process that is supervised elsewhere shows that it goes on
                if message[0] == kind:
                    said[child.name] = message[1]
                else:
                    on_message(child, *message)
            limit = time.monotonic() - silence_s
            silent = [n for n, at in heard_at.items() if n not in said and at < limit]
            if silent:
                names = ", ".join(silent)
                raise SystemExit(f"{names}: no message for {silence_s:.0f} s, expected {kind!r}")
        return [said[child.name] for child in children]

    def let_end(self, children: Sequence[Child]) -> None:
        """Wait until these have ended by themselves.

        Raises:
            SystemExit: one has not, or not well.
        """
        self._done |= {child.name for child in children}
        for child in children:
            child.process.join(END_DEADLINE_S)
            if child.process.exitcode != 0:
                raise SystemExit(f"at the end, {child.exit_text()}")

    def end(self) -> None:
        """End every process that still runs; after this none does."""
        for child in self._children:
            child.kill()  # all at once: each would report the end of those before it
        for child in self._children:
            child.stop(KILL_DEADLINE_S)

    def _messages(self, timeout_s: float) -> list[tuple[Child, Any]]:
        pipes: dict[Connection, Child] = {
            child.messages: child for child in self._children if child.name not in self._done
        }
        ready = wait(list(pipes), timeout_s)
        return [(child, child.receive()) for pipe, child in pipes.items() if pipe in ready]

    def _give_up(self, child: Child, message: tuple[str, Any] | None) -> NoReturn:
        """Report the first cause: peers of a failed child fail too, and may report first."""
        words = {child.name: self._words(child, message)}
        deadline = time.monotonic() + GRACE_S
        while (left_s := deadline - time.monotonic()) > 0:
            self._done |= words.keys()
            for other, said in self._messages(left_s):
                if said is None or said[0] == "failed":
                    words[other.name] = self._words(other, said)
        causes = [one for one in words.values() if "BrokenGroup" not in one]
        raise SystemExit("\n".join(causes or words.values()))

    def _words(self, child: Child, message: tuple[str, Any] | None) -> str:
        if message is None:
            child.process.join(GRACE_S)
            return child.exit_text()
        kind, sentence = message[1]
        return f"{child.name} failed: {kind}: {sentence}"


START_DEADLINE_S = 240.0
SILENCE_S = 90.0  # of a rank that serves: it speaks every second, and a vote may wait for 30
HALT_DEADLINE_S = 60.0


class Soak:
    """The ranks while they serve: how far they are, and whether they were asked to end.

    Args:
        progress_every_s: between two lines on the error stream.
    """

    def __init__(self, ranks: list[Child], interrupts: Interrupts, progress_every_s: float) -> None:
        self._ranks, self._interrupts, self._every_s = ranks, interrupts, progress_every_s
        self._known: dict[str, Progress] = {}
        self._since = time.monotonic()
        self._next_at = self._since + progress_every_s
        self._halt_by: float | None = None

    def on_message(self, child: Child, kind: str, body: Any) -> None:
        """Take in how far a rank has come."""
        assert kind == "progress", f"{child.name} said {kind!r}, which nobody expects"
        self._known[child.name] = body

    def turn(self) -> None:
        """Do what is due: a line of progress, or the halt that was asked for.

        Raises:
            SystemExit: the ranks have not halted in time.
        """
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._every_s
            self.tell()
        if self._halt_by is not None and now > self._halt_by:
            raise SystemExit(f"asked to halt, the ranks still serve after {HALT_DEADLINE_S:.0f} s")
        if self._interrupts.found is not None and self._halt_by is None:
            self._halt_by = now + HALT_DEADLINE_S
            self.tell()
            print_progress(f"{self._interrupts.found.name}: the ranks are asked to halt")
            for child in self._ranks:
                child.command("halt")

    def tell(self) -> None:
        """Print one line, as soon as every rank has said something."""
        if len(self._known) == len(self._ranks):
            known = [self._known[child.name] for child in self._ranks]
            print_progress(progress_line(time.monotonic() - self._since, known))


def print_progress(words: str) -> None:
    """Print to the error stream: the output is for rows."""
    print(words, file=sys.stderr, flush=True)


def measure_decode(wanted: Decode, interrupts: Interrupts, progress_every_s: float) -> list[Row]:
    """Start everything, serve, end everything; return the rows.

    Raises:
        SystemExit: a process failed, in its words; or interrupted before the ranks served.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        plan = plan_of(
            Path(folder),
            wanted.num_ranks,
            device=wanted.device,
            precision=wanted.precision,
        )
        store = begin_run(plan)
        stack.callback(store.close)
        processes = BenchmarkProcesses()
        stack.callback(
            processes.end
        )  # before the folder goes: they write to it as long as they run
        host_cache = processes.start("host_cache", run_host_cache, plan)
        wait_until_ready(processes, [host_cache], interrupts)
        ranks = [
            processes.start(f"rank {r}", run_decode, plan, r, wanted)
            for r in range(wanted.num_ranks)
        ]
        wait_until_ready(processes, ranks, interrupts)
        reports = serve(processes, ranks, Soak(ranks, interrupts, progress_every_s))
        host_cache.command("end")
        processes.let_end([*ranks, host_cache])
    return rows_of(reports, wanted)


def wait_until_ready(
    processes: BenchmarkProcesses, children: list[Child], interrupts: Interrupts
) -> None:
    """Wait until all of them can do their work.

    Raises:
        SystemExit: not in time, or interrupted: there is nothing to report yet.
    """

    def refuse_to_go_on() -> None:
        if interrupts.found is not None:
            raise SystemExit(f"{interrupts.found.name} before the ranks served: nothing to report")

    def on_message(child: Child, kind: str, body: Any) -> None:
        raise AssertionError(f"{child.name} said {kind!r}, which nobody expects yet")

    processes.wait_for(
        "ready",
        children,
        silence_s=START_DEADLINE_S,
        on_message=on_message,
        at_each_turn=refuse_to_go_on,
    )


def serve(processes: BenchmarkProcesses, ranks: list[Child], soak: Soak) -> list[Served]:
    """Let the ranks begin, and process their messages to the end.

    Raises:
        SystemExit: a rank failed, with its error; the progress of all is printed before.
    """
    for child in ranks:
        child.command("begin")
    try:
        return processes.wait_for(
            LAST_MESSAGE,
            ranks,
            silence_s=SILENCE_S,
            on_message=soak.on_message,
            at_each_turn=soak.turn,
        )
    except SystemExit:
        soak.tell()
        raise


def rows_of(reports: Sequence[Served], wanted: Decode) -> list[Row]:
    """Sum the ranks' reports up."""
    first, moved = reports[0], sum(report.experts_moved for report in reports)
    from_peers = sum(report.bytes_by_source.get("peer", 0) for report in reports)
    what = f"{first.progress.steps} {wanted.precision} decode steps, a swap every"
    return [
        (
            f"{what} {wanted.swap_every} or as soon as done",
            f"{first.num_swaps} swaps in {first.progress.migrations} migrations,"
            f" {moved} experts moved, {from_peers / 1e9:.1f} GB from peers",
            "-",
        ),
        ("graph captures", f"{first.captures or 'no graph'}", "1, on cuda"),
        *byte_rows(reports),
        ("placements at the end", f"{len({r.placement_hash for r in reports})}", "1"),
        *memory_rows([report.memory for report in reports]),
        *time_rows(reports),
    ]


def byte_rows(reports: Sequence[Served]) -> list[Row]:
    """Wrong bytes: at the end, and, where anybody looked, meanwhile."""
    wrong_at_end = sum(report.wrong_at_end for report in reports)
    rows = [("slots with wrong bytes at the end", f"{wrong_at_end}", "0")]
    looks = sum(report.progress.num_looks for report in reports)
    if looks:
        wrong = sum(report.progress.num_wrong for report in reports)
        rows.append(("  meanwhile, at every percent", f"{wrong} in {looks} looks", "0"))
    found = sum((Counter(dict(report.scrubbed)) for report in reports), Counter[str]())
    if found.total():
        sweeps = [report.sweeps for report in reports]
        by_result = ", ".join(f"{found[key]} {key}" for key in reports[0].scrubbed)
        rounds = f"{min(sweeps)} to {max(sweeps)} rounds of a rank"
        rows.append(("  by the scrubber, in idle steps", f"{by_result}; {rounds}", "0 damaged"))
    return rows


def memory_rows(levels: Sequence[Level]) -> list[Row]:
    """The largest change of a rank, and the rank whose memory rose the most."""
    what = f"memory, change from {FIRST_PERCENT} % of the steps to the end"
    if any(level.num_readings < 2 for level in levels):
        return [(what, f"ended before {FIRST_PERCENT} %", "flat")]
    drop = max(abs(level.first - level.last) for level in levels) / MIB
    most = max(levels, key=lambda level: level.rise)
    found = ", ".join(f"{n / MIB:.1f}" for n in (most.first, most.highest, most.last))
    return [
        (what, f"{drop:.1f} MiB", "flat"),
        (
            "  of the rank that rose the most: first, highest, last",
            f"{found} MiB in {most.num_readings} readings",
            "flat",
        ),
    ]


def time_rows(reports: Sequence[Served]) -> list[Row]:
    """Percentiles of boundaries and of steps, over all ranks."""
    pauses_ms = sorted(pause for report in reports for pause in report.pauses_ms)
    step_us = sorted(us for report in reports for us in report.step_us.values)
    num_swaps = sum(report.num_swaps for report in reports)
    num_steps = sum(report.step_us.num_seen for report in reports)
    return [
        (
            "boundary with a swap, host time, p50 / p99",
            percentiles(pauses_ms, 2, "ms") + part_of(len(pauses_ms), num_swaps, "the latest"),
            "-",
        ),
        (
            "decode step, host time, p50 / p99",
            percentiles(step_us, 0, "us") + part_of(len(step_us), num_steps, "a sample of"),
            "-",
        ),
    ]


def percentiles(found: Sequence[float], digits: int, unit: str) -> str:
    """The median and the 99th of sorted times, in words where there are none."""
    if not found:
        return (
            f"none yet (the first {WARM_UP_STEPS} steps do not count)" if unit == "us" else "none"
        )
    p99 = found[int(len(found) * 0.99)]
    return f"{median(found):.{digits}f} / {p99:.{digits}f} {unit}"


def part_of(num_kept: int, num_seen: int, how: str) -> str:
    """Say that times are of a part of all, where they are."""
    return f" ({how} {num_kept} of {num_seen})" if num_kept < num_seen else ""
