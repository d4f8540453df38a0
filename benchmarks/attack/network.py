"""Attacks on the sockets of ranks, hosts and their parent by a process without the secret.

Deployments here are of two real ranks over gloo and of a real host weight cache, as small as they
get. Addresses are read from ``/proc``: an attacker who can scan ports learns as much.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # a stranger may not read the library any more
import multiprocessing
import os
import pickle
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.attack import Attack, Outcome
from eplb.core.model import ModelShape
from eplb.errors import EplbError
from eplb.migration.recovery import Recovery
from rebalance.recovery import rejoin
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.other_hosts import PROTOCOL as HOSTS
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.link.link_settings import HostLinkSettings
from rebalance.weights.link.listener import ConnectionListener, listen
from rebalance.weights.link.wire import Wire, client_handshake, connect
from rebalance.weights.rank_link import PROTOCOL as RANKS
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertSchema
from tests.support.launch import launch

FORK = multiprocessing.get_context("fork")  # imports of torch take seconds
START_DEADLINE_S = 120.0  # of ranks that import torch; 5 s on a free machine
DEADLINE_S = 50.0
REJOIN_S = 12.0  # for which a rank waits for the survivor whose place the attacker takes
FILL_COUNT, FILL_BYTES = 150, 7_000_000
MAX_GROWTH_BYTES = 64 * 2**20
STRAYS = 1500
RANK_DESCRIPTORS = 256
NOBODY = 65534
RECORD = Recovery(1, "attack", (0, 1), 1, 0, 0, "attack", 0.0)
MODEL = ModelShape((0, 1), 8, 2, hidden=16, intermediate=8, num_shared_experts=1)
SCHEMA = ExpertSchema.swiglu(16, 8)


# -- what is attacked


def _rank(rank: int, num_ranks: int, folder: str, is_recovering: bool) -> str:
    """Wait for the attack, as a rank that serves; then vote once more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (RANK_DESCRIPTORS,) * 2)
    (Path(folder) / f"rank-{rank}").write_text(str(os.getpid()))
    ended, deadline = Path(folder) / "ended", time.monotonic() + DEADLINE_S
    store = dist.group.WORLD.get_group_store() if dist.group.WORLD else None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if rank == 0 and is_recovering:
        with suppress(EplbError):  # rank 1 never comes: whoever joins here is the attacker
            assert store is not None, "launch joins a group"
            rejoin("attack", (0, 1), store, 0, deadline_s=REJOIN_S).votes.close()
    while not ended.exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the attacker is another process that knows nothing of this one
    total = torch.ones(1)
    dist.all_reduce(total)
    return f"{total.item():.0f} of {num_ranks} ranks answer"


def _parent(folder: str, is_recovering: bool, pipe: Connection) -> None:
    try:
        pipe.send(launch(_rank, 2, folder, is_recovering, deadline_s=START_DEADLINE_S + DEADLINE_S))
    except EplbError as exc:
        pipe.send([str(exc)[-200:]])


@contextmanager
def _deployment(
    folder: Path, *, is_recovering: bool = False
) -> Iterator[tuple[list[int], Connection]]:
    """Process ids of a parent and its two ranks; what the ranks say once ``ended`` exists."""
    ours, theirs = FORK.Pipe(duplex=False)
    parent = FORK.Process(target=_parent, args=(str(folder), is_recovering, theirs))
    parent.start()
    assert parent.pid is not None
    files = [folder / f"rank-{rank}" for rank in range(2)]
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not all(file.exists() and file.read_text() for file in files):
            if time.monotonic() > deadline or not parent.is_alive():
                raise TimeoutError("the ranks did not start")
            time.sleep(0.05)
        yield [parent.pid, *(int(file.read_text()) for file in files)], ours
    finally:
        (folder / "ended").touch()
        parent.join(DEADLINE_S)
        parent.kill()
        parent.join()


def _listening(pid: int) -> list[tuple[str, int]]:
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


def _resident(pids: list[int]) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * resource.getpagesize()


