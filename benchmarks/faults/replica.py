"""Kills the Redis of two hosts while experts move; its replica on the other host takes over.

    python -m benchmarks.faults.replica [--times 5] [--lags 0,1,5] [--seed 1] [--json FILE]

Two network namespaces with two ranks each (``deployments``; needs root). Redis and its
replica are on different hosts; the store's URL has a third address, which moves to the replica's
host when that takes over, TAKE_OVER_S after the kill. With a lag the replica stops following so
long before the kill: what it then lacks was acknowledged and is lost. ``safe``: the same with
``min-replicas-to-write 1`` on the primary, which then acknowledges nothing that the replica lacks.

Counted are generations that were committed and are lost, samples that ranks cut and no store has,
and seconds until a later generation is committed that all ranks hold.
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
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from benchmarks.faults.deployments import ANY_ADDRESS, Hosts, TwoHostDeployment
from benchmarks.faults.hosts_soak import GIVEN, samples
from benchmarks.faults.injected import generation_of
from benchmarks.faults.observing import gaps
from benchmarks.faults.paced_engine import different_maps, served_in
from benchmarks.faults.partitions import wait
from telemetry import open_store
from telemetry.state.redis_address import parse_address
from telemetry.state.redis_link import RedisLink
from tests.support.redis_servers import RedisProcess
from tests.support.two_hosts import ADDRESSES, INTERFACES

MOVING = "10.0.0.100"  # the address in the URL of the store
TAKE_OVER_S = 2.0  # from the kill to the promotion: what notices it takes so long
MOVES_S, END_S, LINKED_S = 90.0, 120.0, 10.0
NAMES = (
    "lag",
    "safe",
    "load",
    "lost generations",
    "lost samples",
    "cut",
    "no token",
    "moves after",
)
NAMES += ("different maps", "wrong", "checks")


def ask(address: str, *words: str) -> Any:
    """Ask a Redis."""
    with closing(RedisLink(parse_address(address))) as link:
        return link.ask("", *words)


def run(stack: ExitStack, hosts: Hosts, lag_s: float, is_safe: bool, seed: int) -> dict[str, Any]:
    """One life with one take-over; returns its row."""
    hosts.run(0, "ip", "address", "add", f"{MOVING}/24", "dev", INTERFACES[0])
    deployment = TwoHostDeployment(stack, hosts, seed, GIVEN, MOVING)
    primary, port = deployment.redis, deployment.redis.port
    replica = RedisProcess(
        hosts.folder / "replica",
        ANY_ADDRESS | {"port": str(port)},
        lambda words: hosts.on(1, words),
    )
    stack.callback(replica.kill)
    of_replica, of_primary = f"redis://{ADDRESSES[1]}:{port}", f"redis://{ADDRESSES[0]}:{port}"

    ask(of_replica, "REPLICAOF", ADDRESSES[0], str(port))

    def is_linked() -> bool:
        return ask(of_replica, "INFO").get("master_link_status") == "up"

    if not wait(deployment, is_linked, LINKED_S):
        raise TimeoutError(f"the replica was not in step within {LINKED_S:g} s")
    if is_safe:
        ask(of_primary, "CONFIG SET", "min-replicas-to-write", "1")
    deployment.until_steady()
    Event().wait(random.Random(f"{seed} {lag_s}").uniform(0.0, 2.0))
    load = os.getloadavg()[0]
    if lag_s:
        ask(of_replica, "REPLICAOF", "NO", "ONE")
        Event().wait(lag_s)
    with closing(deployment.deployment.opened_store()) as store:
        before = generation_of(store)
        begun = time.monotonic()
        primary.kill()
    Event().wait(TAKE_OVER_S)
    ask(of_replica, "REPLICAOF", "NO", "ONE")
    with closing(open_store(of_replica, deployment.deployment.name)) as store:
        after = generation_of(store)  # nobody else reaches it yet
    hosts.run(0, "ip", "address", "del", f"{MOVING}/24", "dev", INTERFACES[0])
    hosts.run(1, "ip", "address", "add", f"{MOVING}/24", "dev", INTERFACES[1])
    hosts.run(0, "ip", "neigh", "flush", "dev", INTERFACES[0])
    try:
        return measured(deployment, begun, before, after) | {
            "lag": lag_s,
            "safe": is_safe,
            "load": load,
        }
    finally:
        hosts.run(1, "ip", "address", "del", f"{MOVING}/24", "dev", INTERFACES[1])


def measured(
    deployment: TwoHostDeployment, begun: float, before: int, after: int
) -> dict[str, Any]:
    """See what serves and moves after a take-over, and what the store lacks in the end.

    Args:
        deployment: whose store has moved.
        begun: when the primary was killed.
        before: generation that it had acknowledged.
        after: generation that the replica had.
    """
    with closing(deployment.deployment.opened_store()) as store:

        def has_moved() -> bool:
            current, last = store.current_run(), generation_of(store)
            if current is None or last <= max(before, after):
                return False
            return {one.generation for one in store.rank_states(current.run)} == {last}

        is_moved = wait(deployment, has_moved, MOVES_S)
        ended = time.monotonic()
        events = [
            (one.kind, str(one.detail.get("reason", ""))[:160]) for one in store.latest_events()
        ]
        frozen = [one.frozen for one in store.rank_states(store.current_run().run) if one.frozen]
    outages = gaps(deployment.tokens(), begun, ended, 0.0)
    state = deployment.get("/api/v1/state").json()
    deployment.read_checks()
    for host in (1, 0):
        launcher = deployment.processes[f"launch-{host}"].process
        assert launcher is not None, "it was up"
        if host == 1:
            launcher.terminate()
        launcher.wait(END_S)
    cut, taken, _ = samples(deployment)
    return {
        "lost generations": before - after,
        "lost samples": cut - taken,
        "cut": cut,
        "no token": round(max(b - a for a, b in outages), 2),
        "moves after": round(ended - begun, 1) if is_moved else None,
        "different maps": len(different_maps(served_in(deployment.hosts.tokens))),
        "wrong": deployment.num_wrong(),
        "checks": len(deployment.checks),
        "events": events[:12],
        "frozen": frozen,
        "told": {name: state.get(name) for name in ("verdict", "reason", "samples_lost")},
    }


def main() -> None:
    """Run the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--lags", default="0,1,5")
    parser.add_argument("--safe", action="store_true", help="with min-replicas-to-write 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = list[dict[str, Any]]()
    print("| " + " | ".join(NAMES) + " |")
    print("|" + "---:|" * len(NAMES), flush=True)
    with ExitStack() as stack:
        hosts = Hosts(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for lag_s in map(float, given.lags.split(",")):
            for number in range(given.times):
                with ExitStack() as life:
                    rows.append(run(life, hosts, lag_s, given.safe, given.seed + number))
                print("| " + " | ".join(f"{rows[-1][name]}" for name in NAMES) + " |", flush=True)
                if given.json is not None:
                    given.json.write_text(json.dumps(rows))
    moves = [row["moves after"] for row in rows if row["moves after"] is not None]
    print(f"experts move again in {len(moves)} of {len(rows)}, after {median(moves)} s at p50")


if __name__ == "__main__":
    main()
