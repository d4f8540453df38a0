"""Twelve faults on two hosts, each alone and followed by another. Does the deployment serve again?

    python -m benchmarks.faults.pairs --log pairs.jsonl [--faults rank-killed,link-cut]
        [--parts singles,moves,deaths,caches,pairs] [--pairs 24] [--seed 1]

Each case is a deployment of its own (``deployments``), and a line of the log, which is on
disk before the next begins: a case that is in the log is not run again. Needs root. ``deaths`` and
``caches`` are each fault followed by a rank's death or a cache's; ``pairs`` are further ordered
pairs, drawn by the seed, as are the rank, the host and the time between the two faults. A second
fault whose process is not there waits for it. ``moves`` are faults of what moves experts.

Right again: every rank steps and a checker has compared outputs since, without a gap of 2 s for
5 s, and the verdict is serving. A case that is not right 180 s after its last cause ended is lost:
a human then starts what has ended, or else everything but the store, which the log notes. In the
end a migration must be committed, one of the controller or a rollback that is ordered, and all
ranks must hold it; and no process may map shared memory whose owner is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.deployments import RANKS, Hosts, TwoHostDeployment
from benchmarks.faults.injected import (
    CLOCKS,
    EVERY,
    FAULTS,
    NO_OUTAGE,
    OF_MOVES,
    Draw,
    Fault,
    Mend,
    NotThere,
    generation_of,
    order_move,
    orphaned_memory,
)
from benchmarks.faults.observing import GRACE_S, Observer, gaps

POLL_S = 0.1
STEADY_S = 5.0
START_DEADLINE_S, LIMIT_S, HUMAN_S = 120.0, 180.0, 60.0
MOVE_S = 90.0  # for a migration after all is well
STALLED_S = 30.0 + GRACE_S  # deadline of the verdict for an outage of any cause
LEAST_GAP_S, MOST_GAP_S = 0.5, 20.0  # between two faults: the second comes while the first lasts


# -- cases


@dataclass(frozen=True)
class Case:
    """One or two faults, and what they happen to, by a seed."""

    part: str
    faults: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        """As in the log."""
        return " + ".join(self.faults)

    def draws(self) -> Iterator[tuple[float, int, int]]:
        """For each fault: seconds after the one before, rank, host."""
        rng = random.Random(f"{self.seed} {self.name}")
        gap_s = 0.0
        for name in self.faults:
            yield round(gap_s, 1), rng.choice(RANKS), rng.randrange(2)
            most_s = 0.8 * EVERY[name].lasts_s or MOST_GAP_S / 2
            gap_s = rng.uniform(LEAST_GAP_S, min(most_s, MOST_GAP_S))


def cases_of(parts: set[str], firsts: list[str], num_pairs: int, seed: int) -> list[Case]:
    """All cases that were asked for, in order; a first fault A+B is that pair alone."""
    follows = {"deaths": "rank-killed", "caches": "cache-killed"}
    found = [Case("singles", (one,), seed) for one in FAULTS]
    found += [Case("moves", (one,), seed) for one in OF_MOVES]
    found += [Case(part, (one, then), seed) for part, then in follows.items() for one in FAULTS]
    others = [(a, b) for a in FAULTS for b in FAULTS if a != b and b not in follows.values()]
    drawn = random.Random(seed).sample(others, num_pairs)
    found += [Case("pairs", pair, seed) for pair in drawn]
    named = [Case("named", tuple(one.split("+")), seed) for one in firsts if "+" in one]
    return named + [one for one in found if one.part in parts and one.faults[0] in firsts]


class Run:
    """One case from its start to its line of the log."""

    def __init__(self, case: Case, deployment: TwoHostDeployment, observer: Observer) -> None:
        self.case, self.deployment, self.observer = case, deployment, observer
        self._mends: list[tuple[float, Mend]] = []
        self._date = 0.0  # when the first fault was injected, by the wall clock
        self._num_checks = 0

    def wait(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Be the service manager, end faults that are due, until something or a deadline."""
        deadline = time.monotonic() + within_s
        while not is_over():
            now = time.monotonic()
            if now >= deadline:
                return False
            self.deployment.look()
            for due in [one for one in self._mends if one[0] <= now]:
                self._mends.remove(due)
                due[1]()
            Event().wait(POLL_S)
        return True

    def is_right(self) -> bool:
        """Whether all is well, for STEADY_S; see the module."""
        now, serves = time.monotonic(), self.deployment.ranks_serve(GRACE_S)
        if self._mends or not serves or self.observer.verdict != "serving":
            self._since = now
        if self._since == now:
            self.deployment.read_checks()
            self._num_checks = len(self.deployment.checks)
        if now - self._since < STEADY_S:
            return False
        if gaps(self.deployment.tokens(), self._since, now, GRACE_S):
            self._since = now
            return False
        self.deployment.read_checks()
        return len(self.deployment.checks) > self._num_checks

    def becomes_right(self, within_s: float) -> bool:
        """Wait until all is well."""
        self._since = time.monotonic()
        return self.wait(self.is_right, within_s)

    def is_settled(self) -> bool:
        """Whether all is well, or nothing but a human will change it."""
        of_ranks = [self.deployment.processes[f"launch-{host}"] for host in range(2)]
        return self.is_right() or (not self._mends and all(one.has_refused for one in of_ranks))

    def inject(self) -> float:
        """Inject the faults, each once its process is there; returns when the last cause ends."""
        ends = []
        for name, (gap_s, rank, host) in zip(self.case.faults, self.case.draws(), strict=True):
            fault, draw = EVERY[name], Draw(self.deployment, rank, host)
            due = time.monotonic() + gap_s

            def is_injected(due: float = due, fault: Fault = fault, draw: Draw = draw) -> bool:
                if time.monotonic() < due:
                    return False
                try:
                    mend = fault.inject(draw)
                except NotThere:
                    return False
                self._mends.append((time.monotonic() + fault.lasts_s, mend))
                return True

            is_done = self.wait(is_injected, gap_s + LIMIT_S)
            now = time.monotonic()
            self.told.append(f"{name} {rank=} {host=}" if is_done else f"{name}: no process")
            self.at.append(now)
            ends.append(now + fault.lasts_s)
        return max(ends)

    def run(self) -> dict[str, Any]:
        """Suffer the case; returns its line."""
        self.told, self.at = list[str](), list[float]()
        if not self.becomes_right(START_DEADLINE_S):
            return {"outcome": "no start", "why": self._state()}
        self._date = time.time()
        causes_end = self.inject()
        begun = self.at[0]
        left_s = causes_end - time.monotonic() + LIMIT_S
        self._since = time.monotonic()
        self.wait(self.is_settled, left_s)
        ended, is_right = time.monotonic(), self.is_right()
        line = {
            "outcome": "right" if is_right else "lost",
            "injected": self.told,
            "at_s": [round(at - begun, 1) for at in self.at],
            **self.observer.report(self.deployment.tokens(), begun, ended),
        }
        last = line["outages"][-1] if line["outages"] else (0.0, 0.0)
        line["back_s"] = round(max(0.0, sum(last) + begun - causes_end), 1) if is_right else None
        if not is_right:
            line |= {"why": self._state(), "human": self._help()}
        line["moved_s"] = self.moves_again() if is_right else None
        line["orphans"] = len(orphaned_memory(self.deployment))
        line["manager"] = {n: p.ends for n, p in self.deployment.processes.items() if p.ends}
        self.deployment.read_checks()
        checks = {"checks": len(self.deployment.checks), "wrong": self.deployment.num_wrong()}
        told = {"notes": self.deployment.notes, "anomalies": self._anomalies()}
        return line | checks | told

    def moves_again(self) -> float | None:
        """Wait until a further migration is committed and all ranks hold it; after how long."""
        begun = time.monotonic()
        with closing(self.deployment.deployment.opened_store()) as store:
            first = generation_of(store)

            def has_moved() -> bool:
                run, last = store.current_run(), generation_of(store)
                if run is None or last == first:
                    order_move(store)
                    return False
                held = {(one.phase, one.generation) for one in store.rank_states(run.run)}
                return held == {("idle", last)}

            is_done = self.wait(has_moved, MOVE_S)
        return round(time.monotonic() - begun, 1) if is_done else None

    def _state(self) -> str:
        last = self.observer.samples[-1] if self.observer.samples else None
        words = {n: p.last_words() for n, p in self.deployment.processes.items() if not p.is_up}
        return f"{last and (last.verdict, last.reason)}; ended: {words or 'nothing'}"

    def _help(self) -> str:
        """Do what a human would; returns what that was."""
        ended = [one for one in self.deployment.processes.values() if not one.is_up]
        for one in ended:
            one.start()
        if ended and self.becomes_right(HUMAN_S):
            return f"start {', '.join(one.name for one in ended)}"
        for one in self.deployment.processes.values():
            one.kill()
            one.start()
        is_right = self.becomes_right(HUMAN_S)
        return "start everything again" + ("" if is_right else ", in vain")

    def _anomalies(self) -> list[list[Any]]:
        """What stands in the list of anomalies since the first fault: kind, seconds, text."""
        with suppress(Exception):
            found = self.deployment.get("/api/v1/anomalies").json()["anomalies"]
            return [
                [a["kind"], a["until"] and round(a["until"] - a["since"], 1), a["text"][:120]]
                for a in found
                if a["since"] > self._date - GRACE_S
            ]
        return [["unreachable", None, ""]]


