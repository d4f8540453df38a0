"""Cuts two hosts apart while experts move: who serves on, what serves on each side, what heals.

    python -m benchmarks.faults.partitions --log FILE [--seconds 5,60] [--times 2] [--seed 1]
        [--causes "link down,host gone"] [--serve-on off,on]

Two network namespaces with two ranks each (``deployments``; needs root); the store is on
the first host, and rebalances come at every chance. ``host gone``: the cable is cut and all
processes of the second host are killed; its commands start again when the cable is back. Each case
is a deployment of its own and a line of the log; a case that is in the log is not run again.

The truth is what ranks wrote: the time of each step, and the placement that served in it. Two sides
serve different maps where ranks that finish a step of one group had other placements in it, or
where a step of an earlier group ends after one of a later group.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.deployments import Hosts, TwoHostDeployment
from benchmarks.faults.hosts_soak import GIVEN
from benchmarks.faults.observing import GRACE_S, gaps
from benchmarks.faults.paced_engine import different_maps, served_in
from benchmarks.faults.pairs import note, read
from tests.support.two_hosts import CUTS

HOST_GONE = "host gone"
CAUSES = [name for name in CUTS if name != "drop what opens a connection"]
SILENCE_S = 3.0  # agent.silence_s with serve_on: shorter than the shortest cut
SERVE_ON = {
    "agent.serve_on": True,
    "agent.silence_s": SILENCE_S,
    "topology.slots_per_rank": 10,  # two ranks hold all 16 experts
    "host_cache.records": 0,
}
SETTLED_S, LIMIT_S, POLL_S, CUT_WITHIN_S = 5.0, 120.0, 0.1, 2.0


def serving_ranks(deployment: TwoHostDeployment, since: float) -> set[int]:
    """Ranks that have finished a step since."""
    return {one.rank for one in served_in(deployment.hosts.tokens) if one.time > since}


def wait(deployment: TwoHostDeployment, is_over: Callable[[], bool], within_s: float) -> bool:
    """Be the service manager until something or a deadline."""
    deadline = time.monotonic() + within_s
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        deployment.look()
        Event().wait(POLL_S)
    return True


def cut(deployment: TwoHostDeployment, cause: str) -> Callable[[], None]:
    """Begin the fault; returns what ends it."""
    if cause != HOST_GONE:
        return deployment.hosts.spaces.cut(cause, deployment.redis.port)
    mend = deployment.hosts.spaces.cut("link down")
    lost = [one for name, one in deployment.processes.items() if name.endswith("-1")]
    for one in lost:
        one.kill()
        one.restart_at = None  # nobody is there to start it

    def come_back() -> None:
        mend()
        for one in lost:
            one.start()

    return come_back


def settled(deployment: TwoHostDeployment, healed: float) -> bool:
    """Whether all ranks have stepped for a while, without a gap, since the cut was mended."""
    now = time.monotonic()
    if now - healed < SETTLED_S or gaps(deployment.tokens(), now - SETTLED_S, now, GRACE_S):
        return False
    return len(serving_ranks(deployment, now - GRACE_S)) == deployment.num_ranks


def run(deployment: TwoHostDeployment, cause: str, cut_s: float, rng: random.Random) -> Any:
    """Suffer one case; returns its line."""
    deployment.until_steady()
    Event().wait(rng.uniform(0.0, CUT_WITHIN_S))
    load, begun, date = os.getloadavg()[0], time.monotonic(), time.time()
    mend = cut(deployment, cause)
    wait(deployment, lambda: False, cut_s)
    mend()
    healed = time.monotonic()
    is_settled = wait(deployment, lambda: settled(deployment, healed), LIMIT_S)
    ended = time.monotonic()
    served = served_in(deployment.hosts.tokens)
    outages = gaps(deployment.tokens(), begun, ended, 1.0)
    resumed = outages[0][1] if outages else healed
    with closing(deployment.deployment.opened_store()) as store:
        recovery = store.recovery()
        events = [(one.kind, one.detail) for one in store.latest_events() if one.time >= date]
    deployment.read_checks()
    reasons = [str(detail.get("reason", ""))[:200] for kind, detail in events if kind == "recovery"]
    return {
        "load": load,
        "settled": is_settled,
        "outages": [[round(a - begun, 2), round(b - begun, 2)] for a, b in outages],
        "unserved_s": round(sum(b - a for a, b in outages), 2),
        "all_s": round(ended - healed, 2) if is_settled else None,  # SETTLED_S of it at least
        "back_s": round(outages[-1][1] - healed, 2) if outages else 0.0,
        "during": sorted({one.rank for one in served if resumed <= one.time < healed}),
        "ranks": sorted(serving_ranks(deployment, ended - GRACE_S)),
        "groups": len({(one.run, one.membership) for one in served}),
        "membership": recovery.membership if recovery else 0,
        "recoveries": reasons,
        "aborts": sum(kind == "abort" for kind, _ in events),
        "different": different_maps(served),
        "generations": [served[0].generation, served[-1].generation],
        "checks": len(deployment.checks),
        "wrong": deployment.num_wrong(),
        "manager": {name: one.ends for name, one in deployment.processes.items() if one.ends},
        "said": {
            name: deployment.processes[name].last_words() for name in ("launch-0", "launch-1")
        },
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Medians and largest values of each cause, duration and switch."""
    names = "cases|serve during the cut|unserved s, median; max|back s after it, median; max"
    names += "|ranks at the end|different maps|wrong / checks"
    rows = [f"| serve_on | cut | cause | {names.replace('|', ' | ')} |", "|---|" + "---|" * 9]
    keys = ("serve_on", "seconds", "cause")
    for key in sorted({tuple(line[name] for name in keys) for line in lines}):
        of = [line for line in lines if tuple(line[name] for name in keys) == key]
        times = [[line[name] for line in of] for name in ("unserved_s", "back_s")]
        ranks = sorted({len(line["ranks"]) if line["settled"] else -1 for line in of})
        cells = [
            f"{len(of)}",
            f"{sum(bool(line['during']) for line in of)}",
            *(f"{median(values):.1f}; {max(values):.1f}" for values in times),
            ", ".join("not settled" if one < 0 else f"{one}" for one in ranks),
            f"{sum(len(line['different']) for line in of)}",
            f"{sum(line['wrong'] for line in of)} / {sum(line['checks'] for line in of)}",
        ]
        rows.append(f"| {key[0]} | {key[1]:g} s | {key[2]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Run the cases that are not in the log, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--causes", default=",".join([*CAUSES, HOST_GONE]))
    parser.add_argument("--seconds", default="5,60")
    parser.add_argument("--serve-on", default="off,on")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = ("number", "cause", "seconds", "serve_on")
    numbers = range(given.seed, given.seed + given.times)
    seconds = map(float, given.seconds.split(","))
    asked = product(numbers, given.causes.split(","), seconds, given.serve_on.split(","))
    done = [tuple(line[name] for name in names) for line in read(given.log)]
    with ExitStack() as stack:
        hosts = Hosts(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for case in asked:
            if case in done or (case[1], case[2]) == (HOST_GONE, 5.0):
                continue
            settings = GIVEN | (SERVE_ON if case[3] == "on" else {})
            with ExitStack() as life:
                deployment = TwoHostDeployment(life, hosts, case[0], settings)
                try:
                    line = run(deployment, case[1], case[2], random.Random(str(case)))
                except TimeoutError as exc:  # the machine was too busy for a steady start
                    print(f"{case}: {exc}", file=sys.stderr, flush=True)
                    continue
            note(given.log, dict(zip(names, case, strict=True)) | line)
            short = {name: line[name] for name in ("outages", "ranks", "different", "wrong")}
            print(f"{case}: {short}", file=sys.stderr, flush=True)
    print(table(read(given.log)))


if __name__ == "__main__":
    main()
