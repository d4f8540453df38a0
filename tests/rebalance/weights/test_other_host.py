"""Another host as a source: host caches that share only a secret and a network, hurt on purpose."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError
from eplb.migration.build import Pace
from eplb.migration.candidates import Candidates
from rebalance.assembly.experts import fill_bank
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache import HostCache, Request
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.other_hosts import CacheSources
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.link.limits import CHUNK_BYTES, BackOff
from rebalance.weights.link.link_settings import HostLinkSettings
from rebalance.weights.sources import MappedSlots, WeightSources
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from telemetry.state.store import StateStore
from tests.support.agent_group import AgentGroup
from tests.support.certificates import Authority
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess

SECRET = b"known to the hosts of one deployment"
PORT = 23717
BIG = ModelShape((0,), 2, 1, hidden=1024, intermediate=768)  # records larger than socket buffers
BIG_SCHEMA = ExpertSchema.swiglu(1024, 768)
numbers = itertools.count(1)

Address = tuple[str, int]
Repack = Callable[..., torch.Tensor]


def new_address() -> Address:
    """An address of this machine that nobody else has: all of 127/8 is."""
    pid, number = os.getpid(), next(numbers)
    return f"127.{1 + pid % 250}.{1 + pid // 250 % 250}.{number}", PORT


def links(*hosts: Address, **more: Any) -> HostLinkSettings:
    given = {"secret": SECRET, "silence_s": NEVER_S, "deadline_s": NEVER_S} | more
    return HostLinkSettings(hosts, **given)


@dataclass
class Host:
    """A host cache, and a rank's way to it."""

    cache: HostCacheServer
    reader: HostCacheClient

    def load(self, *records: tuple[int, int]) -> list[torch.Tensor]:
        """Have records in memory, and read them."""
        self.reader.load(records, deadline_s=NEVER_S)
        size = self.reader.record_bytes
        found = [torch.zeros(size, dtype=torch.uint8) for _ in records]
        for record, into in zip(records, found, strict=True):
            self.reader.read(record, into)
        return found

    def stats(self) -> Any:
        return self.cache.stats()


StartHost = Callable[..., Host]


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
            settings: HostLinkSettings | None,
            *,
            model: ModelShape = small_model,
            schema: ExpertSchema = small_schema,
            num_readers: int = 2,
        ) -> Host:
            address = HostCacheAddress(f"hosts-{os.getpid()}-{next(numbers)}", os.urandom(16))
            given = HostCacheSettings(links=settings, num_readers=num_readers)
            cache = HostCacheServer.of_checkpoint(address, checkpoint, model, schema, given)
            stack.callback(cache.close)
            size = schema.record_bytes
            reader = HostCacheClient(address, model.num_experts, size, deadline_s=NEVER_S)
            stack.callback(reader.close)
            return Host(cache, reader)

        yield start


@pytest.fixture
def repacked(weights: Checkpoint, small_schema: ExpertSchema) -> Repack:
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
                    message = json.loads(said)
                    if "digest" in message:
                        self._harm(host, asker, message["num_bytes"])
                    else:
                        asker.sendall(receive(host, message.get("num_bytes", 0)))
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


def test_record_comes_from_another_host_over_tls(
    start_host: StartHost, weights: Checkpoint, repacked: Repack, tmp_path: Path
) -> None:
    listener = new_address()
    tls = Authority(tmp_path).issue(listener[0])
    start_host(weights, links(listen=listener, tls=tls))

    (found,) = start_host(None, links(listener, tls=tls)).load((1, 5))

    assert torch.equal(found, repacked(1, 5))


def test_rank_gets_a_record_that_only_another_host_has(
    start_host: StartHost, weights: Checkpoint, repacked: Repack
) -> None:
    listener = new_address()
    has_it = start_host(weights, links(listen=listener))
    without_disk = start_host(None, links(listener))

    found = without_disk.load((1, 5), (0, 2))

    assert torch.equal(found[0], repacked(1, 5))
    assert torch.equal(found[1], repacked(0, 2))
    assert without_disk.reader.bytes_from_other_hosts == 2 * 4096
    assert without_disk.reader.load([(1, 5)], deadline_s=NEVER_S)[1] == 0
    assert without_disk.stats()["other_hosts"] == 2
    assert has_it.stats()["to_other_hosts"] == 2


def test_record_is_read_from_another_host_before_the_local_disk(
    start_host: StartHost, weights: Checkpoint
) -> None:
    listener = new_address()
    first = start_host(weights, links(listen=listener))
    first.load((0, 0), (0, 1))
    second = start_host(weights, links(listener))

    second.load((0, 0), (0, 1), (1, 7))

    found = second.stats()
    assert (found["other_hosts"], found["checkpoint"]) == (2, 1)
    assert first.stats()["checkpoint"] == 2  # nothing was read for the other


