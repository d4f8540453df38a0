"""How late heartbeats come between ranks that are busy: what silence may count as a death.

    python -m benchmarks.faults.beats [--ranks 8] [--minutes 10] [--busy 12]

Each rank is a process that computes small products and works in Python, as a serving one does,
beside its thread of liveness connections. Further processes keep the machine busy. No rank stops,
so each gap between two beats is time that a default must exceed. A beat is due every INTERVAL_S.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import torch

from rebalance.protocol.heartbeats import BEATS, Heartbeats
from rebalance.protocol.liveness import Address, LivenessConnections

INTERVAL_S = 0.4
LIMITS_S = (0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
FORK = multiprocessing.get_context("fork")


class TimedBeats(Heartbeats):
    """Notes the gaps between the beats of each neighbour, and takes nobody for dead."""

    gaps: list[float]
    last: dict[int, float]

    def heard(self, rank: int, now: float) -> None:
        """Note a beat of a rank."""
        if rank in self.last:
            self.gaps.append(now - self.last[rank])
        self.last[rank] = now

    def silent(self, now: float) -> frozenset[int]:
        """Nobody."""
        return frozenset()


def serve(rank: int, pipe: Connection, seconds: float) -> None:
    """Be a busy rank; sends its address, and at the end its gaps."""
    torch.set_num_threads(1)

    def exchange(mine: Address) -> list[Address]:
        pipe.send(mine)
        addresses: list[Address] = pipe.recv()
        return addresses

    lines = LivenessConnections(rank, exchange, silence_s=BEATS * INTERVAL_S)
    beats = lines._beats
    beats.__class__ = TimedBeats
    assert isinstance(beats, TimedBeats), "it was made so"
    beats.gaps, beats.last = [], {}
    lines.begin_beats()
    until, work = time.monotonic() + seconds, torch.rand(64, 64)
    while time.monotonic() < until:
        for _ in range(20):
            work = torch.tanh(work @ work.T)
        sum(number * number for number in range(20_000))
    pipe.send(list(beats.gaps))
    pipe.recv()  # the others are done too
    lines.close()


def keep_busy() -> None:
    """Use a core."""
    while True:
        sum(number * number for number in range(100_000))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--busy", type=int, default=12, help="further processes that use a core")
    given = parser.parse_args()
    others = [FORK.Process(target=keep_busy, daemon=True) for _ in range(given.busy)]
    pipes, ranks = list[Connection](), list[multiprocessing.process.BaseProcess]()
    for rank in range(given.ranks):
        ours, theirs = FORK.Pipe()
        ranks.append(FORK.Process(target=serve, args=(rank, theirs, 60 * given.minutes)))
        pipes.append(ours)
    for process in (*others, *ranks):
        process.start()
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    loads = list[float]()
    while not pipes[0].poll(10.0):
        loads.append(os.getloadavg()[0])
    gaps = sorted(gap for pipe in pipes for gap in pipe.recv())
    for pipe in pipes:
        pipe.send("end")
    for process in others:
        process.kill()
    for process in ranks:
        process.join()
    print(f"{len(gaps)} gaps of {given.ranks} ranks, a beat every {INTERVAL_S} s")
    print(f"load {min(loads):.1f} to {max(loads):.1f}, mean {sum(loads) / len(loads):.1f}")
    print("| p50 | p99 | p99.99 | largest | " + " | ".join(f"> {one} s" for one in LIMITS_S) + " |")
    print("|" + "---:|" * (4 + len(LIMITS_S)))
    parts = [gaps[min(len(gaps) - 1, int(part * len(gaps)))] for part in (0.5, 0.99, 0.9999, 1.0)]
    counts = [sum(gap > limit for gap in gaps) for limit in LIMITS_S]
    print("| " + " | ".join([f"{one:.3f}" for one in parts] + list(map(str, counts))) + " |")


if __name__ == "__main__":
    main()
