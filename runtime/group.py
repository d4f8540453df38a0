"""Process groups of ranks: a rendezvous on one host, closed listeners, agreement at the start.

Three dangers of torch's own means, and what is done in their place:

- A ``TCPStore`` requires no secret, lists its keys, which shows any prefix, and keeps what it
  receives: a process that reaches its port can join as a rank, and fill its memory. ``Rendezvous``
  is a store in a memory file, which has no port. For ranks of several machines an engine provides
  the rendezvous; see ``GlooVotes``.
- gloo listens as long as its group lives, requires no secret and never closes unexpected
  connections: each one costs a descriptor, until none is left and the rank aborts. After a group is
  formed no process has a reason to connect. The listeners cannot be closed from here, so
  ``gloo_listeners_closed`` makes a filter drop each packet that would open a connection; open
  connections have other sockets.
- The object collectives of torch unpickle what a peer sends, so an attacker in the place of a peer
  could run code in every rank. ``gathered`` exchanges JSON in tensors of a fixed size, and executes
  nothing that it reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import stat
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from eplb.core.bounded_json import MAX_JSON_BYTES, decode_json
from eplb.errors import RankError

CPU = torch.device("cpu")
MAX_MESSAGE_BYTES = 8192
CHECK_EVERY = timedelta(milliseconds=20)  # while others are waited for
MAX_REFUSAL_CHARACTERS = 600  # each takes 12 bytes of JSON at most
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python does not name it
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a classic BPF program: return 0 bytes


class Rendezvous:
    """A store in a file without a name, for processes of one host and user.

    It is open as long as this object lives, in a process that outlives every rank that uses it.
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("eplb-rendezvous")
        os.fchmod(descriptor, 0o600)
        weakref.finalize(self, os.close, descriptor)
        self.handle = f"/proc/{os.getpid()}/fd/{descriptor}"  # for ranks of this host and user


def reach(handle: str, deadline_s: float) -> Store:
    """Open the rendezvous of another process.

    Args:
        handle: the handle of an open ``Rendezvous``.
        deadline_s: for each wait for another rank.

    Raises:
        RuntimeError: the process that opened it has exited, or belongs to another user.
    """
    store = FileStore(handle)
    store.set_timeout(timedelta(seconds=deadline_s))
    return store


@contextmanager
def gloo_listeners_closed() -> Iterator[None]:
    """Form gloo groups inside; afterwards what they listen on takes no further connection.

    Nothing else in this process may begin to listen meanwhile. NCCL opens connections later, too:
    a group of both backends must not be formed inside.
    """
    before = {inode for inode, _ in listeners()}
    yield
    for inode, listening in listeners():
        if inode not in before:
            program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
            pointed = struct.pack("HL", 1, ctypes.addressof(program))
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointed)


