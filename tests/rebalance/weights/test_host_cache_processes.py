"""The host cache as a process: stopped and killed at will, and read by real ranks."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.errors import MigrationError
from rebalance.types import CalledOff
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.disk.record_file import RecordFile, RecordOrigin
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import SharedArena, digest
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess
from tests.support.record_files import make_all
from tests.support.repository import ROOT

pytestmark = pytest.mark.system

EVERYTHING = [(layer, expert) for layer in (0, 1) for expert in range(8)]
names = itertools.count()
Fork = Callable[..., ForkedProcess]
# Its address, and the process with its id.
StartHostCache = Callable[[HostCacheSettings], tuple[HostCacheAddress, ForkedProcess, int]]


@dataclass
class Host:
    """A host cache in a process of its own, and how to connect it."""

    address: HostCacheAddress
    schema: ExpertSchema
    checkpoint: Checkpoint
    process: ForkedProcess
    pid: int
    fork: Fork
    readers: list[HostCacheClient] = field(default_factory=list)

    def reader(self) -> HostCacheClient:
        size = self.schema.record_bytes
        self.readers.append(HostCacheClient(self.address, 8, size, deadline_s=NEVER_S))
        return self.readers[-1]

    def stop(self) -> None:
        """Return once every thread stands still: only its parent can wait for that."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def read_in_a_process(self, reads: Callable[[HostCacheClient], Any]) -> ForkedProcess:
        """Fork a rank that attaches and runs ``reads``; it sends the result."""
        return self.fork(lambda pipe: pipe.send(reads(self.reader())))

    def digest_of(self, layer: int, expert: int) -> tuple[int, int]:
        record = torch.zeros(self.schema.record_bytes, dtype=torch.uint8)
        self.checkpoint.repack(layer, expert, self.schema, record)
        return digest(record)


