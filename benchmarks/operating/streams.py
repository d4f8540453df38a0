"""1,000 clients of the event stream, some of which read nothing, beside a controller's turns.

    python -m benchmarks.operating.streams [--clients 1000] [--slow 50] [--seconds 60]

Service, clients and controller are three processes on one SQLite store. The controller takes a turn
each second on a window of 58 x 256 experts from 32 ranks; its turns are timed before the first
client, while all are connected, and when they have gone. Events are written four times a second; a
slow client has a receive buffer of 4 kB and stops reading after its first bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import sys
import tempfile
import time
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from api.http.app import create_app
from api.http.limits import HttpLimits
from api.http.server import HttpService
from benchmarks.controller import turn
from benchmarks.controller.loads import drifting
from eplb.core.topology import Topology
from eplb.planner import plan
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry import open_store
from telemetry.store import LoadStore

RANKS, EVENTS_PER_S, DEADLINE_S = 32, 4, 120.0
PATH = "/api/v1/events/stream"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=50, help="clients that read nothing, of these")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument("--event-bytes", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (16 * given.clients + 1024,) * 2)
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:{Path(folder) / 'store.sqlite'}"
        with closing(open_store(url, "streams")) as store:
            controlled = Controlled(store, given.seed)
            alone = controlled.turns(given.seconds, given.event_bytes)
            to_service, of_service = spawn.Pipe()
            service = spawn.Process(
                target=serve, args=(url, given.clients, of_service), daemon=True
            )
            service.start()
            base = received(to_service, "the service")
            to_clients, of_clients = spawn.Pipe()
            asked = (base, given.clients, given.slow, of_clients)
            clients = spawn.Process(target=connect, args=asked, daemon=True)
            clients.start()
            received(to_clients, "the connections")
            begun, busy = time.perf_counter(), turn.server_seconds(service.pid)
            beside = controlled.turns(given.seconds, given.event_bytes)
            took, busy = time.perf_counter() - begun, turn.server_seconds(service.pid) - busy
            to_clients.send("end")
            delays, missed, num_closed = received(to_clients, "the clients")
            to_service.send("end")
            peak_mb = received(to_service, "the end of the service")
            after = controlled.turns(given.seconds, given.event_bytes)
    print(
        f"python {sys.version.split()[0]}, {os.cpu_count()} cores, {took:.0f} s, seed {given.seed}"
    )
    print("| turns | number | wall ms: median | p99 | processor ms: median | p99 |")
    print("|---|---|---|---|---|---|")
    parts = (("before", alone), (f"{given.clients} clients", beside), ("after", after))
    for name, times in parts:
        # Median and p99, of wall-clock and of processor time.
        wall, cpu = np.quantile(times, [0.5, 0.99], axis=0).T * 1e3
        figures = " | ".join(f"{one:.1f}" for one in (*wall, *cpu))
        print(f"| {name} | {len(times)} | {figures} |")
    p50, p99 = np.quantile(delays, [0.5, 0.99]) * 1e3
    print(
        f"{len(delays)} events read, {missed} missed by clients that read; from the event to the "
        f"client {p50:.0f} ms median, {p99:.0f} ms p99\n"
        f"{num_closed} of {given.slow} slow clients disconnected by the service; service: "
        f"{100 * busy / took:.0f} % of a core, peak memory {peak_mb:.0f} MB"
    )


class Controlled:
    """A deployment of which this process is the controller and all ranks."""

    def __init__(self, store: LoadStore, seed: int) -> None:
        tokens = turn.WINDOW_STEPS * RANKS * 128
        self._load = drifting(seed, 64, turn.LAYERS, turn.EXPERTS, tokens=tokens)
        topology = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=9)
        first = plan(self._load[0], topology, model=turn.MODEL, policy="contiguous").target
        self._ranks = turn.Ranks(store, topology, first.with_generation(0))
        self._store, self._window = store, 0
        self._controller = Controller(store, ControllerSettings())
        self._step()

    def turns(self, seconds: float, event_bytes: int) -> NDArray[np.float64]:
        """Wall-clock and processor seconds of each turn, [turns, 2]: one a second."""
        took, begun = [], time.perf_counter()
        next_event, text = begun, "x" * event_bytes
        while (now := time.perf_counter()) < begun + seconds:
            took.append(self._step())
            while time.perf_counter() < now + 1.0:
                if time.perf_counter() >= next_event:
                    self._store.add_event("note", {"sent": time.time(), "text": text})
                    next_event += 1 / EVENTS_PER_S
                time.sleep(0.005)
        return np.array(took)

    def _step(self) -> tuple[float, float]:
        self._ranks.serve(self._load[self._window % len(self._load)])
        self._window += 1
        wall, cpu = time.perf_counter(), time.thread_time()
        self._controller.turn()
        return time.perf_counter() - wall, time.thread_time() - cpu


def serve(url: str, clients: int, pipe: Connection) -> None:
    """Run the service until the parent process ends it."""
    # One address may have half of the connections.
    limits = HttpLimits(max_connections=2 * clients + 128, max_streams=clients)
    with closing(open_store(url, "streams")) as store:
        service = HttpService(create_app(store, limits=limits, is_watching=True), limits=limits)
        service.start()
        pipe.send(service.url)
        received(pipe, "the end", DEADLINE_S * 10)
        service.stop()
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def connect(base: str, clients: int, slow: int, pipe: Connection) -> None:
    """Connect all clients, and read until the parent process ends them."""
    delays, missed, num_closed = asyncio.run(read_all(base, clients, slow, pipe))
    pipe.send((np.array(delays), missed, num_closed))


async def read_all(
    base: str, clients: int, slow: int, pipe: Connection
) -> tuple[list[float], int, int]:
    """Ages of events at their arrival, in seconds; losses; slow clients that were disconnected."""
    host, port = base.removeprefix("http://").split(":")
    delays: list[float] = []
    missed, streams = [0], []
    for number in range(clients):
        one = socket.socket()
        one.settimeout(DEADLINE_S)
        if number < slow:  # before it connects: the window that it offers stays small
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((host, int(port)))
        one.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await asyncio.to_thread(one.recv, 15) == b"HTTP/1.1 200 OK"
        streams.append(one)
    reading, writers = [], []
    for one in streams[slow:]:
        one.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=one)
        writers.append(writer)  # a writer that nobody holds closes its connection
        reading.append(asyncio.create_task(read(reader, delays, missed)))
    pipe.send("connected")
    await asyncio.to_thread(received, pipe, "the end", DEADLINE_S * 10)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return delays, missed[0], sum(map(is_closed, streams[:slow]))


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has closed a connection; what it sent before is thrown away."""
    one.setblocking(False)
    try:
        while one.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


async def read(reader: asyncio.StreamReader, delays: list[float], missed: list[int]) -> None:
    """Note how old each event is when it arrives, and how many streams lost some."""
    async for line in reader:
        if line.startswith(b"event: missed"):
            missed[0] += 1
        elif line.startswith(b"data: ") and b'"sent"' in line:
            delays.append(time.time() - json.loads(line[6:])["detail"]["sent"])


def received(pipe: Connection, what: str, deadline_s: float = DEADLINE_S) -> object:
    """Receive from another process.

    Raises:
        TimeoutError: nothing came in time.
    """
    if not pipe.poll(deadline_s):
        raise TimeoutError(f"waited {deadline_s:.0f} s for {what}")
    return pipe.recv()


if __name__ == "__main__":
    main()
