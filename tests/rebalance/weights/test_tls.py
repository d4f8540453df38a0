"""TLS of links: certificates that cannot be used, peers that are refused, bytes in both ways."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb.errors import ConfigError, MigrationError
from rebalance.weights.link.link_settings import RankLinkSettings
from rebalance.weights.link.listener import ConnectionListener, listen
from rebalance.weights.link.tls import Certificate, TlsFiles
from rebalance.weights.link.wire import Wire, client_handshake, connect
from rebalance.weights.rank_link import GroupName, OtherRanks, Served, SlotPart, serve_slots
from runtime.experts import ExpertBank, ExpertSchema
from tests.support.certificates import Authority
from tests.support.limits import NEVER_S

SECRET = b"known to the ranks of one deployment"
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.9"
PORT = 23727
SCHEMA = ExpertSchema.swiglu(1024, 768)  # larger than socket buffers
GROUP = GroupName("run", 0)
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Authority:
    return Authority(folder, "stranger")


# -- files


def test_certificate_of_the_authority_and_the_address_is_accepted(ours: Authority) -> None:
    assert ours.issue(HERE).check(HERE).endswith("GMT")
    assert ours.issue(HERE).certificate.check().endswith("GMT")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tls, _: replace(tls, authority=Path("none.pem")), "authority none.pem cannot be"),
        (lambda tls, one: replace(tls, certificate=one), "does not fit certificate"),
        (
            lambda tls, _: replace(tls, authority=tls.certificate.key),
            "expected a PEM file of certificates",
        ),
    ],
)
def test_file_that_cannot_be_used_is_refused(
    ours: Authority, spoil: Callable[[TlsFiles, Certificate], TlsFiles], words: str
) -> None:
    tls, other = ours.issue(HERE), ours.issue(ELSEWHERE)
    mixed = Certificate(tls.certificate.chain, other.certificate.key)

    with pytest.raises(ConfigError, match=words):
        spoil(tls, mixed).check(HERE)


def test_key_that_other_users_can_read_is_refused(ours: Authority) -> None:
    tls = ours.issue("127.0.0.3")
    tls.certificate.key.chmod(0o644)

    with pytest.raises(ConfigError, match=r"has mode 0644, expected one that keeps other users"):
        tls.check("127.0.0.3")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("expired", "the certificate is refused: certificate has expired, expected one for"),
        ("address", f"certificate is not valid for '{ELSEWHERE}'"),
        ("authority", "unable to get local issuer certificate, expected one for 127.0.0.1 that"),
    ],
)
def test_certificate_that_peers_would_refuse_is_refused(
    ours: Authority, theirs: Authority, case: str, words: str
) -> None:
    tls = ours.issue(HERE, expired=case == "expired")
    if case == "authority":
        tls = replace(tls, authority=theirs.file)

    with pytest.raises(ConfigError, match=words):
        tls.check(ELSEWHERE if case == "address" else HERE)


def test_expired_certificate_of_any_authority_is_refused_for_http(ours: Authority) -> None:
    with pytest.raises(ConfigError, match="certificate has expired, expected one that is valid"):
        ours.issue(HERE, expired=True).certificate.check()


# -- connections


@pytest.fixture
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., int]]:
    """Start a listener that sends back what it gets; returns its port."""
    with ExitStack() as stack:

        def start(tls: TlsFiles | None) -> int:
            bound = listen((HERE, 0), "host")
            port = int(bound.getsockname()[1])
            listener = ConnectionListener(
                bound,
                "host",
                "echo-1",
                SECRET,
                hello=dict,
                serve=echo,
                silence_s=NEVER_S,
                handshake_s=NEVER_S,
                tls=tls.server_context() if tls is not None else None,
            )
            stack.callback(listener.close)
            return port

        yield start


def echo(wire: Wire) -> None:
    wire.deadline = time.monotonic() + NEVER_S
    while wire.wait_for_data(NEVER_S):
        wire.send(wire.receive())


def greeted(port: int, tls: TlsFiles | None, silence_s: float = NEVER_S) -> Wire:
    end = connect((HERE, port), silence_s, tls.client_context() if tls is not None else None)
    wire = Wire(end, time.monotonic() + NEVER_S, silence_s)
    try:
        client_handshake(wire, SECRET, protocol="echo-1")
    except BaseException:
        wire.close()
        raise
    return wire


def test_messages_pass_and_a_connection_shows_whether_one_waits(
    listening: Callable[..., int], ours: Authority
) -> None:
    tls = ours.issue(HERE)

    with closing(greeted(listening(tls), tls)) as wire:
        assert not wire.is_readable()  # no ticket of a TLS session is under way
        for number in range(3):
            wire.send({"number": number, "more": "x" * 100_000})
            assert wire.wait_for_data(NEVER_S)
            assert wire.receive()["number"] == number
        assert not wire.is_readable()


def test_peer_that_is_not_of_the_deployment_is_refused_with_the_reason(
    listening: Callable[..., int],
    ours: Authority,
    theirs: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = ours.issue(HERE)
    stranger = replace(theirs.issue(HERE), authority=ours.file)  # it accepts ours
    port = listening(good)

    with pytest.raises(MigrationError, match=r"connection failed: the other side refused the cert"):
        greeted(port, stranger)
    with pytest.raises(MigrationError, match=r"connection failed: the other side refused the cert"):
        greeted(port, ours.issue(HERE, expired=True))
    for wrong, words in (
        (theirs.issue(HERE), "self-signed certificate in certificate chain"),
        (ours.issue(HERE, expired=True), "certificate has expired"),
        (ours.issue(ELSEWHERE), f"certificate is not valid for '{HERE}'"),
    ):
        at = listening(wrong)
        with pytest.raises(MigrationError, match=f"TLS handshake with .*{words}, expected TLS"):
            greeted(at, good)

    assert "certificate is refused: certificate has expired" in caplog.text


def test_side_without_tls_is_refused(listening: Callable[..., int], ours: Authority) -> None:
    tls = ours.issue(HERE)

    with pytest.raises(MigrationError, match="the other side does not use TLS"):
        greeted(listening(None), tls)
    with pytest.raises(MigrationError, match=r"no bytes transferred within 0\.5 s"):
        greeted(listening(tls), None, silence_s=0.5)


def test_both_directions_of_one_connection_carry_bytes_at_once(ours: Authority) -> None:
    tls, size = ours.issue(HERE), 8 * 2**20
    sent = [np.random.default_rng(seed).bytes(size) for seed in (1, 2)]
    with socket.create_server((HERE, 0)) as bound:
        accepted: list[socket.socket] = []

        def accept() -> None:
            one, _ = bound.accept()
            accepted.append(tls.server_context().wrap_socket(one, server_side=True))

        accepting = threading.Thread(target=accept)
        accepting.start()
        asks = connect(bound.getsockname()[:2], NEVER_S, tls.client_context())
        accepting.join()
    with asks, accepted[0]:
        wires = [Wire(end, time.monotonic() + NEVER_S, NEVER_S) for end in (asks, accepted[0])]
        found = [bytearray(size), bytearray(size)]
        work = [
            threading.Thread(target=wires[end].send_bytes, args=(memoryview(sent[end]),))
            for end in (0, 1)
        ] + [
            threading.Thread(target=wires[end].receive_bytes, args=(memoryview(found[1 - end]),))
            for end in (0, 1)
        ]
        for one in work:
            one.start()
        for one in work:
            one.join()

    assert [bytes(one) for one in found] == sent


# -- ranks


def test_live_slot_is_read_over_tls_and_is_not_in_clear_on_the_network(ours: Authority) -> None:
    pid = os.getpid()
    addresses = tuple(
        (f"127.{1 + pid % 250}.{1 + pid // 250 % 250}.{next(numbers)}", PORT) for _ in range(3)
    )
    tls = ours.issue(*(host for host, _ in addresses))
    settings = RankLinkSettings(
        addresses[:2], secret=SECRET, silence_s=NEVER_S, deadline_s=NEVER_S, tls=tls
    )
    bank = ExpertBank(SCHEMA, 1, 1, num_staging=0)
    record = torch.arange(SCHEMA.record_bytes // 4, dtype=torch.int32).view(torch.uint8)
    bank.live(0, 0).copy_(record)
    served = Served(np.array([[5]], dtype=np.int32), 0, is_open=True)
    seen = bytearray()
    with ExitStack() as stack:
        server = serve_slots(settings, 1, GROUP, bank, lambda: served)
        stack.callback(server.close)
        relay = stack.enter_context(socket.create_server(addresses[2]))
        threading.Thread(target=relayed, args=(relay, addresses[1], seen), daemon=True).start()
        through = replace(settings, addresses=(addresses[0], addresses[2]))
        asks = OtherRanks(through, 0, GROUP, SCHEMA.record_bytes)
        stack.callback(asks.close)
        into = torch.zeros(SCHEMA.record_bytes, dtype=torch.uint8)

        for _ in range(2):  # the second time over the connection that was kept
            into.zero_()
            assert asks.fetch(1, SlotPart(0, 0, 0, 5, 0, SCHEMA.record_bytes), into).is_complete()
            assert torch.equal(into, record)

    assert len(seen) > 2 * SCHEMA.record_bytes
    assert record[4096:4160].numpy().tobytes() not in seen
    assert b"protocol" not in seen


def relayed(listening: socket.socket, to: tuple[str, int], seen: bytearray) -> None:
    """Pass one connection on, and keep what the server sends."""
    asker, _ = listening.accept()
    with asker, socket.create_connection(to) as server:

        def forth() -> None:
            while said := asker.recv(2**16):
                server.sendall(said)

        threading.Thread(target=forth, daemon=True).start()
        while said := server.recv(2**16):
            seen.extend(said)
            asker.sendall(said)
