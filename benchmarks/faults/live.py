"""Random live faults over four ranks that serve and migrate all the time. Right afterwards?

    python -m benchmarks.faults.live [--seed 1] [--first 0] [--count 200] [--log faults.jsonl]

Fault number N of a seed is always the same draw, so that a run may be done in parts into one log:
``--first 100 --count 100``. After each fault every rank must step again and a migration must be
committed, in time: one that the controller decides, or a rollback that is ordered while it decides
none. Then, with movement off for a moment, all ranks must hold the one generation that the store
names. One line a fault, and at the end a table of the whole log.

The exit of any of its processes is survived by the demo. Time without tokens is the longest gap
around the fault between two cuts of the ranks' counters that contain tokens: a rank cuts every few
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.demo_process import (
    NODES,
    RANKS,
    Ended,
    FaultyDemo,
    TooLate,
    memory_files,
    shared_memory_names,
)
from telemetry.state.live import Control

# -- The kinds of faults that are drawn from, each injected from outside.

DEADLINE_S = 90.0  # for what a fault needs to be there, and for what must come after it
DAMAGED_BYTES = 64


class Fault:
    """One draw: a kind, a moment, and what the kind needs."""

    def __init__(self, seed: int, number: int) -> None:
        self.number = number
        draw = random.Random(seed * 1_000_003 + number)
        self.kind = draw.choice(sorted(INJECT))
        self.after_s = draw.uniform(0.0, 0.5)
        self.rank, self.host = draw.randrange(RANKS), draw.randrange(NODES)
        self.for_s = draw.uniform(0.2, 2.0)
        self.random = draw

    def wait(self, seconds: float) -> None:
        """Let time pass: no event says "a random moment", the wait is the experiment itself."""
        threading.Event().wait(seconds)


def kill_rank(demo: FaultyDemo, fault: Fault) -> str:
    (pid,) = demo.pids(f"rank {fault.rank}")
    os.kill(pid, signal.SIGKILL)
    return f"rank {fault.rank}"


def kill_controller(demo: FaultyDemo, fault: Fault) -> str:
    (pid,) = demo.wait_for("a controller", lambda: demo.pids("controller"), DEADLINE_S)
    os.kill(pid, signal.SIGKILL)
    return "the controller"


def kill_host_cache(demo: FaultyDemo, fault: Fault) -> str:
    title = f"host cache {fault.host}"
    pids = demo.wait_for(title, lambda: demo.pids(title), DEADLINE_S)
    os.kill(pids[0], signal.SIGKILL)
    return f"host process {fault.host}"


def stop_rank(demo: FaultyDemo, fault: Fault) -> str:
    (pid,) = demo.pids(f"rank {fault.rank}")
    os.kill(pid, signal.SIGSTOP)
    try:
        fault.wait(fault.for_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"rank {fault.rank} for {fault.for_s:.2f} s"


def damage_host_cache(demo: FaultyDemo, fault: Fault) -> str:
    """Turn bytes of the records that a host holds, where they lie."""
    (pid,) = demo.pids(f"host cache {fault.host}")
    descriptor = memory_files(pid, "eplb-host-cache")[0]  # of two: a mapping keeps one of its own
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as memory:
        size, damaged = os.fstat(memory.fileno()).st_size, 0
        while damaged < DAMAGED_BYTES:
            at = fault.random.randrange(size)
            byte = os.pread(memory.fileno(), 1, at)
            if byte != b"\0":  # a place that was never filled holds nothing to damage
                os.pwrite(memory.fileno(), bytes([byte[0] ^ 255]), at)
                damaged += 1
    return f"host {fault.host}"


def withdraw_plan(demo: FaultyDemo, fault: Fault) -> str:
    def withdrawn() -> str | None:
        found = demo.store.published()
        if found is None:
            demo.ask_for_migration()
            return None
        is_done = demo.store.withdraw(found.plan_id, outcome="aborted", reason="a fault: withdrawn")
        return f"plan {found.plan_id}" if is_done else None

    return demo.wait_for("an open plan to withdraw", withdrawn, DEADLINE_S)


def switch_movement(demo: FaultyDemo, fault: Fault) -> str:
    demo.store.set_control(Control(movement=False), reason="a fault: off")
    fault.wait(fault.for_s)
    demo.store.set_control(Control(movement=True), reason="a fault: on again")
    return f"for {fault.for_s:.2f} s"


def lock_store(demo: FaultyDemo, fault: Fault) -> str:
    with closing(sqlite3.connect(demo.state_dir / "store.sqlite", timeout=20.0)) as other:
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        fault.wait(fault.for_s)
        other.execute("ROLLBACK")
    return f"for {fault.for_s:.2f} s"


INJECT: dict[str, Callable[[FaultyDemo, Fault], str]] = {
    "kill a rank": kill_rank,
    "kill the controller": kill_controller,
    "kill a preload process": kill_host_cache,
    "stop a rank for a while": stop_rank,
    "damage host records": damage_host_cache,
    "withdraw the plan": withdraw_plan,
    "movement off and on": switch_movement,
    "lock the store": lock_store,
}


FAULTS_OF_A_LIFE = 25  # then it is halted, so that it says how many answers were checked
RUNS_OF_A_FAULT = 20
HEARD_S = 0.5  # by then every rank has heard of a switch, and has said so


# -- after a fault


def serves_and_rebalances(demo: FaultyDemo, since: int) -> bool:
    """Say whether every rank steps, and a plan published after ``since`` was committed."""
    plans: dict[str, set[int]] = {"publish": set(), "commit": set()}
    for event in demo.events_after(since):
        if event.kind in plans:
            plans[event.kind].add(event.detail["plan_id"])
    before = demo.steps()
    if not plans["publish"] & plans["commit"] or before is None:
        demo.ask_for_migration()
        return False
    info = demo.store.current_run()
    later = demo.wait_for("a report", lambda: (now := demo.steps()) != before and now, DEADLINE_S)
    return demo.store.current_run() == info and all(later[r] >= before[r] for r in before)


def all_hold_one_generation(demo: FaultyDemo, stopped: float) -> bool:
    """Say whether every rank has been idle at the committed generation since a moment before.

    A plan that was published at the last moment may still be open; nobody adopts it now.
    """
    info, committed = demo.store.current_run(), demo.store.committed()
    if info is None or committed is None:
        return False
    states = demo.store.rank_states(info.run)
    frozen = [state.frozen for state in states if state.frozen]
    if frozen:
        raise TooLate(f"a rank adopts no plan any more: {frozen[0]}")
    found = {(state.phase, state.generation) for state in states}
    are_fresh = all(state.time > stopped + HEARD_S for state in states)
    return (
        are_fresh and len(states) == RANKS and found == {("idle", committed.placement.generation)}
    )


def longest_gap_s(demo: FaultyDemo, begun: float) -> float:
    """Longest time between two cuts of counters, from just before ``begun`` on."""
    runs = [e.detail["run"] for e in demo.store.events(limit=1_000_000) if e.kind == "run"]
    # Every run that may reach into the fault: a rank that stands still may break several starts.
    times = sorted(
        sample.time
        for run in runs[-RUNS_OF_A_FAULT:]
        for _, sample in demo.store.samples(run, limit=1_000_000)
        if sample.tokens.any()
    )
    first = max(0, int(np.searchsorted(times, begun)) - 1)
    return float(np.diff(times[first:]).max(initial=0.0))


def suffer(demo: FaultyDemo, fault: Fault) -> dict[str, Any]:
    """Inject one fault, wait for the recovery, and look at everything."""
    fault.wait(fault.after_s)
    since, begun = demo.last_event(), time.time()
    what = INJECT[fault.kind](demo, fault)
    injected = demo.last_event() if fault.kind != "kill a rank" else since
    demo.wait_for("rebalance", lambda: serves_and_rebalances(demo, injected) or None, DEADLINE_S)
    recovered_s = time.time() - begun
    demo.store.set_control(Control(movement=False), reason="faults: a look at all ranks")
    stopped = time.time()
    demo.wait_for(
        "one generation", lambda: all_hold_one_generation(demo, stopped) or None, DEADLINE_S
    )
    gap_s = longest_gap_s(demo, begun)
    demo.store.set_control(Control(movement=True), reason="faults: seen")
    errors = [e.detail for e in demo.events_after(since) if e.kind == "error"]
    demo.store.prune(time.time() - 60.0)
    states = demo.store.rank_states(demo.store.current_run().run)  # type: ignore[union-attr]
    return {
        "what": what,
        "gap_s": round(gap_s, 3),
        "recovered_s": round(recovered_s, 2),
        "wrong": sum(detail["where"] == "reference" for detail in errors),
        "errors": [f"{detail['where']}: {detail['message']}" for detail in errors],
        "wrong_digests": sum(s.digest_failures for s in states),
        "orphans": len(demo.orphaned_memory()),
        "descriptors": demo.num_descriptors(),
        "processes": len(demo.processes()),
        "tracebacks": [line for line in demo.news() if "Traceback" in line],
    }


def run_part(demo: FaultyDemo, seed: int, numbers: range, log: Path) -> None:
    """Suffer the faults of a part, one after another, and write each down."""
    demo.start()
    faults_of_life = 0
    names = shared_memory_names()
    for number in numbers:
        fault = Fault(seed, number)
        line: dict[str, Any] = {"seed": seed, "number": number, "kind": fault.kind}
        try:
            line |= suffer(demo, fault) | {"outcome": "right"}
        except (Ended, TooLate) as exc:
            line |= {"outcome": type(exc).__name__, "why": str(exc), "words": demo.news()[-8:]}
            line["decisions"] = last_decisions(demo)
            with suppress(ProcessLookupError):
                demo.kill()
            demo.start()
            faults_of_life = 0
        line["shared_memory"] = sorted(shared_memory_names() - names)
        note(log, line)
        faults_of_life += 1
        is_last = number == numbers[-1]
        if is_last or faults_of_life > FAULTS_OF_A_LIFE:
            note(log, {"seed": seed, "life": halted(demo)})
            faults_of_life = 0
            if not is_last:
                demo.start()


def last_decisions(demo: FaultyDemo) -> list[str]:
    """Return what the controller decided last, and why, when the wait for it ended."""
    plans = [event for event in demo.events_after(0) if event.kind == "plan"]
    last = [(round(time.time() - event.time, 1), event.detail) for event in plans[-5:]]
    return [f"{age} s ago: {said['decision']}, {said['reason']}" for age, said in last]


def halted(demo: FaultyDemo) -> dict[str, Any]:
    """Halt the demo as a user would, and return what its summary says of right and wrong."""
    status = demo.halt()
    if status:
        return {"status": status, "why": demo.last_output()}
    summary = json.loads(demo.json_path.read_text())
    names = ("reference_checks", "reference_failures", "samples_lost", "deaths", "unserved_s")
    return {"status": 0} | {name: summary[name] for name in names}


def note(log: Path, line: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
    shown = {name: value for name, value in line.items() if name != "seed" and value not in ([], 0)}
    print(time.strftime("%H:%M:%S"), shown, flush=True)


# -- the table


def print_table(log: Path) -> None:
    """Print what the whole log says, by kind."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    faults = [line for line in lines if "kind" in line]
    lives = [line["life"] for line in lines if "life" in line]
    print(
        "| fault | n | right | ended | hung | wrong outputs | no tokens p50 s | p99 s "
        "| rebalanced p50 s | p99 s |"
    )
    print("|---|" + "---:|" * 9)
    for kind in [*sorted(INJECT), "all"]:
        of_kind = [one for one in faults if kind in (one["kind"], "all")]
        right = [one for one in of_kind if one["outcome"] == "right"]
        if not of_kind:
            continue
        counts = [
            sum(one["outcome"] == outcome for one in of_kind) for outcome in ("Ended", "TooLate")
        ]
        wrong = sum(one.get("wrong", 0) for one in of_kind)
        figures = [percentiles([one[name] for one in right]) for name in ("gap_s", "recovered_s")]
        print(f"| {kind} | {len(of_kind)} | {len(right)} | " + " | ".join(map(str, counts)), end="")
        print(f" | {wrong} | " + " | ".join(figures) + " |")
    checks = sum(life.get("reference_checks", 0) for life in lives)
    failures = sum(life.get("reference_failures", 0) for life in lives)
    print(f"answers checked in lives that were halted: {checks}, wrong {failures}")
    orphans = sum(one.get("orphans", 0) for one in faults)
    names = sorted({name for one in faults for name in one.get("shared_memory", [])})
    descriptors = sorted({one["descriptors"] for one in faults if "descriptors" in one})
    print(f"shared memory without an owner: {orphans}; new names in /dev/shm: {names or 'none'}")
    print(f"open files of the demo's process, after each fault: {descriptors}")


def percentiles(values: list[float]) -> str:
    if not values:
        return "- | -"
    return "{:.2f} | {:.2f}".format(*np.percentile(values, [50, 99]))


def main() -> None:
    """Run a part, and print the table of the log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"))
    given = parser.parse_args()
    if given.count:
        with tempfile.TemporaryDirectory() as folder:
            demo = FaultyDemo(Path(folder), given.seed)
            try:
                numbers = range(given.first, given.first + given.count)
                run_part(demo, given.seed, numbers, given.log)
            finally:
                demo.kill()
    print_table(given.log)
    found = [json.loads(line) for line in given.log.read_text().splitlines()]
    sys.exit(any(one.get("wrong") or one.get("outcome") == "TooLate" for one in found))


if __name__ == "__main__":
    main()