def listeners() -> Iterator[tuple[int, socket.socket]]:
    """Inode and a duplicate, closed after its turn, of each TCP socket that listens here."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:  # closed meanwhile; the folder itself
            continue
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode):
            os.close(descriptor)
            continue
        with closing(socket.socket(fileno=descriptor)) as end:
            is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found.st_ino, end


def form_group(
    rendezvous: Store,
    place: int,
    size: int,
    *,
    deadline_s: float,
    device: torch.device = CPU,
) -> dist.ProcessGroup:
    """Form a group beside the default one, which may be broken; collective.

    ``new_group`` would be a collective of the default group.

    Args:
        rendezvous: a store of this group's own; see ``PrefixStore``.
        place: of this rank in the group.
        size: of the group.
        deadline_s: for the group to be formed, and of its collectives; see ``set_deadline``.
        device: whose tensors are exchanged: over gloo those of a CPU, over NCCL those of a GPU.

    Raises:
        RuntimeError: a rank did not come.
    """
    group = dist.ProcessGroup(rendezvous, place, size)
    limit = timedelta(seconds=deadline_s)
    if device.type == "cpu":
        kind = dist.ProcessGroup.BackendType.GLOO
        backend: Any = dist.ProcessGroupGloo(rendezvous, place, size, limit)
    else:
        kind = dist.ProcessGroup.BackendType.NCCL
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        backend = dist.ProcessGroupNCCL(rendezvous, place, size, options)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    if device.type != "cpu":  # NCCL connects ranks at the first exchange: here, and not in a step
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
    return group


def end_exchanges(group: dist.ProcessGroup, device: torch.device) -> None:
    """End the kernels of an NCCL group that wait for a dead rank; the group is of no use then.

    What the device has computed of the step is wrong. The host goes on once the kernels have ended,
    after 3 ms on an H100; NCCL's own thread of this call takes 0.5 s.
    """
    backend: Any = group._get_backend(device)
    Thread(target=backend.abort, name="end-exchanges", daemon=True).start()
    torch.cuda.synchronize(device)


def set_deadline(group: dist.ProcessGroup, deadline_s: float) -> None:
    """Give the collectives of a gloo group another deadline, from the next one on."""
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.ProcessGroupGloo), "the group exchanges tensors of a CPU"
    backend._set_default_timeout(timedelta(seconds=deadline_s))


def gathered(
    mine: Any, group: dist.ProcessGroup, check: Callable[[], None] | None = None
) -> list[Any]:
    """Return every rank's message, by rank: a collective of ``group``.

    Args:
        mine: ready for JSON, at most ``MAX_MESSAGE_BYTES`` as such. Tuples arrive as lists.
        group: all of its ranks call this.
        check: called while others are waited for; what it raises ends the wait. A rank whose
            neighbours in the exchange are alive does not see that another one is dead.

    Raises:
        RankError: the message is too large, or a rank sent no JSON.
        RuntimeError: a rank died or was late.
    """
    text = json.dumps(mine).encode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise RankError(
            f"rank {group.rank()}: a message of {len(text)} bytes, "
            f"expected at most {MAX_MESSAGE_BYTES}"
        )
    return _exchanged(text, MAX_MESSAGE_BYTES, group, check)


def gathered_large(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """As ``gathered``, for messages of up to ``MAX_JSON_BYTES``: two collectives.

    Raises:
        RankError: some rank's message is too large, on all ranks alike; or a rank sent no JSON.
        RuntimeError: a rank died or was late.
    """
    text = json.dumps(mine).encode()
    longest = torch.tensor([len(text)], dtype=torch.int64, device=_device_of(group))
    group.allreduce([longest], dist.ReduceOp.MAX).wait()
    if (size := int(longest)) > MAX_JSON_BYTES:
        raise RankError(
            f"rank {group.rank()}: the largest message of all ranks has {size} bytes, "
            f"expected at most {MAX_JSON_BYTES}"
        )
    return _exchanged(text, size, group)


def _exchanged(
    text: bytes,
    size: int,
    group: dist.ProcessGroup,
    check: Callable[[], None] | None = None,
) -> list[Any]:
    # Padded with blanks, which JSON allows at the end: no length to be believed.
    padded = np.frombuffer(text.ljust(size), dtype=np.uint8).copy()
    sent = torch.from_numpy(padded).to(_device_of(group))
    rows = [torch.empty_like(sent) for _ in range(group.size())]
    # Not torch.distributed.all_gather: of a group that ``form_group`` made, it turns the error of a
    # broken connection into a ValueError.
    await_exchange(group.allgather([rows], [sent]), check)
    return [_decoded(rank, row) for rank, row in enumerate(rows)]


def await_exchange(work: dist.Work, check: Callable[[], None] | None) -> None:
    """Wait for an exchange; ``check`` as for ``gathered``.

    Raises:
        RuntimeError: a rank died or was late.
    """
    while check is not None and not work.is_completed():
        check()
        with suppress(RuntimeError):  # timeout or failure, alike by type
            work.wait(CHECK_EVERY)
    work.wait()  # raises if it failed


def _decoded(rank: int, row: torch.Tensor) -> Any:
    try:
        return decode_json(row.cpu().numpy().tobytes())
    except ValueError as exc:
        raise RankError(f"rank {rank} sent no message: {exc}") from exc


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device that the group's backends exchange tensors of; the CPU if they do."""
    devices = group._device_types
    if torch.device("cpu") in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def first_refusal(mine: str, group: dist.ProcessGroup) -> str:
    """The refusal of the lowest rank that refuses; "" if none does. The same on every rank."""
    texts = gathered(mine[:MAX_REFUSAL_CHARACTERS], group)
    refusals = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return refusals[0] if refusals else ""


def first_sentence(exc: Exception) -> str:
    """The error of a communication library, without its source position and advice."""
    found = re.sub(r"^\[\S+:\d+\] ", "", str(exc).strip())
    return found.split("\n")[0].split(". ")[0]
