"""Who gets a session at the host weight cache's socket: any process of the machine reaches it."""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from eplb.core.model import ModelShape
from eplb.errors import MigrationError
from rebalance.weights.cache.address import HostCacheAddress, listen
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.link import local
from rebalance.weights.link.listener import ConnectionListener
from rebalance.weights.link.local import (
    MAX_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_OF_PROCESS,
    LocalAdmission,
    Peer,
)
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from tests.support.limits import NEVER_S

FORK = multiprocessing.get_context("fork")
NOBODY = 65534
FLOOD = 1500
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(2 * MAX_UNAUTHENTICATED)]
        for pair in made:
            for end in pair:
                stack.enter_context(end)
        yield made


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> list[Peer]:
    """Peers of the clients that are admitted, by turns: one test process cannot be many."""
    given: list[Peer] = []
    monkeypatch.setattr(local, "peer_of", lambda end: given.pop(0))
    return given


@pytest.fixture
def admission() -> LocalAdmission:
    return LocalAdmission()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return bool(end.recv(1))
    except BlockingIOError:
        return True


def is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


def test_process_with_unproven_connections_is_refused_until_it_proves_one(
    admission: LocalAdmission,
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    for client, _ in pairs[:MAX_UNAUTHENTICATED_OF_PROCESS]:
        assert admission.admit(client)

    assert not admission.admit(pairs[-1][0])
    admission.authenticated(pairs[0][0])
    assert admission.admit(pairs[-1][0])
    admission.leave(pairs[1][0], "")
    assert admission.admit(pairs[-2][0])


def test_full_of_unproven_evicts_the_oldest_of_the_process_with_most(
    admission: LocalAdmission,
    pairs: list[tuple[socket.socket, socket.socket]],
    peers: list[Peer],
) -> None:
    own = os.geteuid()
    peers.append(Peer(1, own))  # a rank in the middle of its handshake
    assert admission.admit(pairs[0][0])
    for number in range(1, 2 * MAX_UNAUTHENTICATED):
        peers.append(Peer(2 + (number - 1) // MAX_UNAUTHENTICATED_OF_PROCESS, own))
        assert admission.admit(pairs[number][0])

    assert is_open(pairs[0][1])
    assert sum(is_open(outer) for _, outer in pairs) == MAX_UNAUTHENTICATED
    assert not is_open(pairs[1][1])


@pytest.mark.parametrize("byte_s", [None, 0.1])
def test_client_that_proves_nothing_is_closed_at_the_deadline(
    byte_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    address = HostCacheAddress(f"test-{os.getpid()}-deadline", b"key")
    listener = ConnectionListener(
        listen(address),
        "rank",
        "test-1",
        b"key",
        hello=dict,
        serve=lambda wire: None,
        silence_s=0.5,
    )
    with closing(listener), socket.socket(socket.AF_UNIX) as slow:
        slow.connect(address.socket)
        assert b"nonce" in slow.recv(1024)
        slow.sendall(struct.pack("!I", 100))
        while not select.select([slow], [], [], byte_s)[0]:
            with suppress(BrokenPipeError):  # closed meanwhile, which the next turn finds
                slow.sendall(b" ")

        assert is_closed(slow)
    assert "refused process" in caplog.text


def test_client_of_another_user_is_refused(
    admission: LocalAdmission,
    pairs: list[tuple[socket.socket, socket.socket]],
    peers: list[Peer],
) -> None:
    peers += [Peer(1, os.geteuid() + 1), Peer(2, 0)]

    assert not admission.admit(pairs[0][0])
    assert admission.admit(pairs[1][0])


@pytest.fixture
def address(
    small_checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> Iterator[HostCacheAddress]:
    address = HostCacheAddress(f"test-{os.getpid()}-admission", os.urandom(16))
    with closing(
        HostCacheServer.of_checkpoint(address, small_checkpoint, small_model, small_schema)
    ):
        yield address


def as_nobody(connects: int, address: str) -> list[bool]:
    """Whether each of a stranger's connections was closed by the other side before it spoke."""
    ours, theirs = FORK.Pipe(duplex=False)

    def run() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        found = []
        for _ in range(connects):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(address)
                stranger.settimeout(None)
                try:
                    found.append(stranger.recv(1) == b"")
                except ConnectionResetError:
                    found.append(True)
        theirs.send(found)
        os._exit(0)

    process = FORK.Process(target=run, daemon=True)
    process.start()
    closed: list[bool] = ours.recv()
    process.join()
    return closed


@pytest.mark.system
@needs_root
def test_host_cache_closes_another_user_before_a_challenge(address: HostCacheAddress) -> None:
    assert all(as_nobody(100, address.socket))


@pytest.mark.system
def test_flood_of_one_process_leaves_the_host_cache_open_to_a_rank(
    address: HostCacheAddress, small_schema: ExpertSchema
) -> None:
    ours, theirs = FORK.Pipe()

    def flood() -> None:
        held = []
        for _ in range(FLOOD):
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].connect(address.socket)  # blocking: waits for room among those not accepted
            held[-1].settimeout(None)
        theirs.send(sum(not is_closed(end) for end in held[-FLOOD + MAX_UNAUTHENTICATED :]))
        theirs.recv()
        os._exit(0)

    before = num_descriptors()
    process = FORK.Process(target=flood, daemon=True)
    process.start()
    assert ours.recv() == 0  # of those beyond the first ones none is held open
    reader = HostCacheClient(address, 8, small_schema.record_bytes, deadline_s=NEVER_S)
    reader.load([(0, 0)], deadline_s=NEVER_S)

    assert num_descriptors() <= before + 8 * MAX_UNAUTHENTICATED_OF_PROCESS
    reader.close()
    ours.send("end")
    process.join()


@pytest.mark.system
@needs_root
def test_reader_rejects_a_name_that_another_user_listens_under(tmp_path: Path) -> None:
    address = HostCacheAddress(f"test-{os.getpid()}-squatted", b"key")
    ours, theirs = FORK.Pipe()

    def squat() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with listen(address):
            theirs.send("listening")
            theirs.recv()
        os._exit(0)

    process = FORK.Process(target=squat, daemon=True)
    process.start()
    assert ours.recv() == "listening"
    with pytest.raises(MigrationError, match=f"user {NOBODY} listens at its address"):
        HostCacheClient(address, 8, 4096, deadline_s=NEVER_S)
    ours.send("end")
    process.join()
