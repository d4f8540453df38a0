"""How the processes of ranks form their groups: one for tokens, one of its own for votes."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from eplb.errors import RankError
from eplb.settings.deployment import is_loopback
from rebalance.assembly.config import NetworkConfig
from runtime.group import form_group, gloo_listeners_closed

_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class RankGroups:
    """Every rank, twice."""

    tokens: dist.ProcessGroup  # the engine's, for the exchange of tokens
    votes: dist.ProcessGroup  # of gloo, for votes and for what ranks agree on at the start


def join_ranks(
    network: NetworkConfig, rendezvous: Store, rank: int, num_ranks: int, device: torch.device
) -> RankGroups:
    """Form both groups, as the process's default group and beside it; collective.

    For processes that have no group yet; where an engine has formed its own, see ``join_votes``.

    Args:
        network: how ranks reach each other.
        rendezvous: a store that every rank reaches, in a process that outlives them.
        rank: this one.
        num_ranks: of the group.
        device: where this rank computes. On CUDA tokens are exchanged over NCCL.

    Raises:
        RankError: the ranks did not all join in time.
    """
    is_cuda = device.type == "cuda"
    _use_interface(network)
    try:
        with ExitStack() as formed:
            if not is_cuda:
                formed.enter_context(gloo_listeners_closed())
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
                store=rendezvous,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=network.join_deadline_s),
                device_id=device if is_cuda else None,
            )
            if is_cuda:  # only now: NCCL goes on connecting ranks of the first group
                formed.enter_context(gloo_listeners_closed())
            votes = _new_votes(network)
    except RuntimeError as exc:
        raise RankError(
            f"rank {rank} met the others and could not connect to all of them: {exc}, expected "
            f"{own_ports()} to be open between the hosts (net.ipv4.ip_local_port_range)"
        ) from exc
    assert dist.group.WORLD is not None, "init_process_group sets it"
    return RankGroups(dist.group.WORLD, votes)


def join_votes(network: NetworkConfig) -> RankGroups:
    """Form the votes' group beside the default group, which an engine has formed; collective.

    Raises:
        RankError: there is no default group, or the ranks did not all join in time.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RankError("no default process group, expected the engine to have formed it")
    _use_interface(network)
    try:
        with gloo_listeners_closed():
            votes = _new_votes(network)
    except RuntimeError as exc:
        raise RankError(f"rank {dist.get_rank()} could not join the votes: {exc}") from exc
    return RankGroups(dist.group.WORLD, votes)


def alone(network: NetworkConfig) -> RankGroups:
    """Groups of this rank alone, which waits to be admitted by others.

    Raises:
        RankError: torch cannot form them.
    """
    _use_interface(network)
    store = HashStore()
    try:
        with gloo_listeners_closed():
            tokens, votes = (
                form_group(PrefixStore(name, store), 0, 1, deadline_s=network.join_deadline_s)
                for name in ("tokens", "votes")
            )
    except RuntimeError as exc:
        raise RankError(f"a rank cannot form a group of its own: {exc}") from exc
    return RankGroups(tokens, votes)


def _use_interface(network: NetworkConfig) -> None:
    # torch takes gloo's interface from the environment alone.
    if network.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network.interface)


def own_ports() -> str:
    """Name the ports at which gloo and NCCL listen on this host."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return f"ports {first}-{last}"


def _new_votes(network: NetworkConfig) -> dist.ProcessGroup:
    timeout = timedelta(seconds=network.join_deadline_s)
    votes = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(votes, dist.ProcessGroup), "every rank is a member"
    return votes


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