def test_after_disk_order_requests_only_records_lost_on_disk(
    start_host: StartHost,
    weights: Checkpoint,
    tmp_path: Path,
    repacked: Repack,
) -> None:
    listener = new_address()
    start_host(weights, links(listen=listener)).load((0, 0))
    own = Checkpoint(shutil.copytree(weights.path, tmp_path / "own"))
    second = start_host(own, links(listener, order="after_disk"))
    second.load((0, 0))
    assert second.stats()["checkpoint"] == 1

    for shard in own.path.glob("*.safetensors"):
        os.truncate(shard, 10)

    assert torch.equal(second.load((1, 3))[0], repacked(1, 3))
    assert second.stats()["other_hosts"] == 1


def test_more_askers_than_transfers_take_turns(
    start_host: StartHost, weights: Checkpoint, repacked: Repack
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
    assert second.stats()["host_failures"] == 0


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
    cache.loaded(entry, (1, 2), "other_hosts")
    assert (cache.ready(), cache.counts["other_hosts"]) == ([(0, 0)], 1)


# -- damage


def test_byte_corrupted_in_transfer_is_rejected_and_the_disk_is_read(
    start_host: StartHost, weights: Checkpoint, repacked: Repack
) -> None:
    listener, own = new_address(), new_address()
    start_host(weights, links(listen=listener)).load((0, 0))
    with closing(Proxy(listener, flips(1))) as proxy:
        second = start_host(weights, links(proxy.address, own, listen=own))

        assert torch.equal(second.load((0, 0))[0], repacked(0, 0))

    found = second.stats()
    assert (found["other_hosts"], found["checkpoint"]) == (0, 1)
    assert (found["damaged"], found["host_failures"]) == (1, 1)


def test_corrupted_record_is_requested_again_without_a_disk(
    start_host: StartHost, weights: Checkpoint, repacked: Repack
) -> None:
    listener = new_address()
    start_host(weights, links(listen=listener)).load((0, 0), (0, 1))
    with closing(Proxy(listener, flips(1, 3, 4))) as proxy:
        second = start_host(None, links(proxy.address))

        assert torch.equal(second.load((0, 0))[0], repacked(0, 0))
        with pytest.raises(MigrationError, match="digest mismatch"):
            second.load((0, 1))
        with pytest.raises(MigrationError, match=r"in back-off .* digest mismatch"):
            second.load((0, 2))


def test_record_corrupted_on_the_other_host_is_reloaded_there(
    start_host: StartHost, weights: Checkpoint
) -> None:
    listener = new_address()
    first = start_host(weights, links(listen=listener))
    second = start_host(None, links(listener))
    expected, _ = first.reader.load([(1, 2)], deadline_s=NEVER_S)
    first.cache.arena.bytes[17] ^= 255

    assert second.reader.load([(1, 2)], deadline_s=NEVER_S)[0] == expected
    assert digest(first.cache.arena.bytes[:4096]) == expected[0]


def test_bytes_with_a_wrong_digest_from_another_host_are_refused(
    start_host: StartHost, weights: Checkpoint, tmp_path: Path
) -> None:
    """Two checkpoints that look the same from outside: only an expert's bytes differ."""
    other = Checkpoint(shutil.copytree(weights.path, tmp_path / "other"))
    for shard in other.path.glob("*.safetensors"):
        found = shard.stat()
        with shard.open("r+b") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            file.write(bytes(found.st_size - file.tell()))
        os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
    listener = new_address()
    start_host(other, links(listen=listener)).load((0, 0))
    host = start_host(weights, links(listener, order="after_disk"))
    host.load((0, 0))
    for shard in weights.path.glob("*.safetensors"):
        os.truncate(shard, 10)
    host.cache.arena.bytes[17] ^= 255

    with pytest.raises(MigrationError, match=r"truncated.* announced digest .* expected"):
        host.reader.reload((0, 0), deadline_s=NEVER_S)


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
        mode="ring", records=4, record_file=tmp_path / "records", links=links(listen=listener)
    )
    threads, before = set(threading.enumerate()), open_files()

    with (
        socket.create_server(listener),
        pytest.raises(
            MigrationError, match=r"cannot listen for other hosts on .*Address already in use"
        ),
    ):
        HostCacheServer.of_checkpoint(address, weights, small_model, small_schema, settings)

    assert not open_files() - before
    assert not set(threading.enumerate()) - threads
    # The name, the record file's lock and the door can be had again.
    with closing(
        HostCacheServer.of_checkpoint(address, weights, small_model, small_schema, settings)
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
    settings = HostCacheSettings(mode="ring", records=4, record_file=path)
    before = open_files()

    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        HostCacheServer.of_checkpoint(address, weights, small_model, small_schema, settings)

    assert not open_files() - before
    with closing(
        HostCacheServer.of_checkpoint(address, weights, small_model, small_schema, settings)
    ) as host_cache:
        # The record file's lock is free again.
        assert (host_cache.writer is None) == (path is None)


# -- death and silence


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("weights") / "big"
    write_random_checkpoint(path, BIG, BIG_SCHEMA, vocabulary=8, seed=2)
    return Checkpoint(path)


@pytest.mark.system
@pytest.mark.parametrize("has_disk", [True, False])
def test_host_killed_during_a_transfer_is_detected_at_once(
    start_host: StartHost, fork: Callable[..., ForkedProcess], big: Checkpoint, has_disk: bool
) -> None:
    listener, is_half_way, is_over = new_address(), threading.Event(), threading.Event()

    def serve(pipe: Any) -> None:
        address = HostCacheAddress(f"killed-{os.getpid()}", b"key")
        given = HostCacheSettings(links=links(listen=listener))
        HostCacheServer.of_checkpoint(address, big, BIG, BIG_SCHEMA, given)
        HostCacheClient(address, 2, BIG_SCHEMA.record_bytes, deadline_s=NEVER_S).load(
            [(0, 0)], deadline_s=NEVER_S
        )
        pipe.send("ready")
        signal.pause()

    def half(host: socket.socket, asker: socket.socket, size: int) -> None:
        asker.sendall(receive(host, size // 8))
        is_half_way.set()
        is_over.wait()
        raise OSError("the host is gone")

    first = fork(serve)
    assert first.receive() == "ready"

    def kill() -> None:
        is_half_way.wait()
        first.kill()
        is_over.set()

    with closing(Proxy(listener, half)) as proxy:
        of = links(proxy.address)
        second = start_host(big if has_disk else None, of, model=BIG, schema=BIG_SCHEMA)
        killing = threading.Thread(target=kill)
        killing.start()
        if has_disk:
            record = torch.zeros(BIG_SCHEMA.record_bytes, dtype=torch.uint8)
            big.repack(0, 0, BIG_SCHEMA, record)
            assert torch.equal(second.load((0, 0))[0], record)
        else:
            with pytest.raises(MigrationError, match=r"in back-off .* connection closed"):
                second.load((0, 0))
        killing.join()


@pytest.mark.system
def test_record_of_several_chunks_is_complete(start_host: StartHost, big: Checkpoint) -> None:
    listener, record = new_address(), torch.zeros(BIG_SCHEMA.record_bytes, dtype=torch.uint8)
    big.repack(0, 1, BIG_SCHEMA, record)
    start_host(big, links(listen=listener), model=BIG, schema=BIG_SCHEMA)
    second = start_host(None, links(listener), model=BIG, schema=BIG_SCHEMA)

    assert len(record) > CHUNK_BYTES
    assert torch.equal(second.load((0, 1))[0], record)


def test_hanging_host_fails_by_its_silence_and_the_disk_is_read(
    start_host: StartHost, weights: Checkpoint, repacked: Repack
) -> None:
    listener = new_address()
    with socket.create_server(listener):  # connects, and says nothing
        second = start_host(weights, links(listener, silence_s=0.05))

        assert torch.equal(second.load((0, 0))[0], repacked(0, 0))
        assert second.stats()["host_failures"] == 1
        with pytest.raises(MigrationError, match="no bytes transferred"):
            start_host(None, links(listener, silence_s=0.05)).load((0, 2))


def test_back_off_of_a_failing_host_doubles_up_to_its_limit() -> None:
    now = 100.0
    back_off = BackOff("host", 3.0, clock=lambda: now)
    back_offs_s = []
    for _ in range(3):
        back_off.record_failure("it is dead")
        back_off.record_failure("it is dead")  # the same, as another thread has seen it
        began = now
        while back_off.reason():
            now += 0.5
        back_offs_s.append(now - began)
    back_off.record_success()
    back_off.record_failure("it is dead again")

    assert back_offs_s == [1.0, 2.0, 3.0]
    assert back_off.reason() == "in back-off for 1.0 s more after: it is dead again"


def test_host_that_starts_late_is_used(
    start_host: StartHost, weights: Checkpoint, repacked: Repack
) -> None:
    listener = new_address()
    without_disk = start_host(None, links(listener, back_off_s=0.01))
    with pytest.raises(MigrationError, match="cannot connect"):
        without_disk.load((0, 0))

    start_host(weights, links(listen=listener))

    assert torch.equal(load_after_back_off(without_disk, (0, 0)), repacked(0, 0))


def load_after_back_off(host: Host, record: tuple[int, int]) -> torch.Tensor:
    """Load a record, again while the only other host is in back-off."""
    while True:
        try:
            return host.load(record)[0]
        except MigrationError as exc:
            if "in back-off for" not in str(exc):
                raise


# -- hosts of something else


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
    first.reader.invalidate(3, deadline_s=NEVER_S)

    with pytest.raises(MigrationError, match=": weights version 3, expected 0"):
        start_host(None, links(listener)).load((0, 0))


# -- a migration across hosts

TWO_HOSTS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=4)
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7], (2, 1)), num_experts=8)
SWAPPED = Placement(np.tile([7, 1, 2, 3, 4, 5, 6, 0], (2, 1)), num_experts=8)


