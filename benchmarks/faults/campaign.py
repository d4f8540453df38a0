"""Faults, one or two at once, in a deployment whose survivors serve on: does it serve, and rightly?

    python -m benchmarks.faults.campaign --log FILE [--count 25] [--seed 1] [--kinds rank,rank+rank]
    python -m benchmarks.faults.campaign --add FILE FILE ...

One host, real processes, SQLite (``deployments.OneHost``). Several runs with seeds and logs of
their own share a machine; ``--add`` makes one table of their logs. The kinds are shuffled by the
seed, which also draws ranks and times. A kind is a first fault, and with ``+`` a second one:

    rank         a rank is killed
    stop         a rank is stopped by SIGSTOP: its silence tells (``agent.silence_s``)
    controller   the controller is killed
    cache        the host cache is killed, and started again after a second
    store        the store is locked for up to two seconds, and takes nothing
    recovery     first only: a rank is killed, and the store has the record of the recovery; the
                 second fault meets survivors that form their group, load experts or commit
    join         first only: a rank is killed, and its next process has offered itself
    scale        first only: some ranks are asked to leave; after the case all are wanted again

A case is over when all ranks have stepped for a while, the operation on ranks has ended, and a
controller is there; else ``short`` (other ranks serve) or ``down``. With ``--restarts 0`` ranks
that died are not started again, and half of them may die before the deployment starts anew. With
``--end-all`` nobody serves on: a death is a warm restart of all ranks.

    token      from the kill or stop of a rank that serves to the first step of a later group
    gap        the longest time without a token of any rank
    pause      the longest step around a join or leave, over the median step before the case
    served on  a process that served before the case serves after it
    lost       a generation, epoch, event, sample or operation that the store had acknowledged

Outputs of all steps are compared with a reference, a rank a step in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.deployments import OneHost
from benchmarks.faults.injected import generation_of
from benchmarks.faults.observing import gaps
from benchmarks.faults.paced_engine import ServedStep, different_maps, served_in
from benchmarks.faults.pairs import note, read
from telemetry.state.events import MEMBERSHIP, REGROUPED, RESTART, SERVE_ON_STAGES
from telemetry.state.store import StateStore

SECONDS = ("rank", "controller", "cache", "store")
SINGLES = ("rank", "stop", "controller", "cache", "store", "scale")
PAIRS = (*(f"{a}+{b}" for a in ("rank", "recovery", "join", "scale") for b in SECONDS), "rank+stop")
# Longest time between the two faults, by the first one: as long as what the second is to meet.
APART_S = {"rank": 0.5, "recovery": 0.125, "join": 2.0, "scale": 2.0}
POLL_S, STEADY_S, GRACE_S, SETTLED_S = 0.02, 2.0, 1.0, 0.5
DEADLINE_S, OPERATION_S, STAGE_S = 120.0, 60.0, 20.0
CACHE_S, LOCKED_S = 1.0, 2.0
MEMBER_S = 0.5  # a rank that has stepped within so long is a member
LARGEST, CHECKED = (0.5, 0.99, 1.0), ("wrong", "checks")


class Case:
    """One case in a deployment that serves.

    Args:
        host: the deployment.
        store: its store.
        ranks: that serve, and are to serve again.
        kind: names the faults.
        seed: draws what they happen to.
        comes_back: whether a rank that died is started again.
    """

    def __init__(
        self,
        host: OneHost,
        store: StateStore,
        ranks: set[int],
        kind: str,
        seed: str,
        *,
        comes_back: bool,
    ) -> None:
        self.host, self.store, self.ranks, self.kind = host, store, ranks, kind
        self._rng, self._comes_back, self._before = random.Random(seed), comes_back, host.living()
        self._told, self._hit, self._lost = list[str](), set[int](), set[str]()
        self._gone_at = list[float]()  # when members were killed or stopped
        self._kept, self._operations = dict[str, int](), dict[str, set[int]]()
        self._name, self._since = seed, 0.0
        self._due = list[tuple[float, Callable[[], object]]]()  # when a fault ends, and what does

    def run(self) -> dict[str, Any]:
        """Inject the faults, and wait until all is well; returns the line of the log."""
        first, _, second = self.kind.partition("+")
        self.look()
        load, wall, begun, at = os.getloadavg()[0], time.time(), time.monotonic(), list[float]()
        names = [first, second] if second else [first]
        if first == "rank":
            self._rng.shuffle(names)
        for name in names:
            if at:
                apart_s = self._rng.uniform(0.0, APART_S[first])
                self.wait(None, self._rng.choice([0.0, apart_s]) if first == "rank" else apart_s)
            at.append(round(time.monotonic() - begun, 2))
            getattr(self, f"inject_{name}")()
        if not self._comes_back:
            self.ranks -= self._hit
        self.wait(lambda: not self._due)  # before it reads the store, which it may have locked
        is_right = self.wait(self.has_changed) and self.wait(self.is_steady)
        ended, now, host = time.monotonic(), self.host.living(), self.host
        served = [one for one in served_in(host.token_folder) if one.time > begun - GRACE_S]
        return {
            "load": round(load, 1),
            "told": self._told,
            "at_s": at,
            "outcome": "right" if is_right else "short" if host.stepping(GRACE_S) else "down",
            "ranks": [len(self._before), len(now)],
            "served_on": any(self._before.get(rank) == pid for rank, pid in now.items()),
            "gap_s": round(max(b - a for a, b in gaps(host.tokens(), begun, ended, 0.0)), 2),
            "maps": different_maps(served)[:5],
            "lost": sorted(self._lost),
            "kept": self._kept,
            "ended": [name for name, one in host.processes.items() if not one.is_up],
            "seconds": round(ended - begun, 1),
            **self.changes(served, begun, wall),
        }

    # -- faults

    def inject_rank(self, number: int = signal.SIGKILL) -> int:
        """Kill a rank, and return it; -1: no rank has a process now."""
        living, members = self.host.living(), self.host.stepping(MEMBER_S)
        allowed = living.keys() - (set() if "join" in self.kind else self._hit)
        if not allowed:
            return -1
        rank = self._rng.choice(sorted(allowed))
        with suppress(ProcessLookupError):  # all ranks are about to start again
            os.kill(living[rank], number)
        self._hit.add(rank)
        self._told.append(f"rank {rank}{'' if rank in members else ', no member'}")
        if rank in members:
            self._gone_at.append(time.monotonic())
        return rank

    def inject_stop(self) -> None:
        """Stop a rank; its launcher kills it once the others serve without it."""
        self.inject_rank(signal.SIGSTOP)

    def inject_controller(self) -> None:
        """Kill the controller."""
        for pid in self.host.pids("controller"):
            os.kill(pid, signal.SIGKILL)
            self._told.append("controller")

    def inject_cache(self) -> None:
        """Kill the host cache, and start it again."""
        self.host.processes["cache"].kill()
        self._due.append((time.monotonic() + CACHE_S, self.host.processes["cache"].start))
        self._told.append("cache")

    def inject_store(self) -> None:
        """Lock the store for a while."""
        path = self.host.deployment.settings.deployment.state_dir / "store.sqlite"
        seconds = self._rng.uniform(0.1, LOCKED_S)
        held = sqlite3.connect(path, timeout=DEADLINE_S, isolation_level=None)
        held.execute("BEGIN EXCLUSIVE")
        self._due.append((time.monotonic() + seconds, held.close))
        self._told.append(f"store locked for {seconds:.1f} s")

    def inject_recovery(self) -> None:
        """Kill a rank, and wait for the record of the survivors."""
        since = self.store.backend.now()
        self.inject_rank()

        def is_recorded() -> bool:
            record = self.store.recovery()
            return record is not None and record.time >= since

        self.wait(is_recorded, STAGE_S)

    def inject_join(self) -> None:
        """Kill a rank, and wait until it offers itself to the others."""
        rank = self.inject_rank()
        self.wait(lambda: rank in {one.rank for one in self.store.joiners()}, STAGE_S)

    def inject_scale(self) -> None:
        """Ask some ranks to leave."""
        settings = self.host.deployment.settings
        fewest = math.ceil(settings.model.experts / (settings.topology.slots_per_rank - 1))
        count = self._rng.randint(fewest, len(self.ranks) - 1)
        self.want(set(self._rng.sample(sorted(self.ranks), count)))

    def want(self, ranks: set[int]) -> None:
        """Ask for these ranks to serve."""
        name, given = f"{self._name} {len(self._operations)}", sorted(ranks)
        stepping = self.host.stepping(MEMBER_S)
        self.store.change_membership(
            name,
            given,
            asked=given,
            alive=[rank in stepping for rank in range(self.host.num_ranks)],
            reason=self.kind,
            by="campaign",
            within_s=OPERATION_S,
        )
        self._operations[name] = ranks
        self._told.append(f"ranks {given} wanted")

    # -- what is waited for

    def wait(self, is_over: Callable[[], bool] | None, deadline_s: float = DEADLINE_S) -> bool:
        """Poll until something holds, or a deadline; end the faults that are due."""
        deadline = time.monotonic() + deadline_s
        while is_over is None or not is_over():
            now = time.monotonic()
            for one in [one for one in self._due if one[0] <= now]:
                self._due.remove(one)
                one[1]()
            if now > deadline:
                return False
            Event().wait(min(POLL_S, deadline - now))
        return True

    def look(self) -> None:
        """Note what the store has acknowledged, and what of that it has no more."""
        events = self.store.latest_events(limit=1)
        found = {
            "generation": generation_of(self.store),
            "epoch": self.store.epoch(),
            "event": events[0].id if events else 0,
        }
        run = self.store.current_run()
        runs = {run.run} if run else set[str]()
        for name in runs | {key[8:] for key in self._kept if key.startswith("samples ")}:
            found[f"samples {name}"] = sum(self.store.sample_counts(name).values())
        for key, value in self._kept.items():
            if found[key] < value:
                self._lost.add(f"{key} {value}, found {found[key]}")
        self._kept = found
        for name, ranks in self._operations.items():
            known = self.store.change_of_id(name)
            if known is None or set(known.wanted) != ranks:
                self._lost.add(f"operation {name}, found {known}")

    def has_changed(self) -> bool:
        """Whether the operations on ranks have ended, and all ranks are wanted."""
        self.look()
        latest = self.store.membership_change()
        if latest is None or not self._operations:
            return True
        if latest.ended and set(latest.should_serve) != self.ranks:
            self._told.append(f"operation {latest.ended}")
            self.want(self.ranks)
            return False
        return bool(latest.ended)

    def is_steady(self) -> bool:
        """Whether all ranks have stepped for a while, no others are there, and a controller is."""
        self.look()
        now = time.monotonic()
        if not self.host.stepping(GRACE_S) == set(self.host.living()) == self.ranks:
            self._since = 0.0
            return False
        self._since = self._since or now
        # A rank that has died has stepped until then.
        return now - self._since > STEADY_S + GRACE_S and bool(self.host.pids("controller"))

    # -- what came of it

    def changes(self, served: Sequence[ServedStep], begun: float, wall: float) -> dict[str, Any]:
        """Figures of the changes of the group."""
        events = [one for one in self.store.latest_events() if one.time >= wall]
        of = {k: [x for x in events if x.kind == k] for k in (MEMBERSHIP, REGROUPED, RESTART)}
        firsts = dict[tuple[str, int], float]()
        for one in served:
            firsts.setdefault((one.run, one.membership), one.time)
        tokens = [[at - gone for at in firsts.values() if at > gone] for gone in self._gone_at]
        is_known = bool(tokens) and all(tokens)
        found: dict[str, Any] = {
            "memberships": len(of[MEMBERSHIP]),
            "regroupings": len(of[REGROUPED]),
            "why": [event.detail["reason"] for event in of[RESTART]],
            "token_s": round(max(map(min, tokens)), 3) if is_known else None,
        }
        if len(of[MEMBERSHIP]) == len(self._gone_at) == 1:
            detail = of[MEMBERSHIP][0].detail
            gone = self._gone_at[0] - begun + wall
            found["stages"] = {"detect": detail["broke_at"] - gone, **detail["seconds"]}
        if of[REGROUPED] and "+" not in self.kind:
            since = self._gone_at[0] + found["token_s"] + SETTLED_S if is_known else begun
            before = self.intervals(served, begun - GRACE_S, begun)
            found["step_s"] = round(median(before), 4)
            found["pause"] = round(max(self.intervals(served, since)) / median(before), 2)
        return found

    def intervals(
        self, served: Sequence[ServedStep], since: float, until: float = math.inf
    ) -> list[float]:
        """Seconds between two steps of a rank, of those whose processes served all the time."""
        found = list[float]()
        for rank, pid in self.host.living().items():
            if self._before.get(rank) != pid:
                continue
            times = [one.time for one in served if one.rank == rank and since <= one.time < until]
            found += [after - before for before, after in pairwise(times)]
        return found


def main() -> None:
    """Run the cases that the log lacks, or add logs up; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", type=Path, nargs="+", help="logs that are added up")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(SINGLES + PAIRS))
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--slots", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--silence", type=float, default=3.0, help="agent.silence_s")
    parser.add_argument("--restarts", type=int, default=1_000_000, help="of ranks that died")
    parser.add_argument("--end-all", action="store_true", help="a death ends all ranks")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later")
    given = parser.parse_args()
    if given.add is None:
        kinds = given.kinds.split(",")
        if given.log is None or not set(kinds) <= {*SINGLES, *PAIRS}:
            parser.error(f"expected --log, and --kinds of {', '.join(SINGLES + PAIRS)}")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        os.environ["EPLB_SECRET"] = secrets.token_hex(16)
        campaign(given, kinds)
    lines = [line for log in given.add or [given.log] for line in read(log)]
    print(table(lines))
    sys.exit(any(line["outcome"] != "right" or faulty(line) for line in lines))


