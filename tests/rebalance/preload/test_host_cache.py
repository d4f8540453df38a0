"""The preload process: one host cache per host, read by real processes, killed at will."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.errors import MigrationError
from rebalance.network.frames import Message
from rebalance.preload.cache.server import HostCacheAddress, HostCacheClient, HostCacheServer
from rebalance.preload.first_fill import fill_bank
from rebalance.threads.cancellation import CalledOff
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory.shared import digest

DEADLINE_S = 30.0
FORK = multiprocessing.get_context("fork")
names = itertools.count()

Reads = Callable[[HostCacheClient], Any]


@dataclass
class Host:
    """A host cache in a process of its own, and how to connect it."""

    address: HostCacheAddress
    process: BaseProcess
    schema: ExpertSchema
    checkpoint: Checkpoint
    start: Callable[[], BaseProcess]
    readers: list[HostCacheClient] = field(default_factory=list)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def reader(self, address: HostCacheAddress | None = None) -> HostCacheClient:
        reader = HostCacheClient(
            address or self.address, 8, self.schema.record_bytes, deadline_s=DEADLINE_S
        )
        self.readers.append(reader)
        return reader

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Return once every thread stands still: only its parent can wait for that."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid or 0, os.WSTOPPED | os.WNOWAIT)

    def read_in_a_process(self, reads: Reads) -> Connection:
        """Fork a rank that attaches and runs ``reads``; its result comes over the pipe."""
        ours, theirs = FORK.Pipe(duplex=False)

        def run() -> None:
            try:
                theirs.send(reads(self.reader()))
            except BaseException as exc:
                theirs.send(f"{type(exc).__name__}: {exc}")
            os._exit(0)

        FORK.Process(target=run, daemon=True).start()
        theirs.close()
        return ours

    def repacked(self, layer: int, expert: int) -> torch.Tensor:
        record = torch.zeros(self.schema.record_bytes, dtype=torch.uint8)
        self.checkpoint.repack(layer, expert, self.schema, record)
        return record


def answer(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE_S), f"the rank said nothing in {DEADLINE_S:.0f} s"
    return pipe.recv()


def new_address() -> HostCacheAddress:
    return HostCacheAddress(f"test-{os.getpid()}-{next(names)}", os.urandom(16))


@pytest.fixture
def host(
    small_checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
) -> Iterator[Host]:
    # A copy that tests may damage: the host cache opens its shards here, before the damage.
    checkpoint = Checkpoint(shutil.copytree(small_checkpoint.path, tmp_path / "weights"))
    address = new_address()

    def start() -> BaseProcess:
        ours, theirs = FORK.Pipe(duplex=False)

        def run() -> None:
            threading.excepthook = threading.__excepthook__  # pytest's own keeps what it hears
            host_cache = HostCacheServer(address, checkpoint, small_model, small_schema)
            theirs.send("ready")
            signal.pause()
            host_cache.close()

        process = FORK.Process(target=run, daemon=True)
        process.start()
        theirs.close()
        assert answer(ours) == "ready"
        return process

    made = Host(address, start(), small_schema, checkpoint, start)
    yield made
    made.kill()
    for reader in made.readers:
        reader.close()
    assert made.process.exitcode == -signal.SIGKILL, "it was ours to end"


def test_record_holds_the_repacked_bytes_and_its_digest(host: Host) -> None:
    reader, record = host.reader(), torch.zeros(host.schema.record_bytes, dtype=torch.uint8)

    digests, from_disk = reader.load([(1, 5), (0, 2)], deadline_s=DEADLINE_S)
    reader.read((1, 5), record)

    assert torch.equal(record, host.repacked(1, 5))
    assert digests == [digest(host.repacked(1, 5)), digest(host.repacked(0, 2))]
    assert from_disk == 2 * host.schema.record_bytes
    assert reader.load([], deadline_s=0.0) == ([], 0)


def test_two_ranks_share_what_was_loaded_once(host: Host) -> None:
    records = [(layer, expert) for layer in (0, 1) for expert in range(8)]

    def load(reader: HostCacheClient) -> tuple[int, list[tuple[int, int]]]:
        digests, from_disk = reader.load(records, deadline_s=DEADLINE_S)
        into = torch.zeros(host.schema.record_bytes, dtype=torch.uint8)
        read = []
        for record in records:
            reader.read(record, into)
            read.append(digest(into))
        assert read == digests
        return from_disk, digests

    first, second = (answer(pipe) for pipe in [host.read_in_a_process(load) for _ in range(2)])

    assert first[1] == second[1]
    assert first[0] + second[0] == 16 * host.schema.record_bytes


def test_rank_is_filled_from_the_host_cache(host: Host, small_schema: ExpertSchema) -> None:
    bank = ExpertBank(small_schema, 2, 3, num_staging=1)

    digests = fill_bank(bank, [[4, -1, 0], [7, 1, -1]], host.reader(), deadline_s=DEADLINE_S)

    assert torch.equal(bank.live(0, 2), host.repacked(0, 0))
    assert digests == {
        record: digest(host.repacked(*record)) for record in [(0, 4), (0, 0), (1, 7), (1, 1)]
    }
    assert not bank.live(0, 1).any()


def test_unknown_expert_is_rejected_and_others_are_served(host: Host) -> None:
    reader = host.reader()

    with pytest.raises(MigrationError, match=r"failed: layer 0 expert 8 is not of this model"):
        reader.load([(0, 1), (0, 8)], deadline_s=DEADLINE_S)

    assert reader.load([(0, 1)], deadline_s=DEADLINE_S)[1] == host.schema.record_bytes


def test_late_answer_of_a_slow_disk_is_not_matched_to_a_later_request(
    host: Host,
) -> None:
    reader = host.reader()
    host.stop()

    with pytest.raises(MigrationError, match=r"did not send 2 records within 1\.2 s"):
        reader.load([(0, 1), (0, 2)], deadline_s=0.2)
    host.signal(signal.SIGCONT)

    digests, _ = reader.load([(1, 3)], deadline_s=DEADLINE_S)
    assert digests == [digest(host.repacked(1, 3))]


@pytest.mark.parametrize("ask", ["load", "reload"])
def test_cancelled_wait_for_a_slow_disk_ends_soon_without_a_lease(host: Host, ask: str) -> None:
    reader, nobody_cares = host.reader(), threading.Event()
    reader.load([(0, 1)], deadline_s=DEADLINE_S)
    host.stop()

    calling_off = threading.Timer(0.1, nobody_cares.set)
    calling_off.start()
    given: dict[str, Any] = {
        "deadline_s": DEADLINE_S,
        "is_wanted": lambda: not nobody_cares.is_set(),
    }
    asked = partial(reader.load, [(0, 2)]) if ask == "load" else partial(reader.reload, (0, 1))
    with pytest.raises(CalledOff, match=f"host {host.address.name}: the wait for"):
        asked(**given)
    calling_off.join()
    host.signal(signal.SIGCONT)

    with pytest.raises(MigrationError, match="is read without a lease"):
        reader.read((0, 2 if ask == "load" else 1), torch.zeros(host.schema.record_bytes))
    reader.release([(0, 1)])
    assert reader.stats(deadline_s=DEADLINE_S).leased_bytes == 0
    # An answer that was called off is not taken for another.
    assert reader.load([(1, 3)], deadline_s=DEADLINE_S)[0] == [digest(host.repacked(1, 3))]


@pytest.mark.slow
def test_host_that_reads_nothing_any_more_blocks_no_sender_for_long(host: Host) -> None:
    reader = host.reader()
    host.stop()

    def send_without_end() -> None:
        for _ in itertools.count():
            reader.hint([(0, 1)])

    with pytest.raises(MigrationError, match=f"{host.address.name} accepted no message within 2 s"):
        send_without_end()
    host.signal(signal.SIGCONT)

    assert len(reader.load([(0, 1)], deadline_s=DEADLINE_S)[0]) == 1


# -- death


def test_killed_host_cache_is_detected_and_its_mapping_stays_readable(host: Host) -> None:
    reader, record = host.reader(), torch.zeros(host.schema.record_bytes, dtype=torch.uint8)
    reader.load([(0, 0)], deadline_s=DEADLINE_S)
    host.process.kill()
    host.process.join()

    with pytest.raises(MigrationError, match=f"host {host.address.name} disconnected"):
        reader.load([(0, 1)], deadline_s=DEADLINE_S)
    with pytest.raises(MigrationError, match=f"host {host.address.name} does not answer"):
        host.reader()

    reader.read((0, 0), record)
    assert torch.equal(record, host.repacked(0, 0))


def test_reader_attaches_again_to_a_host_cache_that_was_started_again(host: Host) -> None:
    reader, record = host.reader(), torch.zeros(host.schema.record_bytes, dtype=torch.uint8)
    reader.load([(0, 0)], deadline_s=DEADLINE_S)
    host.kill()
    with pytest.raises(MigrationError, match=f"host {host.address.name} disconnected"):
        reader.load([(0, 1)], deadline_s=DEADLINE_S)
    host.process = host.start()

    digests, _ = reader.load([(1, 2)], deadline_s=DEADLINE_S)
    reader.read((1, 2), record)

    assert digests == [digest(host.repacked(1, 2))]
    assert torch.equal(record, host.repacked(1, 2))
    with pytest.raises(MigrationError, match="layer 0 expert 0 is read without a lease"):
        reader.read((0, 0), record)


def test_restarted_host_cache_receives_the_weights_version(host: Host) -> None:
    reader = host.reader()
    reader.invalidate(7, deadline_s=DEADLINE_S)
    host.kill()
    host.process = host.start()

    with pytest.raises(MigrationError, match="weights version 0 was invalidated by version 7"):
        reader.load([(0, 0)], deadline_s=DEADLINE_S)


def test_host_cache_killed_while_a_rank_waits_ends_the_wait(host: Host) -> None:
    go, told = FORK.Pipe()
    waiting = host.read_in_a_process(lambda reader: ask_when_told(reader, told))

    assert answer(go) == "connected"
    host.stop()
    go.send("the preload process stands still")
    assert answer(go) == "asked, and waits for the answer"
    host.process.kill()

    assert answer(waiting) == f"the preload process of host {host.address.name} disconnected"


def ask_when_told(reader: HostCacheClient, told: Connection) -> str:
    def is_wanted() -> bool:
        told.send("asked, and waits for the answer")
        return True

    told.send("connected")
    told.recv()
    with pytest.raises(MigrationError) as refused:
        reader.load([(0, 1)], deadline_s=DEADLINE_S, is_wanted=is_wanted)
    return str(refused.value)


def test_connect_to_a_suspended_host_cache_times_out(host: Host) -> None:
    host.stop()

    with pytest.raises(MigrationError, match="does not answer"):
        HostCacheClient(host.address, 8, host.schema.record_bytes, deadline_s=0.2)


def test_rank_killed_while_it_waits_does_not_block_others(host: Host) -> None:
    host.reader().load([(0, 0)], deadline_s=DEADLINE_S)

    def ask_and_die(reader: HostCacheClient) -> None:
        records = [[0, 1], [1, 1], [1, 2]]
        reader._wire.send(
            {"ask": "load", "number": 1, "records": records, "weights_version": 0, "deadline_s": 30}
        )
        os.kill(os.getpid(), signal.SIGKILL)

    died = host.read_in_a_process(ask_and_die)

    with pytest.raises(EOFError):
        answer(died)
    assert host.reader().load([(1, 6)], deadline_s=DEADLINE_S)[0] == [digest(host.repacked(1, 6))]


def test_killed_host_cache_leaves_nothing(host: Host) -> None:
    before = files_of_ours(host)
    host.reader().load([(0, 0)], deadline_s=DEADLINE_S)
    assert host.address.name in Path("/proc/net/unix").read_text()

    host.process.kill()
    host.process.join()

    assert files_of_ours(host) == before
    assert re.search(rf"{host.address.name}\s*$", listening(), re.MULTILINE) is None


def files_of_ours(host: Host) -> set[Path]:
    in_shared_memory = {path for path in Path("/dev/shm").iterdir() if "eplb" in path.name}
    return in_shared_memory | set(host.checkpoint.path.iterdir())


def listening() -> str:
    """Unix sockets that accept connections: flag 10000 in the kernel's own table."""
    table = Path("/proc/net/unix").read_text().splitlines()
    return "\n".join(line for line in table if line.split()[3:4] == ["00010000"])


