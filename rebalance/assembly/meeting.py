"""How the ranks of a deployment meet, before they form a group: who is there, and with what.

    the lowest rank listens at MASTER_ADDR:MASTER_PORT
    each rank: claims its place --> sends hello --> waits for all --> proves that it has the secret

Missing ranks are named while they are waited for, and at the deadline. A second process with one
rank's place, another configuration and another secret are refused, each by all ranks. torch's own
rendezvous would wait for the first without a name, and form a group with the others.

A rank that died here and was started again ends the meeting: the other ranks compare what the dead
process has sent, so all of them start again and meet anew.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from eplb.core.bounded_json import decode_json
from eplb.errors import RankError
from rebalance.assembly.facts import HELLO, Attendance, exchange_facts

RETRY_S = 0.1
# One attempt to reach the lowest rank. Over a link that is cut, TCP repeats a longer one at doubled
# intervals: it would stay silent for as long again once the link is back.
ATTEMPT_S = 2.0
SILENCE_S = 10  # a host that acknowledges nothing for so long is gone, and the meeting over
PROBE_S = 2  # between two probes of a connection that is idle
TELL_S = 5.0  # between two reports of what a rank waits for
LEAVE_DEADLINE_S = 5.0  # for other ranks to read why the meeting is refused
REFUSAL, LEFT = "refusal", "left"


def meet(
    mine: Attendance,
    environ: Mapping[str, str],
    deadline_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> Store:
    """Meet all other ranks; returns the store in which they met, for the group to be formed.

    Args:
        mine: this rank.
        environ: MASTER_ADDR and MASTER_PORT, as torchrun and ``eplb launch`` set them.
        deadline_s: for all ranks to be there.
        tell: reports what is waited for.

    Raises:
        RankError: a rank is missing at the deadline, is there twice, or has another configuration
            or secret.
    """
    deadline = time.monotonic() + deadline_s
    store = _reach_store(mine, environ, deadline, tell)
    try:
        return _hold_meeting(mine, store, deadline, tell)
    except RuntimeError as exc:  # torch's: the rank that listens has ended
        raise RankError(f"rank {mine.rank}: the meeting of the ranks ended: {exc}") from exc


def _hold_meeting(
    mine: Attendance, store: Store, deadline: float, tell: Callable[[str], None]
) -> Store:
    if store.add(f"place/{mine.rank}", 1) > 1:
        refusal = (
            f"rank {mine.rank}: its place is taken by {_describe(store, mine.rank)}, "
            f"found this process {os.getpid()} on {mine.host} too, expected one of them"
        )
        if _hello_of(store, mine.rank).get("host", mine.host) == mine.host:
            # The first of them has died: on one host only one process has the rank's place.
            store.set(REFUSAL, refusal)
            store.set(f"{LEFT}/{mine.rank}", "")
        raise RankError(refusal)

    def exchange(what: str, message: Any) -> list[Any]:
        store.set(f"{what}/{mine.rank}", json.dumps(message))
        return _all(mine, store, what, deadline, tell)

    try:
        exchange_facts(mine, exchange)
    except RankError as exc:
        _leave(mine, store, str(exc))
        raise
    return PrefixStore("group", store)


def _leave(mine: Attendance, store: Store, refusal: str) -> None:
    """Leave a meeting that is refused; the lowest rank listens, so it is the last to leave.

    Else the others would report a connection that is lost, and not what is wrong.
    """
    if mine.rank != mine.members[0]:
        store.set(f"{LEFT}/{mine.rank}", "")
        return
    store.set(REFUSAL, refusal)
    deadline, waited = time.monotonic() + LEAVE_DEADLINE_S, Event()
    present = [rank for rank in mine.members[1:] if store.check([f"place/{rank}"])]
    left = [f"{LEFT}/{rank}" for rank in present]
    while left and not store.check(left) and time.monotonic() < deadline:
        waited.wait(RETRY_S)


def _all(
    mine: Attendance, store: Store, what: str, deadline: float, tell: Callable[[str], None]
) -> list[Any]:
    """Wait for one message of each rank."""
    keys, pause_s = [f"{what}/{rank}" for rank in mine.members], RETRY_S / 8
    tell_at = time.monotonic() + TELL_S
    # Asked again and again: a wait of the store that times out logs lines of torch's own.
    while not store.check(keys):
        if store.check([REFUSAL]):
            raise RankError(f"rank {mine.rank}: refused by {store.get(REFUSAL).decode()}")
        now = time.monotonic()
        if (left_s := deadline - now) <= 0 or now >= tell_at:
            missing = [
                r for r, key in zip(mine.members, keys, strict=True) if not store.check([key])
            ]
            named = ", ".join(map(str, missing))
            if left_s <= 0:
                raise RankError(
                    f"rank {mine.rank}: {len(keys) - len(missing)} of {len(keys)} ranks "
                    f"met in time, missing: {named}; expected all that the configuration names"
                )
            tell(f"{len(missing)} of {len(keys)} ranks: {named}")
            tell_at = now + TELL_S
        Event().wait(min(left_s, pause_s))
        pause_s = min(2 * pause_s, 4 * RETRY_S)
    return [_decode(r, store.get(key)) for r, key in zip(mine.members, keys, strict=True)]


def _decode(rank: int, text: bytes) -> Any:
    try:
        return decode_json(text)
    except ValueError as exc:
        raise RankError(f"rank {rank} sent no message: {exc}") from exc


def _hello_of(store: Store, rank: int) -> Mapping[str, Any]:
    """What the process with a place has sent; empty: nothing yet."""
    is_there = store.check([f"{HELLO}/{rank}"])
    found: Mapping[str, Any] = _decode(rank, store.get(f"{HELLO}/{rank}")) if is_there else {}
    return found


def _describe(store: Store, rank: int) -> str:
    found = _hello_of(store, rank)
    return f"process {found['pid']} on {found['host']}" if found else "another process"


def is_agents(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent has the store in which ranks meet; else the lowest rank has it."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _reach_store(
    mine: Attendance, environ: Mapping[str, str], deadline: float, tell: Callable[[str], None]
) -> Store:
    """Reach the meeting; the lowest rank opens it, unless torchrun's agent did."""
    try:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as exc:
        raise RankError(
            f"rank {mine.rank}: MASTER_ADDR is {environ.get('MASTER_ADDR')!r} and MASTER_PORT "
            f"{environ.get('MASTER_PORT')!r}, expected where ranks meet; start them with eplb "
            "launch or torchrun"
        ) from exc
    opens = mine.rank == mine.members[0] and not is_agents(environ)
    listening = _listening(mine.rank, host, port) if opens else None
    if listening is None:
        _await_listener(mine, host, port, deadline, tell)
    left_s = max(1.0, deadline - time.monotonic())
    try:
        store = TCPStore(
            host,
            port,
            None,
            opens,
            timedelta(seconds=left_s),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except RuntimeError as exc:
        raise RankError(f"rank {mine.rank} cannot meet the others at {host}:{port}: {exc}") from exc
    _end_when_silent(port)
    return PrefixStore(f"eplb/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _end_when_silent(port: int) -> None:
    """Have the kernel end the connection to the meeting once the lowest rank's host is silent.

    torch waits for an answer without a limit, and TCP alone tries for a quarter of an hour. torch
    does not give out the socket, so it is found among the open files.
    """
    # Sockets alone: of another file ``fromfd`` would leave its copy open.
    for path in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        with (
            suppress(OSError),  # it is not connected
            socket.fromfd(int(path.name), socket.AF_INET, socket.SOCK_STREAM) as line,
        ):
            if line.getpeername()[1:2] == (port,):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _listening(rank: int, host: str, port: int) -> socket.socket:
    """Listen at the rendezvous address alone; torch would at every address of the host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as exc:
        raise RankError(
            f"rank {rank} cannot listen at {host}:{port} for the other ranks "
            f"({os.strerror(exc.errno or 0)}), expected a free port of this host "
            "(network.rendezvous_port)"
        ) from exc


def _await_listener(
    mine: Attendance, host: str, port: int, deadline: float, tell: Callable[[str], None]
) -> None:
    """Wait until there is a listener, which torch would log a stack trace for each second."""
    first = f"rank {mine.members[0]}"
    tell(f"{first}, at {host}:{port}")
    while True:
        left_s = deadline - time.monotonic()
        try:
            timeout_s = max(0.01, min(ATTEMPT_S, left_s))
            with closing(socket.create_connection((host, port), timeout=timeout_s)):
                return
        except OSError as exc:
            if time.monotonic() + RETRY_S >= deadline:
                raise RankError(
                    f"rank {mine.rank}: no answer at {host}:{port} in time ({exc}), expected "
                    f"{first} to listen there"
                ) from exc
        Event().wait(RETRY_S)