def _by_stranger(attempt: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> Any:
    """Run ``attempt`` in a process of another user, if this one may become it."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_become_stranger, args=(theirs, attempt, args), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(deadline_s) else None
    finally:
        process.kill()
        process.join()


def _become_stranger(pipe: Connection, attempt: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    pipe.send(attempt(*args))


# -- the rendezvous


class _Payload:
    """Unpickled, it creates a file: the code of the attacker that must not run."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._canary),)


def _poison(addresses: list[tuple[str, int]], canary: str) -> int:
    """Write a pickle into every key found, then join as rank 1 and send one; doors that opened."""
    payload, opened = pickle.dumps(_Payload(canary)), 0
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for host, port in addresses:
        with suppress(RuntimeError):
            store = TCPStore(host, port, timeout=timedelta(seconds=3), wait_for_workers=False)
            opened += 1
            with suppress(RuntimeError):
                for key in store.list_keys():
                    store.set(f"{key}-of-a-stranger", payload)
            _send_as_rank_one(store, payload)
    return opened


def _send_as_rank_one(store: TCPStore, payload: bytes) -> None:
    """Take part in the recovery of rank 0 by the protocol of an object collective."""
    timeout = timedelta(seconds=REJOIN_S)
    prefixed = PrefixStore(f"recovery-{RECORD.membership}", store)
    gloo = dist.ProcessGroupGloo(prefixed, 1, 2, timeout)
    size = torch.tensor([len(payload)])
    sizes = [torch.zeros_like(size) for _ in range(2)]
    gloo.allgather([sizes], [size]).wait(timeout)
    longest = int(max(int(one) for one in sizes))
    sent = torch.zeros(longest, dtype=torch.uint8)
    sent[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = [torch.zeros_like(sent) for _ in range(2)]
    gloo.allgather([rows], [sent]).wait(timeout)


def _rendezvous_code(folder: Path) -> Outcome:
    canary = folder / "code-ran"
    with _deployment(folder, is_recovering=True) as (pids, said):
        addresses = [address for pid in pids for address in _listening(pid)]
        opened = _by_stranger(_poison, addresses, str(canary))
        (folder / "ended").touch()
        words = said.recv() if said.poll(DEADLINE_S) else ["silence"]
    is_well = not canary.exists() and words == ["2 of 2 ranks answer"] * 2
    ran = "ran" if canary.exists() else "did not run"
    figure = f"{len(addresses)} ports tried, {opened} took a store's client, code {ran}; {words[0]}"
    return Outcome(is_well, figure)


def _fill(addresses: list[tuple[str, int]]) -> int:
    """Send 150 x 7 MB to whatever takes it, as a store's client and as anybody; bytes taken."""
    taken = 0
    for host, port in addresses:
        with suppress(RuntimeError):
            store = TCPStore(host, port, timeout=timedelta(seconds=3), wait_for_workers=False)
            for number in range(FILL_COUNT):
                store.set(f"fill-{number}", bytes(FILL_BYTES))
                taken += FILL_BYTES
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0) as end:
            for _ in range(FILL_COUNT):
                end.sendall(bytes(FILL_BYTES))
                taken += FILL_BYTES
    return taken


def _rendezvous_fill(folder: Path) -> Outcome:
    with _deployment(folder) as (pids, said):
        before = _resident(pids)
        addresses = [address for pid in pids for address in _listening(pid)]
        taken = _by_stranger(_fill, addresses)
        growth = _resident(pids) - before
        (folder / "ended").touch()
        words = said.recv() if said.poll(DEADLINE_S) else ["silence"]
    is_well = growth <= MAX_GROWTH_BYTES and words == ["2 of 2 ranks answer"] * 2
    mb = 1e6
    figure = f"{(taken or 0) / mb:.0f} MB taken, parent and ranks +{growth / mb:.0f} MB; {words[0]}"
    return Outcome(is_well, figure)


def _connect(addresses: list[tuple[str, int]]) -> int:
    """Open 1,500 connections to each address and keep them; how many were taken."""
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2
        )
    with ExitStack() as stack:
        strays = []
        for address in addresses:
            for _ in range(STRAYS):
                stray = stack.enter_context(socket.socket())
                stray.setblocking(False)
                stray.connect_ex(address)
                strays.append(stray)
        time.sleep(3.0)  # SYNs that are dropped are sent again after one second
        return sum(
            stray.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and _is_connected(stray)
            for stray in strays
        )


def _is_connected(end: socket.socket) -> bool:
    try:
        end.getpeername()
    except OSError:
        return False
    return True


def _gloo_strays(folder: Path) -> Outcome:
    with _deployment(folder) as (pids, said):
        addresses = [address for pid in pids[1:] for address in _listening(pid)]
        taken = _by_stranger(_connect, addresses)
        (folder / "ended").touch()
        words = said.recv() if said.poll(DEADLINE_S) else ["silence"]
    figure = (
        f"{STRAYS} connections to each of {len(addresses)} ports, ranks limited to "
        f"{RANK_DESCRIPTORS} descriptors: {taken} taken; {words[0]}"
    )
    return Outcome(words == ["2 of 2 ranks answer"] * 2, figure)


# -- frames


def _framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


FRAMES = [_framed(text) for text in (b"[" * 500, b"[" * 100_000, b'{"a":' * 100_000, b'"[' * 500)]