# -- the table


def losses(line: dict[str, Any]) -> list[str]:
    """What a case lost against the targets."""
    if line["outcome"] == "no start":
        return ["no start"]
    faults = [EVERY[name] for name in line["faults"]]
    found = []
    if line["outcome"] != "right":
        found.append(f"down: {line['human']}")
    if line["wrong"]:
        found.append(f"{line['wrong']} wrong")
    limit_s = faults[0].told_s
    if limit_s is not None and (line["told_s"] is None or line["told_s"] > limit_s):
        found.append(f"told after {line['told_s']} s, expected {limit_s:g}")
    if line["told_s"] is not None and set(line["faults"]) <= CLOCKS:
        _, verdict, reason = next(one for one in line["verdicts"] if one[1] != "serving")
        found.append(f"verdict {verdict}: {reason[:60]}")
    if line["outcome"] == "right" and line.get("moved_s", 0.0) is None:
        found.append(f"no migration within {MOVE_S:g} s")
    if line.get("orphans"):
        found.append(f"{line['orphans']} shared memories without an owner")
    found += line["notes"]
    for (_, lasted_s), told_s in zip(line["outages"], line["stop_told_s"], strict=True):
        if lasted_s > STALLED_S and (told_s is None or told_s > STALLED_S):
            found.append(f"outage of {lasted_s:.0f} s told after {told_s} s")
    if line["false_stop_s"] > GRACE_S:
        found.append(f"stopped for {line['false_stop_s']:.1f} s while serving")
    if line["missing_s"] and set(line["faults"]) <= NO_OUTAGE:
        found.append("an outage by a fault that should cost none")
    told_s = line["unserved_told_s"]
    # The product counts a restart of any length as an outage; this benchmark counts long gaps.
    least_s, most_s = line["missing_s"] - 1.0, line["missing_s"] + line["short_s"] + 1.0
    if told_s is None or not least_s <= told_s <= most_s:
        found.append(f"unserved told {told_s} s of {line['missing_s']}")
    is_alert_due = line["has_prometheus"] and line["told_s"] is not None
    if is_alert_due and line["alert_s"] is None:
        found.append("no alert")
    elif is_alert_due and line["alert_scrapes"] > 1:
        found.append(f"alert after {line['alert_scrapes']} scrapes, expected 1")
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Give the log as a table in Markdown: each case, and medians of each part."""
    names = (
        "longest gap s|missing s|back s|told s|unserved told s|age off s|alert s|scrapes"
        "|wrong/checks|lost"
    )
    rows = [f"| case | {names.replace('|', ' | ')} |", "|---|" + "---:|" * 9 + "---|"]
    keys = ("longest_s", "missing_s", "back_s", "told_s", "unserved_told_s", "age_off_s", "alert_s")
    keys += ("alert_scrapes",)

    def row(name: str, values: list[Any], last: str) -> str:
        shown = ["-" if one is None else f"{one}" for one in values]
        return f"| {name} | {' | '.join(shown)} | {last} |"

    for part in dict.fromkeys(line["part"] for line in lines):
        of_part = [line for line in lines if line["part"] == part]
        for line in of_part:
            checked = f"{line.get('wrong', 0)}/{line.get('checks', 0)}"
            figures = [line.get(key) for key in keys]
            rows.append(row(line["case"], [*figures, checked], "; ".join(losses(line)) or "-"))
        values = [[x for line in of_part if (x := line.get(key)) is not None] for key in keys]
        medians = [round(median(found), 2) if found else None for found in values]
        num_right = sum(line["outcome"] == "right" for line in of_part)
        wrong = sum(line.get("wrong", 0) for line in of_part)
        checks = sum(line.get("checks", 0) for line in of_part)
        last = f"{num_right} of {len(of_part)} serve again by themselves"
        rows.append(row(f"**median of {part}**", [*medians, f"{wrong}/{checks}"], last))
    return "\n".join(rows)


def note(log: Path, line: dict[str, Any]) -> None:
    """Have a line on disk."""
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(log: Path) -> list[dict[str, Any]]:
    """Read the lines of a log; the last of a run that was killed may be torn."""
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    """Run the cases that the log lacks, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--faults", default=",".join(EVERY), help="first faults; A+B is a pair")
    parser.add_argument("--parts", default="singles,moves,deaths,caches,pairs")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    firsts = given.faults.split(",")
    if unknown := {one for first in firsts for one in first.split("+")} - EVERY.keys():
        parser.error(f"--faults has {sorted(unknown)}, expected some of {', '.join(EVERY)}")
    cases = cases_of(set(given.parts.split(",")), firsts, given.pairs, given.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    known = {(line["case"], line["seed"]) for line in read(given.log)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = Hosts(stack, folder)
        for number, case in enumerate(cases):
            if (case.name, case.seed) in known:
                continue
            with ExitStack() as life:
                deployment = TwoHostDeployment(life, hosts, case.seed)
                observer = Observer(deployment, folder / f"prometheus-{number}")
                life.callback(observer.close)
                line: dict[str, Any] = {"case": case.name, "seed": case.seed, "part": case.part}
                line |= {"faults": case.faults, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ")}
                line |= {"load": round(os.getloadavg()[0], 1)} | Run(
                    case, deployment, observer
                ).run()
            note(given.log, line)
            lost = "; ".join(losses(line)) or "nothing lost"
            print(f"{time.strftime('%H:%M:%S')} {case.name}: {line['outcome']}: {lost}", flush=True)
    wanted = {(case.name, case.seed) for case in cases}
    lines = [line for line in read(given.log) if (line["case"], line["seed"]) in wanted]
    print(table(lines))
    sys.exit(any(losses(line) for line in lines))


if __name__ == "__main__":
    main()