@pytest.fixture
def start(
    fork: Fork, small_checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> StartHostCache:
    """Start a host cache in a process of its own."""

    def start_one(settings: HostCacheSettings) -> tuple[HostCacheAddress, ForkedProcess, int]:
        address = HostCacheAddress(f"process-{os.getpid()}-{next(names)}", os.urandom(16))

        def run(pipe: Any) -> None:
            threading.excepthook = threading.__excepthook__  # pytest's own keeps what it hears
            HostCacheServer.of_checkpoint(
                address, small_checkpoint, small_model, small_schema, settings
            )
            pipe.send(os.getpid())
            signal.pause()

        process = fork(run)
        return address, process, process.receive()

    return start_one


@pytest.fixture
def host(
    start: StartHostCache,
    fork: Fork,
    small_checkpoint: Checkpoint,
    small_schema: ExpertSchema,
) -> Iterator[Host]:
    address, process, pid = start(HostCacheSettings())
    made = Host(address, small_schema, small_checkpoint, process, pid, fork)
    yield made
    process.kill()
    for reader in made.readers:
        reader.close()


def test_two_ranks_share_what_was_loaded_once(host: Host) -> None:
    def load(reader: HostCacheClient) -> tuple[int, list[tuple[int, int]]]:
        digests, from_disk = reader.load(EVERYTHING, deadline_s=NEVER_S)
        into = torch.zeros(host.schema.record_bytes, dtype=torch.uint8)
        read = []
        for record in EVERYTHING:
            reader.read(record, into)
            read.append(digest(into))
        assert read == digests
        return from_disk, digests

    first, second = (rank.receive() for rank in [host.read_in_a_process(load) for _ in range(2)])

    assert first[1] == second[1]
    assert first[0] + second[0] == 16 * host.schema.record_bytes


def test_late_answer_of_a_slow_disk_is_not_matched_to_a_later_request(host: Host) -> None:
    reader = host.reader()
    host.stop()

    with pytest.raises(MigrationError, match=r"2 records within 1\.2 s"):
        reader.load([(0, 1), (0, 2)], deadline_s=0.2)
    host.go_on()

    assert reader.load([(1, 3)], deadline_s=NEVER_S)[0] == [host.digest_of(1, 3)]


@pytest.mark.parametrize("ask", ["load", "reload"])
def test_cancelled_wait_for_a_slow_disk_ends_without_a_lease(host: Host, ask: str) -> None:
    reader = host.reader()
    reader.load([(0, 1)], deadline_s=NEVER_S)
    host.stop()

    looks = iter([True, True])
    asked = partial(reader.load, [(0, 2)]) if ask == "load" else partial(reader.reload, (0, 1))
    with pytest.raises(CalledOff, match=host.address.name):
        asked(deadline_s=NEVER_S, is_wanted=lambda: next(looks, False))
    host.go_on()

    with pytest.raises(MigrationError, match="without a lease"):
        reader.read((0, 2 if ask == "load" else 1), torch.zeros(host.schema.record_bytes))
    reader.release([(0, 1)])
    # An answer that was called off is not taken for another.
    assert reader.load([(1, 3)], deadline_s=NEVER_S)[0] == [host.digest_of(1, 3)]


def test_host_that_reads_nothing_any_more_blocks_no_sender_for_long(host: Host) -> None:
    reader = host.reader()
    host.stop()

    def send_without_end() -> None:
        while True:
            reader.hint([(0, 1)])

    with pytest.raises(MigrationError, match=host.address.name):
        send_without_end()
    host.go_on()

    assert len(reader.load([(0, 1)], deadline_s=NEVER_S)[0]) == 1


def test_host_cache_killed_while_a_rank_waits_ends_the_wait(host: Host) -> None:
    def ask(pipe: Any) -> None:
        reader = host.reader()
        pipe.send("connected")
        pipe.recv()

        def is_wanted() -> bool:
            pipe.send("asked, and waits for the answer")
            return True

        with pytest.raises(MigrationError, match=host.address.name):
            reader.load([(0, 1)], deadline_s=NEVER_S, is_wanted=is_wanted)

    rank = host.fork(ask)
    assert rank.receive() == "connected"
    host.stop()
    rank.send("the host cache stands still")
    assert rank.receive() == "asked, and waits for the answer"
    host.process.kill()

    rank.remaining()
    assert rank.ends() == 0


def test_rank_killed_while_it_waits_does_not_block_others(host: Host) -> None:
    host.reader().load([(0, 0)], deadline_s=NEVER_S)

    def ask_and_die(reader: HostCacheClient) -> None:
        def die() -> bool:
            os.kill(os.getpid(), signal.SIGKILL)
            return True

        reader.load([(0, 1), (1, 1), (1, 2)], deadline_s=NEVER_S, is_wanted=die)

    assert host.read_in_a_process(ask_and_die).ends() == -signal.SIGKILL

    assert host.reader().load([(1, 6)], deadline_s=NEVER_S)[0] == [host.digest_of(1, 6)]


def test_killed_host_cache_leaves_nothing_but_a_mapping(host: Host) -> None:
    def files() -> set[Path]:
        in_shared_memory = {path for path in Path("/dev/shm").iterdir() if "eplb" in path.name}
        return in_shared_memory | set(host.checkpoint.path.iterdir())

    before, into = files(), torch.zeros(host.schema.record_bytes, dtype=torch.uint8)
    reader = host.reader()
    reader.load([(0, 0)], deadline_s=NEVER_S)
    host.process.kill()

    with pytest.raises(MigrationError, match="disconnected"):
        reader.load([(0, 1)], deadline_s=NEVER_S)
    reader.read((0, 0), into)
    assert digest(into) == host.digest_of(0, 0)
    assert files() == before
    # Unix sockets that accept connections have flag 10000 in the kernel's own table.
    table = Path("/proc/net/unix").read_text().splitlines()
    listening = "\n".join(line for line in table if line.split()[3:4] == ["00010000"])
    assert re.search(rf"{host.address.name}\s*$", listening, re.MULTILINE) is None


def test_host_cache_killed_while_writing_leaves_complete_records(
    start: StartHostCache,
    tmp_path: Path,
    small_checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
) -> None:
    path = tmp_path / "records"
    for number in range(5):
        settings = HostCacheSettings(records=4, record_file=path)
        address, process, _ = start(settings)
        with closing(HostCacheClient(address, 8, 4096, deadline_s=NEVER_S)) as reader:
            for record in EVERYTHING[: 3 * number + 1]:
                reader.load([record], deadline_s=NEVER_S)
                reader.release([record])
            process.kill()

    assert make_all(small_checkpoint, small_model, small_schema, path) < 16
    origin = RecordOrigin.of(small_checkpoint, small_model, small_schema)
    with closing(RecordFile(path, origin)) as file:
        assert file.num_complete == 16
        for record in EVERYTHING:
            into = SharedArena("test", origin.record_bytes).bytes
            assert file.read(record, into) == file.digest_of(record)


SMALL_MEMORY = """
import os, sys
from pathlib import Path
from eplb.errors import MigrationError
from eplb.core.model import ModelShape
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema

weights, memory = map(Path, sys.argv[1:])
address = HostCacheAddress(f"small-{os.getpid()}", b"key")
model = ModelShape((0, 1), 8, 2, hidden=16, intermediate=8, num_shared_experts=1)
schema = ExpertSchema.swiglu(16, 8)
settings = HostCacheSettings(memory_folder=memory)
host_cache = HostCacheServer.of_checkpoint(address, Checkpoint(weights), model, schema, settings)
reader = HostCacheClient(address, 8, schema.record_bytes, deadline_s=3600)
held = 0
try:
    for layer, expert in [(l, e) for l in (0, 1) for e in range(8)]:
        reader.load([(layer, expert)], deadline_s=3600)
        held += 1
except MigrationError as exc:
    print(held, exc)
reader.release([(0, e) for e in range(8)])
reader.load([(1, 6), (1, 7)], deadline_s=3600)
print("reduced to", host_cache.stats()["room"])
reader.close()
host_cache.close()  # its threads end before the interpreter does, which would break them off in C++
"""


def test_full_shared_memory_is_an_error_and_not_a_signal(
    small_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A tmpfs of four pages, in a name space of its own, takes the place of a host's memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    mount = f"mount -t tmpfs -o size=16k none {memory}"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, mount], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a name space")
    script = tmp_path / "script.py"
    script.write_text(SMALL_MEMORY)

    ended = subprocess.run(
        [*own, f"{mount} && exec {sys.executable} {script} {small_checkpoint.path} {memory}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    refusal, room = ended.stdout.splitlines()
    assert "4 preload on host small-" in refusal
    assert "No space left on device" in refusal
    assert room == "reduced to 4"