def _deep_frames(folder: Path) -> Outcome:
    uncaught: list[str] = []
    previous, threading.excepthook = threading.excepthook, lambda args: uncaught.append(repr(args))
    secret, is_closing = b"s" * 32, threading.Event()
    with ExitStack() as stack:
        stack.callback(setattr, threading, "excepthook", previous)
        host = _free_address()
        stack.enter_context(
            closing(_host_cache(folder, HostLinkSettings((host,), host, secret=secret)))
        )
        rank = _free_address()
        listener = ConnectionListener(
            listen(rank, "rank"),
            "rank",
            RANKS,
            secret,
            hello=dict,
            serve=lambda wire: None,
            silence_s=2.0,
            is_closing=is_closing,
        )
        stack.enter_context(closing(listener))
        for address in (host, rank):
            for frame in FRAMES:
                with suppress(OSError), closing(connect(address, DEADLINE_S)) as stranger:
                    stranger.sendall(frame)
                    stranger.recv(4096)
                    stranger.recv(1)
        asked = sum(_asks_a_false_listener(frame) for frame in FRAMES)
        for address, protocol in ((host, HOSTS), (rank, RANKS)):
            with closing(connect(address, DEADLINE_S)) as end:
                client_handshake(
                    Wire(end, time.monotonic() + DEADLINE_S, DEADLINE_S), secret, protocol=protocol
                )
    held = not uncaught and asked == len(FRAMES)
    figure = f"{3 * len(FRAMES)} frames at two listeners and a client: {len(uncaught)} uncaught"
    return Outcome(held, figure)


def _asks_a_false_listener(frame: bytes) -> bool:
    """Say whether a client reports such an answer as any other failure."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = connect(listening.getsockname()[:2], DEADLINE_S)
        false, _ = listening.accept()
        with false, client:
            threading.Thread(target=_send, args=(false, frame), daemon=True).start()
            try:
                client_handshake(
                    Wire(client, time.monotonic() + 2.0, 1.0), b"secret", protocol=HOSTS
                )
            except EplbError:
                return True
            except RecursionError:
                return False
    return False


def _send(end: socket.socket, frame: bytes) -> None:
    with suppress(OSError):
        end.sendall(frame)


def _free_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    return host, port


# -- the host weight cache


def _host_cache(folder: Path, links: HostLinkSettings | None = None) -> HostCacheServer:
    weights = folder / "weights"
    write_random_checkpoint(weights, MODEL, SCHEMA, vocabulary=64, seed=1)
    address = HostCacheAddress(folder.name, b"key of 16 bytes.")
    return HostCacheServer.of_checkpoint(
        address, Checkpoint(weights), MODEL, SCHEMA, HostCacheSettings(links=links)
    )


def _flood(name: str, folder: str) -> None:
    """Open 1,500 connections to the host weight cache and keep them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        for _ in range(STRAYS):
            stray = stack.enter_context(socket.socket(socket.AF_UNIX))
            with suppress(OSError):
                stray.connect(name)
        Path(folder, "flooded").touch()
        threading.Event().wait(DEADLINE_S)


def _host_cache_connects(folder: Path) -> Outcome:
    address = HostCacheAddress(folder.name, b"key of 16 bytes.")
    took = []
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))  # the usual limit
        stack.enter_context(closing(_host_cache(folder)))
        folder.chmod(0o777)
        for target in (_flood, _flood_as_stranger):
            flood = FORK.Process(target=target, args=(address.socket, str(folder)), daemon=True)
            flood.start()
            deadline = time.monotonic() + DEADLINE_S / 2
            while not (folder / "flooded").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            began = time.monotonic()
            with suppress(EplbError):
                reader = HostCacheClient(address, 8, SCHEMA.record_bytes, deadline_s=DEADLINE_S / 2)
                reader.load([(0, 0)], deadline_s=DEADLINE_S / 2)
                reader.close()
                took.append(time.monotonic() - began)
            flood.kill()
            flood.join()
            flood.close()
            (folder / "flooded").unlink(missing_ok=True)
    shown = ", ".join(f"{seconds * 1e3:.0f} ms" for seconds in took)
    figure = f"{STRAYS} connections held by one process: a rank's first record after {shown}"
    return Outcome(len(took) == 2 and max(took) < 1.0, figure)


def _flood_as_stranger(name: str, folder: str) -> None:
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _flood(name, folder)


ATTACKS = (
    Attack(
        "rendezvous-code",
        "a process that finds every port of a deployment runs no code in it",
        _rendezvous_code,
    ),
    Attack(
        "rendezvous-fill",
        "150 x 7 MB sent to every port of a deployment take at most 64 MB of its memory",
        _rendezvous_fill,
    ),
    Attack(
        "gloo-strays",
        "ranks answer after more stray connections than they have descriptors",
        _gloo_strays,
    ),
    Attack(
        "deep-frames",
        "JSON nested deep before the secret ends no thread of a listener or a client",
        _deep_frames,
    ),
    Attack(
        "host-cache-connects",
        "1,500 connections to the host weight cache keep no rank out for a second",
        _host_cache_connects,
    ),
)
