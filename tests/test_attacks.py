"""Attacks on a deployment that serves: it runs no foreign code, stays small, and serves right.

An attacker here is a process of this host without the deployment's secret, of another user where
the tests may become one. It reads addresses from ``/proc``: one that scans ports learns as much.
"""

from __future__ import annotations

import os
import pickle
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from telemetry.state.store import StateStore
from tests.support.demo import DemoProcess, StartDemo, events_of
from tests.support.processes import ForkedProcess
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
MB = 2**20
FILLS, FILL_BYTES, MAX_GROWTH_BYTES = 150, 7 * MB, 64 * MB
STRAYS, RANK_DESCRIPTORS = 1500, 256
HALF_SENT, SERVICE_DESCRIPTORS = 1200, 1024
HALF_A_REQUEST = b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"
NOBODY = 65534

Address = tuple[str, int]


class Payload:
    """Unpickled, it creates a file: the code of the attacker that must not run."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._canary),)


def addresses_of(pid: int) -> list[Address]:
    """Addresses at which a process takes TCP connections, as its own machine reaches them."""
    held = set()
    for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(OSError):
            held.add(str(entry.readlink()))
    found = []
    for version in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{version}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                host, port = fields[1].split(":")
                number = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if version == "tcp" else "::"
                known = number if number not in ("0.0.0.0", "::") else "127.0.0.1"
                found.append((known, int(port, 16)))
    return found


def resident_bytes(pids: list[int]) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * resource.getpagesize()


def limited(descriptors: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


def poison_fill_and_connect(pipe: Connection, addresses: list[Address], canary: str) -> None:
    """Write pickles and 1 GB to whatever takes them, then keep more connections than it can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    payload = pickle.dumps(Payload(canary))
    with ExitStack() as stack:
        for host, port in addresses:
            with suppress(RuntimeError):
                store = TCPStore(host, port, timeout=timedelta(seconds=3), wait_for_workers=False)
                for key in store.list_keys():
                    store.set(key, payload)
                for number in range(FILLS):
                    store.set(f"fill-{number}", bytes(FILL_BYTES))
            with suppress(OSError), socket.socket() as end:
                end.settimeout(1.0)
                end.connect((host, port))
                for _ in range(FILLS):
                    end.sendall(bytes(FILL_BYTES))
            for _ in range(STRAYS):
                stray = stack.enter_context(socket.socket())
                stray.setblocking(False)
                stray.connect_ex((host, port))
        pipe.send("connected")
        pipe.recv()


def rebalances(demo: DemoProcess, number: int) -> None:
    demo.sees("rebalances", lambda store: len(events_of(store, "commit")) > number)


def is_another(store: StateStore, run: str) -> bool:
    found = store.current_run()
    return found is not None and found.run != run


@pytest.mark.slow
def test_stranger_at_every_port_of_the_ranks_runs_no_code_and_stops_no_rank(
    tmp_path: Path, start_demo: StartDemo, fork: Callable[..., ForkedProcess]
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, before_exec=limited(RANK_DESCRIPTORS))
    rebalances(demo, 1)
    # The HTTP service takes strangers, within limits that tests of it state.
    others = [pid for pid, title in demo.processes().items() if title != "serve"]
    ranks = [pid for pid, title in demo.processes().items() if title.startswith("rank ")]
    addresses = [address for pid in others for address in addresses_of(pid)]
    assert len(addresses) >= len(ranks) == 4
    canary, before = tmp_path / "code-ran", resident_bytes(ranks)

    stranger = fork(poison_fill_and_connect, addresses, str(canary))
    assert stranger.receive() == "connected"
    assert resident_bytes(ranks) - before <= MAX_GROWTH_BYTES
    rebalances(demo, demo.sees("commits", lambda store: len(events_of(store, "commit"))))
    stranger.send("enough")

    summary = demo.halts_right()
    assert (summary["deaths"], canary.exists()) == (0, False)


@pytest.mark.slow
def test_deployment_recovers_from_a_death_under_half_sent_requests_and_large_bodies(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, before_exec=limited(SERVICE_DESCRIPTORS))
    rebalances(demo, 1)
    (service,) = (pid for pid, title in demo.processes().items() if title == "serve")
    before = resident_bytes([service])
    port = int(demo.url.rpartition(":")[2])
    first = demo.get("/api/v1/state").json()["run"]
    with ExitStack() as stack:
        for _ in range(HALF_SENT):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(OSError):  # the oldest of an address make room for the newest
                end.sendall(HALF_A_REQUEST)
        large = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        large.sendall(HALF_A_REQUEST.replace(b": 20", b": %d" % (100 * MB)))
        assert large.recv(1024).startswith(b"HTTP/1.1 413 ")
        demo.kill("rank 1")
        demo.sees("another run", lambda store: is_another(store, first))
        assert demo.get("/livez").is_success

    assert resident_bytes([service]) - before <= MAX_GROWTH_BYTES
    rebalances(demo, demo.sees("commits", lambda store: len(events_of(store, "commit"))))
    assert demo.halts_right()["deaths"] == 1
