"""Records from the host cache of another host against a plain stream over the same cable.

    python -m benchmarks.migration.other_host FOLDER [--records 8] [--runs 5]

Two network namespaces with a cable between them; needs root. The cable is as fast as the processor,
or tc's token bucket filter limits what the other host sends. Records are DeepSeek-V3's experts
(7168 x 2048, FP8: 44 MB), asked for by one rank, with the default budget and number of readers.
Plain copies by one stream, and by as many streams as there are readers, take turns with it. Seeded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.migration.loopback import (
    PORT,
    OtherHost,
    hold_everything,
    plain_rate,
    process,
    send_plainly,
)
from benchmarks.migration.preload import HIDDEN, INTERMEDIATE, write_experts
from eplb.core.model import ModelShape
from rebalance.weights.cache.cache_settings import NUM_READERS
from rebalance.weights.link.link_settings import SERVING_BYTES_PER_SECOND
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from tests.support.record_files import make_all
from tests.support.two_hosts import ADDRESSES, INTERFACES, TwoHosts, enter_network

MBITS = (1000, 2500, 0)  # of the cable; 0: as fast as the processor
CACHE = "host cache of the other host"


def on_network(pipe: Connection, network: str, main: Callable[..., None], *args: object) -> None:
    """Run a main program on another host."""
    enter_network(network)
    main(pipe, *args)


def limit(spaces: TwoHosts, mbit: int) -> None:
    """Set the rate of the cable from the second host on; 0: no limit."""
    qdisc = ["tc", "qdisc"], ["dev", INTERFACES[1], "root"]
    words = [*qdisc[0], "replace", *qdisc[1], "tbf", "rate", f"{mbit}mbit"]
    words += ["burst", "256kb", "latency", "20ms"]
    if not mbit:
        words = [*qdisc[0], "replace", *qdisc[1], "pfifo"]
    subprocess.run(spaces.on(1, words), check=True)


def measure(scratch: Path, num_records: int, num_runs: int) -> None:
    """Print the table."""
    schema = ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)
    model = ModelShape((0,), num_records, 8, hidden=HIDDEN, intermediate=INTERMEDIATE)
    weights, records = scratch / "weights", scratch / "records"
    write_experts(weights, model, schema)
    make_all(Checkpoint(weights), model, schema, records)
    other = OtherHost.on_loopback(weights, records, model, schema, NUM_READERS)
    links = replace(other.links, hosts=((ADDRESSES[1], PORT),))
    other = replace(other, links=links).within(SERVING_BYTES_PER_SECOND)
    to_send = num_records // 2 * schema.record_bytes // NUM_READERS
    plain = (ADDRESSES[1], PORT + 1)
    ways: dict[str, Callable[[], float]] = {
        "1 stream": partial(plain_rate, plain, to_send, 1),
        f"{NUM_READERS} streams": partial(plain_rate, plain, to_send, NUM_READERS),
        CACHE: other.rate,
    }
    with TwoHosts() as spaces:
        spaces.enter(0)
        there = spaces.network(1)
        with (
            process(on_network, there, hold_everything, other),
            process(on_network, there, send_plainly, plain, to_send),
        ):
            names = [*ways, "part of 1 stream", f"part of {NUM_READERS} streams", "load"]
            print(f"| cable | {' | '.join(names)} |\n|---|" + "---:|" * len(names), flush=True)
            for mbit in MBITS:
                limit(spaces, mbit)
                rates = {name: list[float]() for name in ways}
                for _ in range(num_runs):
                    for name, way in ways.items():
                        rates[name].append(way())
                found = [median(rates[name]) for name in ways]
                spread = [f"{min(rates[n]):.2f} to {max(rates[n]):.2f}" for n in ways]
                cells = [f"{m:.2f} ({s})" for m, s in zip(found, spread, strict=True)]
                parts = [f"{found[2] / one:.0%}" for one in found[:2]]
                cable = f"{mbit} Mbit/s" if mbit else "no limit"
                load = f"{os.getloadavg()[0]:.0f}"
                print(f"| {cable} | {' | '.join([*cells, *parts, load])} |", flush=True)


def main() -> None:
    """Measure, and leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="other-host-", dir=given.folder))
    try:
        measure(scratch, given.records, given.runs)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
