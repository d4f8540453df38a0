"""What a listener and a client accept from each other before either has proved the secret."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from eplb.errors import MigrationError
from rebalance.weights.link.listener import MAX_CLIENTS, ConnectionListener, listen
from rebalance.weights.link.wire import (
    MAX_PROOF_BYTES,
    DisconnectedError,
    Message,
    RefusedError,
    Wire,
    client_handshake,
    connect,
)
from tests.support.limits import NEVER_S

SECRET, PROTOCOL = b"secret", "test-1"
DEEP = b"[" * MAX_PROOF_BYTES
DEEPER = b"[" * 100_000


def framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()[:2]
    listener = ConnectionListener(
        listen(address, "rank"),
        "rank",
        PROTOCOL,
        SECRET,
        hello=lambda: {"rank": 7},
        serve=lambda wire: None,
        silence_s=NEVER_S,
        handshake_s=NEVER_S,
    )
    yield address
    listener.close()


def greeted(address: tuple[str, int], protocol: str = PROTOCOL, secret: bytes = SECRET) -> object:
    with closing(connect(address, NEVER_S)) as end:
        wire = Wire(end, time.monotonic() + NEVER_S, NEVER_S)
        return client_handshake(wire, secret, protocol=protocol)["rank"]


def test_client_with_another_secret_is_refused_and_others_are_served(
    address: tuple[str, int],
) -> None:
    with pytest.raises(MigrationError, match="the secrets differ"):
        greeted(address, secret=b"found on a street corner")

    assert greeted(address) == 7


def test_clients_beyond_the_limit_are_refused_with_a_reason(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CLIENTS):
            silent = stack.enter_context(closing(connect(address, NEVER_S)))
            assert silent.recv(1), "it was not greeted"

        with pytest.raises(RefusedError, match=f"{MAX_CLIENTS} clients"):
            greeted(address)


def test_client_of_another_protocol_version_is_refused(address: tuple[str, int]) -> None:
    with pytest.raises(MigrationError, match="'test-1', expected 'test-2'"):
        greeted(address, "test-2")


def test_client_refuses_its_own_proof_from_a_server_without_the_secret() -> None:
    ends = socket.socketpair()
    client, false = (Wire(end, time.monotonic() + NEVER_S, NEVER_S) for end in ends)

    def send_back() -> None:
        false.send({"protocol": PROTOCOL, "nonce": "0"})
        false.send(false.receive() | {"rank": 7})

    mirror = threading.Thread(target=send_back)
    mirror.start()
    with closing(client), closing(false):
        with pytest.raises(MigrationError):
            client_handshake(client, SECRET, protocol=PROTOCOL)
        mirror.join()


def test_wire_receives_while_another_thread_sends() -> None:
    ends = socket.socketpair()
    left, right = (Wire(end, time.monotonic() + NEVER_S, NEVER_S) for end in ends)
    received: list[Message] = []
    reader = threading.Thread(target=lambda: received.append(left.receive()))
    reader.start()
    left.send({"from": "left"})
    assert right.receive() == {"from": "left"}
    right.send({"from": "right"})
    reader.join()
    left.close()

    assert received == [{"from": "right"}]
    assert not right.wait_for_data(NEVER_S)
    with pytest.raises(DisconnectedError):
        right.receive()
    right.close()


@pytest.mark.parametrize("text", [DEEP, DEEPER, b'{"a":' * 90, b"1" * 5000, b"\xff\xfe[\0"])
def test_listener_closes_on_a_hostile_frame_before_the_secret_and_serves_on(
    address: tuple[str, int], text: bytes
) -> None:
    with closing(connect(address, NEVER_S)) as stranger:
        stranger.sendall(framed(text))
        with suppress(OSError):  # the listener may have closed the connection by now
            stranger.shutdown(socket.SHUT_WR)
        with stranger.makefile("rb") as said:
            try:
                answer = said.read()
            except ConnectionResetError:  # it closed before it had read all of the frame
                answer = b""

    assert b"rank" not in answer  # only the nonce; an uncaught error in its thread fails this test
    assert greeted(address) == 7


def test_listener_reads_no_frame_above_the_size_of_a_proof(address: tuple[str, int]) -> None:
    with closing(connect(address, NEVER_S)) as stranger:
        stranger.sendall(struct.pack("!I", MAX_PROOF_BYTES + 1))  # and none of its bytes
        stranger.settimeout(None)
        with stranger.makefile("rb") as said:
            nonce = said.read()  # to the end: it closed without waiting for the frame

    assert json.loads(nonce[4:]).keys() == {"protocol", "nonce"}


@pytest.mark.parametrize("text", [DEEP, DEEPER, b"{}", b'{"protocol": "test-1"}'])
@pytest.mark.parametrize("turn", ["first", "second"])
def test_client_rejects_a_hostile_frame_of_a_false_listener(turn: str, text: bytes) -> None:
    hello = json.dumps({"protocol": PROTOCOL, "nonce": "0"}).encode()
    words = framed(text) if turn == "first" else framed(hello) + framed(text)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = connect(listening.getsockname()[:2], NEVER_S)
        false, _ = listening.accept()
    with false, client:
        false.sendall(words)
        false.shutdown(socket.SHUT_WR)
        with pytest.raises(MigrationError):
            client_handshake(
                Wire(client, time.monotonic() + NEVER_S, NEVER_S), SECRET, protocol=PROTOCOL
            )
