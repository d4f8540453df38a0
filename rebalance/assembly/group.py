"""How the processes of ranks form their group: tokens by one, votes by one of their own.

join_ranks   all ranks of a start, through the store in which they met (meeting.py)
join_votes   the same, beside the default group that an engine has formed
wait_alone   a rank that waits to be admitted
rejoin       the members of a next group, through the state store: no rank holds that rendezvous
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from eplb.clock import Deadline
from eplb.core.topology import Topology
from eplb.errors import RankError
from eplb.migration.recovery import run_of
from eplb.settings.deployment import is_loopback
from rebalance.assembly.config import NetworkConfig, RankConfig
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.rank.group import RUN_OF_WAITING, Group
from runtime.group import CPU, form_group, gloo_listeners_closed
from telemetry.state.store import StateStore

_SIOCGIFADDR = 0x8915  # linux/sockios.h
CHECK_S = 0.02  # from one look at whether a group that is being formed is void to the next
# From one look for another rank's address to the next: at first, and at most.
MEET_S, MEET_AGAIN_S = 0.002, 0.05


def join_ranks(
    config: RankConfig, rendezvous: Store, rank: int, topology: Topology, device: torch.device
) -> Group:
    """Form the group of a start, with the process's default group for tokens; collective.

    For processes that have no group yet; where an engine has formed its own, see ``join_votes``.

    Args:
        config: how ranks reach each other.
        rendezvous: a store that every rank reaches, in a process that outlives them.
        rank: this one.
        topology: all ranks; those that are alive in it start together.
        device: where this rank computes. On CUDA tokens are exchanged over NCCL.

    Raises:
        RankError: the ranks did not all join in time.
    """
    network, is_cuda = config.network, device.type == "cuda"
    members = np.flatnonzero(topology.alive).tolist()
    _use_interface(network)
    try:
        with ExitStack() as formed:
            if not is_cuda:
                formed.enter_context(gloo_listeners_closed())
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=rendezvous,
                rank=members.index(rank),
                world_size=len(members),
                timeout=timedelta(seconds=network.join_deadline_s),
                device_id=device if is_cuda else None,
            )
            if is_cuda:  # only now: NCCL goes on connecting ranks of the first group
                formed.enter_context(gloo_listeners_closed())
            control = _new_control(network)
    except RuntimeError as exc:
        raise RankError(
            f"rank {rank} met the others and could not connect to all of them: {exc}, expected "
            f"{own_ports()} to be open between the hosts (net.ipv4.ip_local_port_range)"
        ) from exc
    return _with_votes(config, rank, topology, control, device)


def join_votes(
    config: RankConfig, topology: Topology, *, run: str = "", device: torch.device = CPU
) -> Group:
    """Form a group beside the default group, which an engine has formed; collective.

    Args:
        config: how ranks reach each other.
        topology: all ranks; those that are alive in it are in the default group.
        run: name of this start of all ranks, which the store has on record.
        device: where this rank computes.

    Raises:
        RankError: there is no default group, or the ranks did not all join in time.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RankError("no default process group, expected the engine to have formed it")
    place, network = dist.get_rank(), config.network
    _use_interface(network)
    try:
        with gloo_listeners_closed():
            control = _new_control(network)
    except RuntimeError as exc:
        raise RankError(f"rank {place} could not join the votes: {exc}") from exc
    rank = int(np.flatnonzero(topology.alive)[place])
    return _with_votes(config, rank, topology, control, device, run=run)


def wait_alone(config: RankConfig, rank: int, topology: Topology) -> Group:
    """Form the group of a rank that waits to be admitted by others.

    Raises:
        RankError: torch cannot form it.
    """
    network = config.network
    _use_interface(network)
    store = HashStore()
    try:
        with gloo_listeners_closed():
            tokens, control = (
                form_group(PrefixStore(name, store), 0, 1, deadline_s=network.join_deadline_s)
                for name in ("tokens", "votes")
            )
    except RuntimeError as exc:
        raise RankError(f"a rank cannot form a group of its own: {exc}") from exc
    votes = _votes_of(config, rank, control, [rank], network.join_deadline_s)
    return Group(rank, RUN_OF_WAITING, topology, votes, tokens, control)


def let_go(held: list[object]) -> None:
    """Delete what refers to gloo groups that nobody uses any more, with their sockets and threads.

    The deletion of a broken group waits for its exchanges, up to their deadline. torch does not
    hold the interpreter meanwhile, so a thread of its own does it.

    Args:
        held: the last references.
    """
    Thread(target=held.clear, name="eplb-old-groups", daemon=True).start()


