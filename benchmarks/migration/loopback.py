"""Another host over loopback TCP, measured: its host cache as a source against a plain copy.

Used by ``preload.py``. The other host is a process of its own, which holds every record in memory.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.errors import RankError
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.link.link_settings import HostLinkSettings
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import SharedArena

DEADLINE_S = 600.0
PORT = 23719
SPAWN = multiprocessing.get_context("spawn")
numbers = itertools.count()


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


# -- the other host


@dataclass(frozen=True)
class OtherHost:
    """What both host caches hold, and how the other is reached."""

    weights: Path
    record_file: Path  # complete
    model: ModelShape
    schema: ExpertSchema
    num_readers: int
    links: HostLinkSettings

    @staticmethod
    def on_loopback(
        weights: Path,
        record_file: Path,
        model: ModelShape,
        schema: ExpertSchema,
        num_readers: int,
    ) -> OtherHost:
        """An address that nobody else has, and no budget."""
        door = (f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}.1", PORT)
        links = HostLinkSettings(
            (door,),
            secret=secrets.token_bytes(32),
            bytes_per_second=math.inf,
            max_transfers=num_readers,
            deadline_s=DEADLINE_S,
        )
        return OtherHost(weights, record_file, model, schema, num_readers, links)

    def within(self, bytes_per_second: float) -> OtherHost:
        """The same with a budget, which the asker keeps."""
        return replace(self, links=replace(self.links, bytes_per_second=bytes_per_second))

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
