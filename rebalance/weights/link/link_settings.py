"""Settings of links: addresses, secret, bandwidth, deadlines.

``HostLinkSettings`` are those between host caches, ``RankLinkSettings`` those between ranks. A rank
with mapped memory is never asked over a link: links serve ranks of other hosts, and GPUs of one
host that cannot map each other.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated, Literal

from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError
from rebalance.weights.link.tls import TlsFiles

HostAddress = tuple[str, int]  # a numeric address, because looking a name up has no deadline
Order = Literal["before_disk", "after_disk"]

LEAST_SECRET_BYTES = 16
# A tenth of a 100 Gbit/s link, which also carries requests and KV caches: 35 ms for 44 MB.
SERVING_BYTES_PER_SECOND = 1.25e9


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """What both kinds of links take; alike on every process of a kind.

    Raises:
        ConfigError: a secret that could be guessed, or a limit that lets nothing through.
    """

    secret: bytes = field(repr=False)  # of the deployment; clients without it are refused
    bytes_per_second: Annotated[
        float,
        Setting(
            "rate at which each one sends, and at which a host cache receives",
            unit="bytes/s",
            above=0,
            at_most=10**15,
        ),
    ] = SERVING_BYTES_PER_SECOND
    silence_s: Annotated[
        float,
        Setting(
            "time without a byte after which the other end counts as dead, and the next source is "
            "asked",
            above=0,
            at_most=3600,
        ),
    ] = 2.0
    # Not settings: the bandwidth is limited above, and a record of 44 MB takes 35 ms of it.
    max_transfers: int = 4  # that one sends at a time; further ones take turns
    deadline_s: float = 5.0  # for one transfer
    back_off_s: float = 30.0  # upper limit of the back-off of a failed server
    tls: TlsFiles | None = None  # None: bytes are not encrypted

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.secret) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"a secret of {len(self.secret)} bytes for links, "
                f"expected {LEAST_SECRET_BYTES} or more"
            )


@dataclass(frozen=True)
class HostLinkSettings(LinkSettings):
    """Which other hosts a host cache asks for records, and whether it gives them any.

    ``hosts`` may be the same list on every host: a host cache does not ask its own address. Off
    where a host cache has no such settings at all.
    """

    hosts: tuple[HostAddress, ...]
    listen: HostAddress | None = None  # None: it asks, and gives nothing
    order: Order = "before_disk"
    # For one record, including the other host's disk read.
    deadline_s: float = field(default=10.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in [*self.hosts, *([self.listen] if self.listen else [])]:
            _check_address(address)

    @property
    def others(self) -> tuple[HostAddress, ...]:
        """The hosts that are asked."""
        return tuple(host for host in self.hosts if host != self.listen)


@dataclass(frozen=True)
class RankLinkSettings(LinkSettings):
    """Where each rank can be asked for the bytes of its live slots; alike on every rank.

    Off where ranks have no such settings at all. What a rank takes in is within the budget of
    ``StageSettings.network``. A transfer is one chunk of a record.
    """

    addresses: tuple[HostAddress, ...]  # of all ranks, in their order

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.addresses:
            _check_address(address)
        if len(set(self.addresses)) < len(self.addresses):
            raise ConfigError(f"two ranks of {self.addresses} have one address, expected one each")

    def check(self, num_ranks: int) -> None:
        """Refuse settings for another number of ranks.

        Raises:
            ConfigError: a rank has no address, or an address no rank.
        """
        if len(self.addresses) != num_ranks:
            raise ConfigError(
                f"addresses of {len(self.addresses)} ranks, expected one for each of {num_ranks}"
            )


def _check_address(address: HostAddress) -> None:
    """Refuse an address that would have to be looked up, because it is no number."""
    host, port = address
    try:
        ipaddress.ip_address(host)
    except ValueError as exc:
        raise ConfigError(f"host {host!r}, expected a numeric address") from exc
    if not 0 < port < 2**16:
        raise ConfigError(f"port {port} of host {host}, expected 1..65535")