@contextmanager
def ranks_of(hosts: list[Host], schema: ExpertSchema) -> Iterator[AgentGroup]:
    """One rank on each of two hosts, each with the host cache of its own host."""
    group, digests = AgentGroup(START, TWO_HOSTS), torch.zeros((2, 8, 2), dtype=torch.int64)
    for rank, host in enumerate(hosts):
        group.banks.append(ExpertBank(schema, 2, 4, num_staging=4))
        held = START.slot_to_expert[:, TWO_HOSTS.slots_on(rank)].tolist()
        for record, found in fill_bank(
            group.banks[rank], held, host.reader, deadline_s=NEVER_S
        ).items():
            digests[record] = torch.tensor(found)
    for rank, host in enumerate(hosts):
        group.add(WeightSources(MappedSlots(rank, group.banks[rank]), host.reader), digests)
    group.begin()
    yield group
    group.close()


def bytes_by_source(group: AgentGroup) -> list[dict[str, int]]:
    group.step_until(lambda: all(agent.placement.hash == SWAPPED.hash for agent in group.agents))
    return [agent.describe().detail["bytes_by_source"] for agent in group.agents]


def test_experts_move_between_hosts_of_which_one_has_no_disk(
    start_host: StartHost, weights: Checkpoint, small_schema: ExpertSchema, repacked: Repack
) -> None:
    listener = new_address()
    hosts = [start_host(weights, links(listen=listener)), start_host(None, links(listener))]
    with ranks_of(hosts, small_schema) as ranks:
        ranks.publish(SWAPPED, Pace(staging_experts=4))
        brought = bytes_by_source(ranks)

    for layer in (0, 1):
        assert torch.equal(ranks.banks[0].live(layer, 0), repacked(layer, 7))
        assert torch.equal(ranks.banks[1].live(layer, 3), repacked(layer, 0))
    # The first host had read expert 7 for the other already, when that was filled.
    assert brought[0] == {"disk": 0, "host": 2 * 4096, "other_host": 0}
    assert brought[1] == {"disk": 0, "host": 2 * 4096, "other_host": 2 * 4096}