def rejoin(
    name: str,
    before: Group,
    members: Sequence[int],
    rendezvous: StoreRendezvous,
    *,
    run: str,
    config: RankConfig,
) -> Group:
    """Form the next group, separate from one that serves or is broken; each member calls this.

    gloo waits for a rank that never comes up to its deadline. So the group is formed on a thread of
    its own, which is left alone once the rendezvous' check fails.

    Args:
        name: tells the keys of this group from those of others in the rendezvous.
        before: the group that this rank is in.
        members: of the next one, in order.
        rendezvous: its membership, and the deadline for all to have joined.
        run: in which the members started.
        config: how ranks reach each other.

    Raises:
        RankError: a member died or timed out meanwhile.
    """
    rank, device, deadline_s = before.rank, before.device, rendezvous.deadline_s
    place, size = members.index(rank), len(members)
    alive = np.isin(np.arange(before.topology.num_ranks), members)
    is_void, made = Event(), Future[Group]()

    def form_one(what: str, device: torch.device = CPU) -> dist.ProcessGroup:
        store = PrefixStore(f"{name}-{what}", rendezvous)
        return form_group(store, place, size, deadline_s=deadline_s, device=device)

    def form() -> Group:
        # NCCL goes on to listen; its group is formed before listeners are closed.
        tokens = form_one("tokens", device) if device.type != "cpu" else None
        with gloo_listeners_closed():
            tokens = tokens or form_one("tokens")
            control = form_one("control")
            if is_void.is_set():  # else listeners were closed that later groups have opened since
                raise RankError(f"the groups {name!r} were given up")
        votes = _votes_of(config, rank, control, members, deadline_s)
        return Group(
            rank,
            run_of(run, rendezvous.membership),
            replace(before.topology, alive=alive),
            votes,
            tokens,
            control,
            rendezvous.membership,
            device,
        )

    def form_on_thread() -> None:
        try:
            made.set_result(form())
        except Exception as exc:
            made.set_exception(exc)

    Thread(target=form_on_thread, name="eplb-new-groups", daemon=True).start()
    while not made.done():
        try:
            rendezvous.look()
        except BaseException:
            is_void.set()
            made.add_done_callback(_close_late)
            raise
        wait([made], CHECK_S)
    try:
        return made.result()
    except RuntimeError as exc:
        raise RankError(f"rank {rank} cannot join ranks {list(members)}: {exc}") from exc


def _close_late(made: Future[Group]) -> None:
    """Have the others notice that groups were given up, which were formed too late."""
    if made.exception() is None:
        made.result().votes.close(is_failure=True)


class StoreRendezvous(Store):
    """torch's rendezvous in the state store: it outlives every rank, and has its authentication.

    Args:
        store: of the deployment.
        membership: of the group that meets; another one has other keys.
        check: called while a key is waited for; what it raises ends the wait.
        deadline_s: for each key.
    """

    def __init__(
        self, store: StateStore, membership: int, check: Callable[[], None], deadline_s: float
    ) -> None:
        super().__init__()
        self._store, self.membership, self.look = store, membership, check
        self.deadline_s = deadline_s

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # so it is called
        """Set a key, for the others to read."""
        self._store.put_meeting(self.membership, key, bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        deadline, pause_s = Deadline.after(self.deadline_s, time.monotonic), MEET_S
        while (found := self._store.meeting(self.membership, key)) is None:
            self.look()
            if deadline.has_passed:
                raise RankError(f"the ranks did not meet in time: {key} is missing")
            Event().wait(pause_s)
            pause_s = min(2 * pause_s, MEET_AGAIN_S)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return all(self._store.meeting(self.membership, key) is not None for key in keys)


def _with_votes(
    config: RankConfig,
    rank: int,
    topology: Topology,
    control: dist.ProcessGroup,
    device: torch.device,
    *,
    run: str = "",
) -> Group:
    """The group beside the default one, by which tokens are exchanged."""
    assert dist.group.WORLD is not None, "there is a default group"
    members, deadline_s = np.flatnonzero(topology.alive).tolist(), config.network.join_deadline_s
    votes = _votes_of(config, rank, control, members, deadline_s)
    return Group(rank, run, topology, votes, dist.group.WORLD, control, device=device)


def _votes_of(
    config: RankConfig,
    rank: int,
    control: dist.ProcessGroup,
    members: Sequence[int],
    deadline_s: float,
) -> GlooVotes:
    return GlooVotes(
        control,
        host=config.host_of(rank),
        deadline_s=deadline_s,
        silence_s=config.silence_s,
        members=members,
    )


def _use_interface(network: NetworkConfig) -> None:
    # torch takes gloo's interface from the environment alone.
    if network.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network.interface)


def own_ports() -> str:
    """Name the ports at which gloo and NCCL listen on this host."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return f"ports {first}-{last}"


def _new_control(network: NetworkConfig) -> dist.ProcessGroup:
    timeout = timedelta(seconds=network.join_deadline_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup), "every rank is a member"
    return control


def interface_of(address: str) -> str | None:
    """Name the interface that has an address; None: it is not known, or of IPv6."""
    if is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(end.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return None