def campaign(given: argparse.Namespace, kinds: Sequence[str]) -> None:
    """Run the cases that the log lacks."""
    begun, rng, deck = time.monotonic(), random.Random(given.seed), list[str]()
    while len(deck) < given.count:
        deck += rng.sample(kinds, len(kinds))
    known = {line["case"] for line in read(given.log)}
    left = [number for number in range(given.count) if number not in known]
    settings = {
        "agent.serve_on": not given.end_all,
        "agent.silence_s": given.silence,
        "supervision.restart_after_death": given.restarts,
    }
    comes_back = given.restarts > 0
    with tempfile.TemporaryDirectory() as folder:
        while left and time.monotonic() - begun < given.seconds:
            with ExitStack() as stack:
                life, ranks = Path(folder) / "life", set(range(given.ranks))
                shape = given.ranks, given.slots, given.seed, given.device
                host = OneHost(stack, life, *shape, settings)
                store = stack.enter_context(closing(host.deployment.opened_store()))
                start = Case(host, store, ranks, "start", "start", comes_back=True)
                is_right = start.wait(start.is_steady)
                while left and is_right and len(ranks) > given.ranks // 2:
                    if time.monotonic() - begun > given.seconds:
                        break
                    number, checks = left.pop(0), count_checks(host)
                    kind = deck[number]
                    line: dict[str, Any] = {"seed": given.seed, "case": number, "kind": kind}
                    name = f"{given.seed} {number} {kind}"
                    line |= Case(host, store, ranks, kind, name, comes_back=comes_back).run()
                    after = count_checks(host)
                    line |= {"checks": after[0] - checks[0], "wrong": after[1] - checks[1]}
                    note(given.log, line)
                    print(json.dumps(line), flush=True)
                    is_right = line["outcome"] == "right"
                if not is_right:
                    tell(given.log, host)


