"""Records from the host cache of another host against a plain stream over the same cable.

    python -m benchmarks.migration.other_host FOLDER [--records 8] [--runs 5]

Two network namespaces with a cable between them; needs root. The cable is as fast as the processor,
or tc's token bucket filter limits what the other host sends. Records are DeepSeek-V3's experts
(7168 x 2048, FP8: 44 MB), asked for by one rank, with the default budget and number of readers.
Plain copies by one stream, and by as many streams as there are readers, take turns with it. Seeded.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from benchmarks.migration.preload import DEADLINE_S, HIDDEN, INTERMEDIATE, write_experts
from eplb.core.model import ModelShape
from eplb.errors import RankError
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import NUM_READERS, HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.link.link_settings import SERVING_BYTES_PER_SECOND, HostLinkSettings
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import SharedArena
from tests.support.record_files import make_all
from tests.support.two_hosts import ADDRESSES, INTERFACES, TwoHosts, enter_network

PORT = 23719
SPAWN = multiprocessing.get_context("spawn")
numbers = itertools.count()
MBITS = (1000, 2500, 0)  # of the cable; 0: as fast as the processor
CACHE = "host cache of the other host"


@contextmanager
def process(main: object, *args: object) -> Iterator[Connection]:
    """Run ``main(pipe, *args)`` in a process of its own, from when it is ready on."""
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=main, args=(theirs, *args), daemon=True)  # type: ignore[arg-type]
    child.start()
    theirs.close()
    try:
        if not ours.poll(DEADLINE_S):
            raise RankError(f"the other process is not ready in {DEADLINE_S:.0f} s")
        ours.recv()
        yield ours
    finally:
        child.kill()
        child.join()


# -- the plain copy


def send_plainly(pipe: Connection, address: tuple[str, int], num_bytes: int) -> None:
    """Send so many bytes to every caller."""
    data = memoryview(bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]
    with socket.create_server(address) as listening:
        pipe.send("ready")
        while True:
            caller, _ = listening.accept()
            threading.Thread(target=_send_and_hang_up, args=(caller, data), daemon=True).start()


def _send_and_hang_up(caller: socket.socket, data: memoryview) -> None:
    with caller:
        caller.sendall(data)


def plain_rate(address: tuple[str, int], num_bytes: int, num_streams: int) -> float:
    """GB/s of a copy of ``num_bytes`` on each of some streams, into memory that was used before."""
    arena = SharedArena("plain", num_streams * num_bytes).bytes.fill_(1).numpy()
    parts = [arena[n * num_bytes : (n + 1) * num_bytes].data for n in range(num_streams)]
    threads = [threading.Thread(target=_receive, args=(address, part)) for part in parts]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(arena) / (time.monotonic() - started) / 1e9


def _receive(address: tuple[str, int], into: memoryview) -> None:
    with socket.create_connection(address) as end:
        end.settimeout(DEADLINE_S)
        while len(into):
            count = end.recv_into(into)
            if count == 0:
                raise RankError(f"the sender hung up with {len(into)} bytes to go")
            into = into[count:]


# -- the host caches


@dataclass(frozen=True)
class OtherHost:
    """What both host caches hold, and how the other is reached."""

    weights: Path
    record_file: Path  # complete
    model: ModelShape
    schema: ExpertSchema
    num_readers: int
    links: HostLinkSettings

    def rate(self) -> float:
        """GB/s that a rank sees on a host without a disk.

        The first half of the records is not timed: the second goes where they were, into memory
        that was used before.
        """
        num_experts, size = self.model.num_experts, self.schema.record_bytes
        address = HostCacheAddress(f"asks-{os.getpid()}-{next(numbers)}", os.urandom(16))
        settings = HostCacheSettings(
            "ring", num_experts // 2, num_readers=self.num_readers, links=self.links
        )
        halves = [
            [(0, e) for e in range(num_experts // 2)],
            [(0, e) for e in range(num_experts // 2, 2 * (num_experts // 2))],
        ]
        with (
            closing(
                HostCacheServer.of_checkpoint(address, None, self.model, self.schema, settings)
            ),
            closing(HostCacheClient(address, num_experts, size, deadline_s=DEADLINE_S)) as reader,
        ):
            reader.load(halves[0], deadline_s=DEADLINE_S)
            reader.release(halves[0])
            started = time.monotonic()
            reader.load(halves[1], deadline_s=DEADLINE_S)
            return len(halves[1]) * size / (time.monotonic() - started) / 1e9


def hold_everything(pipe: Connection, host: OtherHost) -> None:
    """Be the other host: a host cache with every record in memory."""
    links = replace(host.links, listen=host.links.hosts[0])
    address = HostCacheAddress(f"holds-{os.getpid()}", os.urandom(16))
    size, num_experts = host.schema.record_bytes, host.model.num_experts
    # From the record file: pages of weights that this process had mapped could not be dropped.
    settings = HostCacheSettings(record_file=host.record_file, links=links)
    host_cache = HostCacheServer.of_checkpoint(
        address, Checkpoint(host.weights), host.model, host.schema, settings
    )
    torch.set_num_threads(1)
    with (
        closing(host_cache),
        closing(HostCacheClient(address, num_experts, size, deadline_s=60)) as reader,
    ):
        reader.load([(0, expert) for expert in range(num_experts)], deadline_s=DEADLINE_S)
        pipe.send("ready")
        pipe.poll(DEADLINE_S)


# -- the hosts, and the table


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
    links = HostLinkSettings(
        ((ADDRESSES[1], PORT),),
        secret=secrets.token_bytes(32),
        bytes_per_second=SERVING_BYTES_PER_SECOND,
        max_transfers=NUM_READERS,
        deadline_s=DEADLINE_S,
    )
    other = OtherHost(weights, records, model, schema, NUM_READERS, links)
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