def test_host_reads_ahead_what_a_coming_plan_may_bring_it(
    start_host: StartHost, weights: Checkpoint, small_schema: ExpertSchema
) -> None:
    hosts = [start_host(weights, None), start_host(weights, None)]

    def num_resident() -> list[int]:
        return [host.cache.stats()["resident"] for host in hosts]

    with ranks_of(hosts, small_schema) as ranks:
        assert num_resident() == [8, 8]
        ranks.store.suggest(Candidates((((0, 7), (1, 7)), ((0, 0), (1, 0)))))
        ranks.step_until(lambda: num_resident() == [10, 10])
        ranks.publish(SWAPPED)

        assert bytes_by_source(ranks) == [{"disk": 0, "host": 2 * 4096, "other_host": 0}] * 2


def test_host_cache_without_checkpoint_and_hosts_is_refused(
    small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint to read"):
        CacheSources(
            None, RecordOrigin.of(None, small_model, small_schema), HostCacheSettings(), lambda: 0
        )


@pytest.mark.system
def test_hosts_of_a_demo_give_each_other_what_they_hold(
    start_demo: Callable[..., Any], tmp_path: Path
) -> None:
    demo = start_demo(tmp_path, other_hosts="before_disk", seconds=NEVER_S)

    def bytes_of_other_hosts(store: StateStore) -> int:
        run = store.current_run()
        states = store.rank_states(run.run) if run is not None else []
        return sum(state.detail.get("bytes_by_source", {}).get("other_host", 0) for state in states)

    assert demo.sees("bytes of another host", bytes_of_other_hosts) > 0
    demo.process.send_signal(signal.SIGINT)
    demo.ends()
    assert not demo.errors, demo.output_text()