def count_checks(host: OneHost) -> tuple[int, int]:
    """Checked steps so far, and those of them that are wrong."""
    host.read_checks()
    return len(host.checks), host.num_wrong()


def tell(log: Path, host: OneHost) -> None:
    """Keep the end of what the processes of a deployment that is not right have printed."""
    texts = [f"== {n}\n{one.output.read_text()[-20_000:]}" for n, one in host.processes.items()]
    with log.with_suffix(".txt").open("a") as file:
        file.write("\n".join(texts))


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which a part of all lies."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def faulty(line: dict[str, Any]) -> bool:
    """Whether something happened that no fault excuses."""
    return bool(line["wrong"] or line["maps"] or line["lost"] or line["ended"])


def table(lines: list[dict[str, Any]]) -> str:
    """Give the cases as tables in Markdown: by kind, and the stages of single deaths."""
    names = "kind|cases|served on|token p50 s|p99|max|gap p50 s|p99|max|pause p50|max"
    names += "|short|down|lost, other maps|wrong / checks"
    rows = [f"| {names.replace('|', ' | ')} |", "|---|" + "---:|" * 14]
    for kind in (*sorted({line["kind"] for line in lines}), "all"):
        of_kind = [line for line in lines if kind in (line["kind"], "all")]
        row: list[Any] = [kind, len(of_kind), sum(line["served_on"] for line in of_kind)]
        for key, parts in (("token_s", LARGEST), ("gap_s", LARGEST), ("pause", (0.5, 1.0))):
            values = [line[key] for line in of_kind if line.get(key) is not None]
            row += [f"{percentile(values, part):.3g}" if values else "-" for part in parts]
        row += [sum(line["outcome"] == name for line in of_kind) for name in ("short", "down")]
        row.append(sum(bool(line["lost"] or line["maps"]) for line in of_kind))
        row.append(" / ".join(str(sum(line[key] for line in of_kind)) for key in CHECKED))
        rows.append("| " + " | ".join(map(str, row)) + " |")
    staged = [line["stages"] for line in lines if line["kind"] == "rank" and "stages" in line]
    if staged:
        stages = ("detect", *SERVE_ON_STAGES)
        rows += ["", f"| rank killed | {' | '.join(stages)} |", "|---|" + "---:|" * len(stages)]
        for part in LARGEST:
            shown = (f"{percentile([one[key] for one in staged], part):.3g}" for key in stages)
            rows.append(f"| part {part:g} | {' | '.join(shown)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