def test_second_host_cache_under_one_name_is_refused(
    host: Host, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    with pytest.raises(MigrationError, match=r"cannot listen: process \d+ of this host has its"):
        HostCacheServer(host.address, host.checkpoint, small_model, small_schema)


class OfProtocol1(HostCacheServer):
    """A host cache that announces no version."""

    def _hello(self) -> Message:
        return {name: value for name, value in super()._hello().items() if name != "version"}


def test_rank_refuses_a_host_cache_that_is_older_than_itself(
    host: Host, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    address = replace(host.address, name=f"{host.address.name}-older")
    older = OfProtocol1(address, host.checkpoint, small_model, small_schema)
    refusal = (
        r"cannot join: found the host cache of eplb 0\.1\.0 or earlier \(protocol 1\), "
        "expected protocol"
    )
    with closing(older), pytest.raises(MigrationError, match=refusal):
        host.reader(address)


# -- strangers


def test_client_without_the_key_is_refused_others_are_served(host: Host) -> None:
    with pytest.raises(MigrationError, match=r"does not answer: .*the secrets differ"):
        host.reader(replace(host.address, key=b"another"))

    assert len(host.reader().load([(0, 0)], deadline_s=DEADLINE_S)[0]) == 1


def test_idle_or_malformed_clients_do_not_delay_ranks(host: Host) -> None:
    # In turn, the handshakes of the idle clients would outlast the deadline of the load.
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for client in clients:
            client.connect(host.address.socket)
        clients[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)

        assert len(host.reader().load([(0, 0)], deadline_s=DEADLINE_S)[0]) == 1


def test_key_is_in_no_printed_address() -> None:
    assert "secret" not in repr(HostCacheAddress("host-0", b"secret"))
