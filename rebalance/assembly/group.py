"""How the processes of ranks form their group: tokens by one, votes by one of their own."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from eplb.core.topology import Topology
from eplb.errors import RankError
from eplb.settings.deployment import is_loopback
from rebalance.assembly.config import NetworkConfig, RankConfig
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.rank.group import RUN_OF_WAITING, Group
from runtime.group import CPU, form_group, gloo_listeners_closed

_SIOCGIFADDR = 0x8915  # linux/sockios.h


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
    votes = _votes_of(config, rank, control, [rank])
    return Group(rank, RUN_OF_WAITING, topology, votes, tokens, control)


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
    votes = _votes_of(config, rank, control, np.flatnonzero(topology.alive).tolist())
    return Group(rank, run, topology, votes, dist.group.WORLD, control, device=device)


def _votes_of(
    config: RankConfig, rank: int, control: dist.ProcessGroup, members: Sequence[int]
) -> GlooVotes:
    return GlooVotes(
        control,
        host=config.host_of(rank),
        deadline_s=config.network.join_deadline_s,
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
