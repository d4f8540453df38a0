"""Another host as a source: host caches that share only a secret and a network, hurt on purpose."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError
from eplb.migration.build import Pace, build_migration
from eplb.migration.candidates import Candidates
from rebalance.agent import RankAgent
from rebalance.build.agent import HeldExperts, wire_agent
from rebalance.network.listener import MAX_CLIENTS
from rebalance.network.throttle import CHUNK_BYTES, Budget
from rebalance.preload.cache.cache import HostCache
from rebalance.preload.cache.record_sources import RecordSources
from rebalance.preload.cache.requests import Request
from rebalance.preload.cache.server import (
    HostCacheAddress,
    HostCacheClient,
    HostCacheServer,
    HostCacheSettings,
)
from rebalance.preload.first_fill import fill_bank
from rebalance.preload.hosts.host_link_settings import HostLinkSettings
from rebalance.preload.hosts.known_host import KnownHost
from rebalance.protocol.local_votes import LocalVotes
from rebalance.rank.parts import AgentSettings, Links
from rebalance.transport.processes import NoPeers, PullTransport, RankMemory
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory.shared import COMPILED_FROM_BYTES, digest
from telemetry.store import RankState
from telemetry.stores.memory import MemoryStore
from tests.support.agent_group import StepClock
from tests.support.certificates import Authority

DEADLINE_S = 30.0
SHORT_S = 0.6  # of silence, where it is silence that is tested: a busy machine is slow to answer
SECRET = b"known to the hosts of one deployment"
FORK = multiprocessing.get_context("fork")
PORT = 23717
BIG = ModelShape((0,), 2, 1, hidden=1024, intermediate=768)  # records larger than socket buffers
BIG_SCHEMA = ExpertSchema.swiglu(1024, 768)
numbers = itertools.count(1)

Address = tuple[str, int]


def new_address() -> Address:
    """An address of this machine that nobody else has: all of 127/8 is."""
    pid, number = os.getpid(), next(numbers)
    return f"127.{1 + pid % 250}.{1 + pid // 250 % 250}.{number}", PORT


def links(*hosts: Address, **more: Any) -> HostLinkSettings:
    given = {"secret": SECRET, "silence_s": DEADLINE_S, "deadline_s": DEADLINE_S} | more
    return HostLinkSettings(hosts, **given)


@dataclass
class Host:
    """A host cache in a process of its own, and a rank's way to it."""

    address: HostCacheAddress
    process: BaseProcess
    reader: HostCacheClient

    def load(self, *records: tuple[int, int]) -> list[torch.Tensor]:
        """Have records in memory, and read them."""
        self.reader.load(records, deadline_s=DEADLINE_S)
        size = self.reader.record_bytes
        found = [torch.zeros(size, dtype=torch.uint8) for _ in records]
        for record, into in zip(records, found, strict=True):
            self.reader.read(record, into)
        return found

    def stats(self) -> Any:
        return self.reader.stats(deadline_s=DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Return once every thread stands still."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid or 0, os.WSTOPPED | os.WNOWAIT)


StartHost = Callable[..., Host]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("weights") / "big"
    write_random_checkpoint(path, BIG, BIG_SCHEMA, vocabulary=8, seed=2)
    # Compiled once, before host caches are forked.
    digest(torch.zeros(COMPILED_FROM_BYTES, dtype=torch.uint8))
    return Checkpoint(path)


@pytest.fixture
def weights(small_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    """A copy that keeps the files' times, as hosts have them that hold one checkpoint each."""
    return Checkpoint(shutil.copytree(small_checkpoint.path, tmp_path / "weights"))


@pytest.fixture
def start_host(small_model: ModelShape, small_schema: ExpertSchema) -> Iterator[StartHost]:
    """Start a host cache: ``start_host(checkpoint or None, links)``."""
    with ExitStack() as stack:

        def start(
            checkpoint: Checkpoint | None,
            settings: HostLinkSettings,
            *,
            model: ModelShape = small_model,
            schema: ExpertSchema = small_schema,
            num_readers: int = 2,
        ) -> Host:
            address = HostCacheAddress(f"hosts-{os.getpid()}-{next(numbers)}", os.urandom(16))
            ours, theirs = FORK.Pipe(duplex=False)

            def run() -> None:
                threading.excepthook = threading.__excepthook__  # pytest's keeps what it hears
                host_cache_settings = HostCacheSettings(links=settings, num_readers=num_readers)
                host_cache = HostCacheServer(
                    address, checkpoint, model, schema, host_cache_settings
                )
                theirs.send("ready")
                signal.pause()
                host_cache.close()

            process = FORK.Process(target=run, daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            assert ours.poll(DEADLINE_S), "a host cache did not start"
            assert ours.recv() == "ready"
            reader = HostCacheClient(
                address, model.num_experts, schema.record_bytes, deadline_s=DEADLINE_S
            )
            stack.callback(reader.close)
            return Host(address, process, reader)

        yield start


@pytest.fixture
def repacked(weights: Checkpoint, small_schema: ExpertSchema) -> Callable[..., torch.Tensor]:
    def repack(layer: int, expert: int) -> torch.Tensor:
        record = torch.zeros(small_schema.record_bytes, dtype=torch.uint8)
        weights.repack(layer, expert, small_schema, record)
        return record

    return repack


class Proxy:
    """Stands between two hosts, and lets ``harm`` do what it likes to a record on the way.

    ``harm(host, asker, size)`` moves a record's bytes; all that is said before passes unharmed.
    """

    def __init__(
        self, to: Address, harm: Callable[[socket.socket, socket.socket, int], None]
    ) -> None:
        self.address, self._to, self._harm = new_address(), to, harm
        self._listening = socket.create_server(self.address)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                asker, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(asker,), daemon=True).start()

    def _relay(self, asker: socket.socket) -> None:
        with asker, socket.create_connection(self._to) as host:
            threading.Thread(target=pump, args=(asker, host), daemon=True).start()
            try:
                while head := receive(host, 4):
                    said = receive(host, int.from_bytes(head, "big"))
                    asker.sendall(head + said)
                    if (message := json.loads(said)).get("digest"):
                        self._harm(host, asker, message["num_bytes"])
            except OSError:
                pass  # one of the two has hung up: so does this
            for end in (asker, host):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def pump(asker: socket.socket, host: socket.socket) -> None:
    with suppress(OSError):
        while said := asker.recv(2**16):
            host.sendall(said)


def receive(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := end.recv(min(2**20, size - len(found)))):
        found += part
    return found


def flips(*which: int) -> Callable[[socket.socket, socket.socket, int], None]:
    """Flip a byte of the first, second, ... record that passes."""
    passed = itertools.count(1)

    def harm(host: socket.socket, asker: socket.socket, size: int) -> None:
        record = bytearray(receive(host, size))
        if next(passed) in which:
            record[17] ^= 255
        asker.sendall(record)

    return harm


# -- from another host


def test_record_comes_over_tls_and_a_host_of_another_authority_gets_none(
    start_host: StartHost,
    weights: Checkpoint,
    repacked: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "stranger")
    listener = new_address()
    tls = ours.issue(listener[0])
    start_host(weights, links(listen=listener, tls=tls))
    member = start_host(None, links(listener, tls=tls))
    stranger = replace(theirs.issue(listener[0]), authority=ours.file)

    found = member.load((1, 5))
    with pytest.raises(MigrationError, match="the other side refused the certificate"):
        start_host(None, links(listener, tls=stranger)).load((1, 5))

    assert torch.equal(found[0], repacked(1, 5))


def test_rank_gets_a_record_that_only_another_host_has(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener = new_address()
    has_it = start_host(weights, links(listen=listener))
    without_disk = start_host(None, links(listener))

    found = without_disk.load((1, 5), (0, 2))

    assert torch.equal(found[0], repacked(1, 5))
    assert torch.equal(found[1], repacked(0, 2))
    assert without_disk.reader.bytes_from_other_hosts == 2 * 4096
    assert without_disk.reader.load([(1, 5)], deadline_s=DEADLINE_S)[1] == 0
    assert without_disk.stats().bytes_from_other_hosts == 2 * 4096
    assert has_it.stats().bytes_to_other_hosts == 2 * 4096


def test_record_is_read_from_another_host_before_the_local_disk(
    start_host: StartHost, weights: Checkpoint
) -> None:
    listener = new_address()
    first = start_host(weights, links(listen=listener))
    first.load((0, 0), (0, 1))
    second = start_host(weights, links(listener))

    second.load((0, 0), (0, 1), (1, 7))

    found = second.stats()
    assert (found.bytes_from_other_hosts, found.bytes_from_checkpoint) == (2 * 4096, 4096)
    assert first.stats().bytes_from_checkpoint == 2 * 4096  # nothing was read for the other


def test_after_disk_order_requests_only_records_lost_on_disk(
    start_host: StartHost,
    weights: Checkpoint,
    tmp_path: Path,
    repacked: Callable[..., torch.Tensor],
) -> None:
    listener = new_address()
    start_host(weights, links(listen=listener)).load((0, 0))
    own = Checkpoint(shutil.copytree(weights.path, tmp_path / "own"))
    second = start_host(own, links(listener, order="after_disk"))
    second.load((0, 0))
    assert second.stats().bytes_from_checkpoint == 4096

    for shard in own.path.glob("*.safetensors"):
        os.truncate(shard, 10)

    assert torch.equal(second.load((1, 3))[0], repacked(1, 3))
    assert second.stats().bytes_from_other_hosts == 4096


def test_record_of_several_chunks_is_complete(start_host: StartHost, big: Checkpoint) -> None:
    listener, record = new_address(), torch.zeros(BIG_SCHEMA.record_bytes, dtype=torch.uint8)
    big.repack(0, 1, BIG_SCHEMA, record)
    start_host(big, links(listen=listener), model=BIG, schema=BIG_SCHEMA)
    second = start_host(None, links(listener), model=BIG, schema=BIG_SCHEMA)

    assert len(record) > CHUNK_BYTES
    assert torch.equal(second.load((0, 1))[0], record)


def test_more_askers_than_transfers_take_turns(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener, everything = (
        new_address(),
        [(layer, expert) for layer in (0, 1) for expert in range(8)],
    )
    start_host(weights, links(listen=listener, max_transfers=1)).load(*everything)
    second = start_host(None, links(listener), num_readers=8)

    found = second.load(*everything)

    assert all(
        torch.equal(record, repacked(*of)) for record, of in zip(found, everything, strict=True)
    )
    assert second.stats().host_failures == 0


def test_shared_request_may_be_served_by_any_host() -> None:
    cache, ended = HostCache(2), threading.Event()
    for_host = Request(5, 1, [(0, 0)], lambda _: ended.set(), is_for_host=True)
    cache.lease_ready(for_host)
    assert for_host.error == "layer 0 expert 0 is not in memory"

    for_host = Request(5, 2, [(0, 0)], lambda _: ended.set(), is_for_host=True)
    cache.ask(for_host)
    entry = cache.take()
    assert entry is not None
    assert entry.is_for_host  # from disk or not at all: two hosts may not wait for each other
    cache.ask(Request(6, 1, [(0, 0)], lambda _: None))
    assert not entry.is_for_host

    assert cache.ready() == []
    cache.loaded(entry, (1, 2), is_repacked=False, is_from_host=True)
    assert (cache.ready(), cache.counts["from_hosts"]) == ([(0, 0)], 1)


# -- damage


def test_byte_corrupted_in_transfer_is_rejected_and_the_disk_is_read(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener, own = new_address(), new_address()
    start_host(weights, links(listen=listener)).load((0, 0))
    with closing(Proxy(listener, flips(1))) as proxy:
        second = start_host(weights, links(proxy.address, own, listen=own))

        assert torch.equal(second.load((0, 0))[0], repacked(0, 0))

    found = second.stats()
    assert (found.bytes_from_other_hosts, found.bytes_from_checkpoint) == (0, 4096)
    assert (found.damaged, found.host_failures) == (1, 1)


def test_corrupted_record_is_requested_again_without_a_disk(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener = new_address()
    start_host(weights, links(listen=listener)).load((0, 0), (0, 1))
    with closing(Proxy(listener, flips(1, 3, 4))) as proxy:
        second = start_host(None, links(proxy.address))

        assert torch.equal(second.load((0, 0))[0], repacked(0, 0))
        with pytest.raises(MigrationError, match=r"digest mismatch: found .* expected"):
            second.load((0, 1))
        with pytest.raises(
            MigrationError, match=r"in back-off for .* after: digest mismatch: found"
        ):
            second.load((0, 2))


def test_record_corrupted_on_the_other_host_is_reloaded_there(
    weights: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    listener, addresses = (
        new_address(),
        [HostCacheAddress(f"corrupt-{os.getpid()}-{n}", b"key") for n in (1, 2)],
    )
    first = HostCacheServer(
        addresses[0],
        weights,
        small_model,
        small_schema,
        HostCacheSettings(links=links(listen=listener)),
    )
    second = HostCacheServer(
        addresses[1], None, small_model, small_schema, HostCacheSettings(links=links(listener))
    )
    with (
        closing(first),
        closing(second),
        closing(HostCacheClient(addresses[0], 8, 4096, deadline_s=DEADLINE_S)) as at_first,
        closing(HostCacheClient(addresses[1], 8, 4096, deadline_s=DEADLINE_S)) as at_second,
    ):
        expected, _ = at_first.load([(1, 2)], deadline_s=DEADLINE_S)
        first.arena.bytes[17] ^= 255

        assert at_second.load([(1, 2)], deadline_s=DEADLINE_S)[0] == expected
        assert digest(first.arena.bytes[:4096]) == expected[0]


def test_bytes_with_a_wrong_digest_from_another_host_are_refused(
    start_host: StartHost,
    weights: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
) -> None:
    """Two checkpoints that look the same from outside: only an expert's bytes differ."""
    other = Checkpoint(shutil.copytree(weights.path, tmp_path / "other"))
    for shard in other.path.glob("*.safetensors"):
        found = shard.stat()
        with shard.open("r+b") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            file.write(bytes(found.st_size - file.tell()))
        os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    listener, address = new_address(), HostCacheAddress(f"known-{os.getpid()}", b"key")
    start_host(other, links(listen=listener)).load((0, 0))
    settings = HostCacheSettings(links=links(listener, order="after_disk"))
    with (
        closing(
            HostCacheServer(address, weights, small_model, small_schema, settings)
        ) as host_cache,
        closing(HostCacheClient(address, 8, 4096, deadline_s=DEADLINE_S)) as reader,
    ):
        reader.load([(0, 0)], deadline_s=DEADLINE_S)
        for shard in weights.path.glob("*.safetensors"):
            os.truncate(shard, 10)
        host_cache.arena.bytes[17] ^= 255

        with pytest.raises(MigrationError, match=r"truncated.* it announced digest .* expected"):
            reader.reload((0, 0), deadline_s=DEADLINE_S)


# -- a start that fails


def open_files() -> set[str]:
    """Everything that this process holds open, by number and by what it is."""
    gc.collect()  # a mapping goes with the last who names it, an exception's frames among them
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:  # the folder itself, while it was listed
            continue
    return found


def test_host_cache_that_cannot_listen_for_hosts_leaves_nothing_open(
    weights: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema, tmp_path: Path
) -> None:
    listener, address = new_address(), HostCacheAddress(f"shut-{os.getpid()}", b"key")
    settings = HostCacheSettings(
        mode="ring", ring_records=4, record_file=tmp_path / "records", links=links(listen=listener)
    )
    threads, before = set(threading.enumerate()), open_files()

    with (
        socket.create_server(listener),
        pytest.raises(
            MigrationError, match=r"cannot listen for other hosts on .*Address already in use"
        ),
    ):
        HostCacheServer(address, weights, small_model, small_schema, settings)

    assert not open_files() - before
    assert not set(threading.enumerate()) - threads
    # The name, the record file's lock and the door can be had again.
    with closing(
        HostCacheServer(address, weights, small_model, small_schema, settings)
    ) as host_cache:
        assert host_cache.writer is not None


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Have every new thread ask for more stack than there are addresses."""
    usual = threading.stack_size(2**50)
    try:
        yield
    finally:
        threading.stack_size(usual)


@pytest.mark.parametrize("record_file", [None, "records"])
def test_host_cache_that_gets_no_thread_leaves_nothing_open(
    weights: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
    record_file: str | None,
) -> None:
    address = HostCacheAddress(f"threads-{os.getpid()}", b"key")
    path = tmp_path / record_file if record_file else None
    settings = HostCacheSettings(mode="ring", ring_records=4, record_file=path)
    before = open_files()

    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        HostCacheServer(address, weights, small_model, small_schema, settings)

    assert not open_files() - before
    with closing(
        HostCacheServer(address, weights, small_model, small_schema, settings)
    ) as host_cache:
        # The record file's lock is free again.
        assert (host_cache.writer is None) == (path is None)


# -- death and silence


class HalfWay:
    """Lets the first part of a record pass, and no more while the host lives."""

    def __init__(self) -> None:
        self.is_reached, self.is_over = threading.Event(), threading.Event()

    def __call__(self, host: socket.socket, asker: socket.socket, size: int) -> None:
        asker.sendall(receive(host, size // 8))
        self.is_reached.set()
        self.is_over.wait(DEADLINE_S)
        raise OSError("the host is gone")


@pytest.mark.parametrize("has_disk", [True, False])
def test_host_killed_during_a_transfer_is_detected_at_once(
    start_host: StartHost, big: Checkpoint, has_disk: bool
) -> None:
    listener, half_way = new_address(), HalfWay()
    first = start_host(big, links(listen=listener), model=BIG, schema=BIG_SCHEMA)
    first.load((0, 0))
    with closing(Proxy(listener, half_way)) as proxy:
        of = links(proxy.address)
        second = start_host(big if has_disk else None, of, model=BIG, schema=BIG_SCHEMA)

        def kill() -> None:
            assert half_way.is_reached.wait(DEADLINE_S)
            first.process.kill()
            first.process.join()
            half_way.is_over.set()

        killing = threading.Thread(target=kill)
        killing.start()
        if has_disk:
            record = torch.zeros(BIG_SCHEMA.record_bytes, dtype=torch.uint8)
            big.repack(0, 0, BIG_SCHEMA, record)
            assert torch.equal(second.load((0, 0))[0], record)
        else:
            with pytest.raises(
                MigrationError, match=r"in back-off for .* after: connection closed after"
            ):
                second.load((0, 0))
        killing.join(DEADLINE_S)


def test_hanging_host_delays_only_the_first_request(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener = new_address()
    first = start_host(weights, links(listen=listener))
    first.load((0, 0))
    second = start_host(weights, links(listener, silence_s=SHORT_S))
    without_disk = start_host(None, links(listener, silence_s=SHORT_S, deadline_s=2 * SHORT_S))
    without_disk.load((0, 1))
    first.stop()

    started = time.monotonic()
    assert torch.equal(second.load((0, 0))[0], repacked(0, 0))
    taken_s = time.monotonic() - started
    with pytest.raises(MigrationError, match=r"no bytes transferred|deadline passed"):
        without_disk.load((0, 2))

    assert SHORT_S <= taken_s < DEADLINE_S
    assert second.stats().host_failures == 1
    first.signal(signal.SIGCONT)


def test_back_off_of_a_failing_host_doubles_up_to_its_limit() -> None:
    now = 100.0
    host = KnownHost(new_address(), back_off_s=3.0, clock=lambda: now)
    back_offs_s = []
    for _ in range(3):
        host.back_off.record_failure("it is dead")
        host.back_off.record_failure("it is dead")  # the same, as another thread has seen it
        began = now
        while host.back_off.reason():
            now += 0.5
        back_offs_s.append(now - began)
    host.back_off.record_success()
    host.back_off.record_failure("it is dead again")

    assert back_offs_s == [1.0, 2.0, 3.0]
    assert host.back_off.reason() == "in back-off for 1.0 s more after: it is dead again"


def test_host_that_starts_late_is_used(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener = new_address()
    without_disk = start_host(None, links(listener, back_off_s=0.01))
    with pytest.raises(MigrationError, match=r"no checkpoint; .* cannot connect: "):
        without_disk.load((0, 0))

    start_host(weights, links(listen=listener))

    assert torch.equal(load_after_back_off(without_disk, (0, 0)), repacked(0, 0))


def load_after_back_off(host: Host, record: tuple[int, int]) -> torch.Tensor:
    """Load a record, again while the only other host is in back-off."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return host.load(record)[0]
        except MigrationError as exc:
            if "in back-off for" not in str(exc) or time.monotonic() > deadline:
                raise


# -- strangers, and hosts of something else


def test_host_with_another_secret_fails_authentication(
    start_host: StartHost, weights: Checkpoint
) -> None:
    listener = new_address()
    first = start_host(weights, links(listen=listener))
    stranger = start_host(None, links(listener, secret=b"found on a street corner"))

    with pytest.raises(MigrationError, match="authentication failed: the secrets differ"):
        stranger.load((0, 0))

    assert first.stats().bytes_to_other_hosts == 0


def test_malformed_or_idle_client_is_closed_others_are_served(
    start_host: StartHost, weights: Checkpoint
) -> None:
    listener = new_address()
    start_host(weights, links(listen=listener, silence_s=SHORT_S))
    with (
        socket.create_connection(listener) as silent,
        socket.create_connection(listener) as babbling,
    ):
        babbling.sendall(b"GET /record HTTP/1.1\r\n\r\n")
        babbling.settimeout(DEADLINE_S)
        greeting = receive(babbling, int.from_bytes(receive(babbling, 4), "big"))

        assert json.loads(greeting).keys() == {"protocol", "nonce"}
        with suppress(ConnectionResetError):
            assert babbling.recv(1) == b""
        silent.settimeout(DEADLINE_S)
        assert len(silent.recv(1000)) == 4 + len(greeting)
        assert silent.recv(1) == b""  # hung up on when its silence had been long enough

    start_host(None, links(listener)).load((0, 0))


def test_clients_beyond_the_limit_are_refused_with_a_reason(
    start_host: StartHost, weights: Checkpoint, repacked: Callable[..., torch.Tensor]
) -> None:
    listener = new_address()
    start_host(weights, links(listen=listener)).load((0, 0))
    second = start_host(weights, links(listener))
    without_disk = start_host(None, links(listener))
    with ExitStack() as stack:
        for _ in range(MAX_CLIENTS):
            silent = stack.enter_context(socket.create_connection(listener))
            assert receive(silent, 4), "it was not greeted"

        with pytest.raises(
            MigrationError, match=f"connection limit reached: {MAX_CLIENTS} clients connected"
        ):
            without_disk.load((0, 0))
        assert torch.equal(second.load((0, 0))[0], repacked(0, 0))

    assert second.stats().host_failures == 0


def test_host_with_another_checkpoint_is_rejected(
    start_host: StartHost, weights: Checkpoint, tmp_path: Path
) -> None:
    listener, other = new_address(), Checkpoint(shutil.copytree(weights.path, tmp_path / "other"))
    next(iter(other.path.glob("*.safetensors"))).touch()
    start_host(other, links(listen=listener)).load((0, 0))
    second = start_host(weights, links(listener))
    for shard in weights.path.glob("*.safetensors"):
        os.truncate(shard, 10)

    with pytest.raises(MigrationError, match=r"record origin differs: checkpoint '.*', expected"):
        second.load((0, 0))


def test_host_that_serves_updated_weights_gives_none_of_the_old(
    start_host: StartHost, weights: Checkpoint
) -> None:
    listener = new_address()
    first = start_host(weights, links(listen=listener))
    first.load((0, 0))
    first.reader.invalidate(3, deadline_s=DEADLINE_S)

    with pytest.raises(MigrationError, match=": weights version 3, expected 0"):
        start_host(None, links(listener)).load((0, 0))


# -- a migration across hosts

TWO_HOSTS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=4)
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7], (2, 1)), num_experts=8)
SWAPPED = Placement(np.tile([7, 1, 2, 3, 4, 5, 6, 0], (2, 1)), num_experts=8)


class Sink:
    """Keeps how the rank stands; samples are nobody's here."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def offer(self, sample: object) -> bool:
        return True

    def state(self, state: RankState) -> None:
        self._store.report(state)


@dataclass
class Ranks:
    """One rank on each of two hosts, each with the host cache of its own host."""

    store: MemoryStore
    banks: list[ExpertBank]
    agents: list[RankAgent]
    clocks: list[StepClock]

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_reached():
            assert time.monotonic() < deadline, [a.describe() for a in self.agents]
            for agent, clock in zip(self.agents, self.clocks, strict=True):
                agent.step()
                clock.steps += 1


def start_ranks(hosts: list[Host], schema: ExpertSchema) -> Ranks:
    ranks, votes = Ranks(MemoryStore("test"), [], [], []), LocalVotes(2)
    ranks.store.commit(START, expected=None, reason="start")
    digests = torch.zeros((2, 8, 2), dtype=torch.int64)
    for rank, host in enumerate(hosts):
        bank = ExpertBank(schema, 2, 4, num_staging=4)
        held = START.slot_to_expert[:, TWO_HOSTS.slots_on(rank)].tolist()
        filled = fill_bank(bank, held, host.reader, deadline_s=DEADLINE_S)
        for (layer, expert), found in filled.items():
            digests[layer, expert] = torch.tensor(found)
        ranks.banks.append(bank)
    settings = AgentSettings("test", "run", TWO_HOSTS, sample_steps=4, vote_deadline_s=DEADLINE_S)
    for rank, (host, bank) in enumerate(zip(hosts, ranks.banks, strict=True)):
        clock, held = StepClock(), HeldExperts(rank, bank, digests, START)
        transport = PullTransport(RankMemory(rank, bank, host.reader), NoPeers())
        wires = Links(votes.member(rank), transport, ranks.store, Sink(ranks.store))
        ranks.agents.append(wire_agent(settings, held, wires, clock).agent)
        ranks.clocks.append(clock)
        ranks.agents[-1].start()
    return ranks


def test_experts_move_between_hosts_of_which_one_has_no_disk(
    start_host: StartHost,
    weights: Checkpoint,
    small_schema: ExpertSchema,
    repacked: Callable[..., torch.Tensor],
) -> None:
    listener = new_address()
    hosts = [start_host(weights, links(listen=listener)), start_host(None, links(listener))]
    ranks = start_ranks(hosts, small_schema)
    migration = build_migration(
        START, SWAPPED, TWO_HOSTS, plan_id=ranks.store.next_plan_id(), pace=Pace(staging_experts=4)
    )
    ranks.store.publish(migration)

    ranks.step_until(lambda: ranks.agents[0].placement.slot_to_expert[1, 0] == 7)
    ranks.step_until(lambda: ranks.agents[1].placement.slot_to_expert[1, 7] == 0)

    for layer in (0, 1):
        assert torch.equal(ranks.banks[0].live(layer, 0), repacked(layer, 7))
        assert torch.equal(ranks.banks[1].live(layer, 3), repacked(layer, 0))
    brought = [agent.describe().detail["bytes_by_source"] for agent in ranks.agents]
    # The first host had read expert 7 for the other already, when that was filled.
    assert brought[0] == {"disk": 0, "host": 2 * 4096, "other_host": 0}
    assert brought[1] == {"disk": 0, "host": 2 * 4096, "other_host": 2 * 4096}
    for agent in ranks.agents:
        agent.close()


def test_host_reads_ahead_what_a_coming_plan_may_bring_it(
    start_host: StartHost, weights: Checkpoint, small_schema: ExpertSchema
) -> None:
    hosts = [start_host(weights, None), start_host(weights, None)]
    ranks = start_ranks(hosts, small_schema)

    def num_resident(host: Host) -> int:
        return host.reader.stats(deadline_s=DEADLINE_S).resident_bytes // 4096

    assert [num_resident(host) for host in hosts] == [8, 8]
    ranks.store.suggest(Candidates((((0, 7), (1, 7)), ((0, 0), (1, 0)))))
    ranks.step_until(lambda: [num_resident(host) for host in hosts] == [10, 10])
    plan_id = ranks.store.next_plan_id()
    ranks.store.publish(build_migration(START, SWAPPED, TWO_HOSTS, plan_id=plan_id))
    ranks.step_until(lambda: ranks.agents[0].placement.slot_to_expert[1, 0] == 7)
    ranks.step_until(lambda: ranks.agents[1].placement.slot_to_expert[1, 7] == 0)

    brought = [agent.describe().detail["bytes_by_source"] for agent in ranks.agents]
    assert brought == [{"disk": 0, "host": 2 * 4096, "other_host": 0}] * 2
    for agent in ranks.agents:
        agent.close()


# -- budgets and settings


def test_budget_limits_the_bytes_sent_before_the_deadline() -> None:
    budget = Budget(1e6, threading.Event())
    now = time.monotonic()

    budget.spend(CHUNK_BYTES, now)  # what a time of silence has saved up
    budget.spend(20_000, now + 5.0)
    assert time.monotonic() - now >= 0.02

    with pytest.raises(MigrationError, match="bandwidth budget exhausted"):
        budget.spend(CHUNK_BYTES, time.monotonic() + 1.0)


def test_settings_that_cannot_be_used_are_refused(
    small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    with pytest.raises(ConfigError, match=r"a secret of 5 bytes .* expected 16 or more"):
        links(secret=b"short")
    with pytest.raises(ConfigError, match="order 'never', expected one of before_disk, after_disk"):
        links(order="never")
    with pytest.raises(ConfigError, match=r"port 0 of host 127.0.0.1, expected 1..65535"):
        links(listen=("127.0.0.1", 0))
    with pytest.raises(ConfigError, match="host 'node-7', expected a numeric address"):
        links(("node-7", PORT))
    with pytest.raises(ConfigError, match="silence_s is 0, expected more than 0"):
        links(silence_s=0)
    with pytest.raises(ConfigError, match="without a checkpoint has no disk to read"):
        RecordSources(None, small_model, small_schema, HostCacheSettings(), lambda: 0)
    assert "known" not in repr(links())


@pytest.mark.slow
def test_hosts_of_a_demo_give_each_other_what_they_hold(
    start_demo: Callable[..., Any], tmp_path: Path
) -> None:
    demo = start_demo(tmp_path, other_hosts="before_disk", seconds=6)

    assert demo.ends() == 0, demo.output_text()
    summary = demo.summary()
    assert summary["bytes_by_source"]["other_host"] > 0
    assert "other host" in demo.output_text()
    assert not demo.errors, demo.output_text()
