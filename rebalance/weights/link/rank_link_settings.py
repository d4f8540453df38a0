"""Settings of the links between ranks: addresses, secret, bandwidth, deadlines.

A rank with mapped memory is never asked this way. These links serve ranks of other hosts, and GPUs
of one host that cannot map each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from eplb.declared import Setting
from eplb.errors import ConfigError
from rebalance.weights.link.link_settings import (
    SERVING_BYTES_PER_SECOND,
    HostAddress,
    check_address,
    check_limits,
)
from rebalance.weights.link.tls import TlsFiles


@dataclass(frozen=True)
class RankLinkSettings:
    """Where each rank can be asked for the bytes of its live slots; alike on every rank.

    Off where ranks have no such settings at all. What a rank takes in is within the budget of
    ``StageSettings.network``.
    """

    addresses: tuple[HostAddress, ...]  # of all ranks, in their order
    secret: bytes = field(repr=False)  # of the deployment; clients without it are refused
    bytes_per_second: Annotated[
        float,
        Setting(
            "rate at which a rank sends to other ranks", unit="bytes/s", above=0, at_most=10**15
        ),
    ] = SERVING_BYTES_PER_SECOND
    silence_s: Annotated[
        float,
        Setting(
            "time without a byte after which a rank is unreachable and the next source is asked",
            above=0,
            at_most=3600,
        ),
    ] = 2.0
    # Not settings: the bandwidth is limited above, and a chunk of 8 MiB takes 7 ms of it.
    max_transfers: int = 4  # transfers that a rank sends at a time; the others wait
    deadline_s: float = 5.0  # for one chunk
    back_off_s: float = 30.0  # upper limit of the back-off of a failed rank
    tls: TlsFiles | None = None  # None: bytes are not encrypted

    def __post_init__(self) -> None:
        check_limits(vars(self), "ranks")
        for address in self.addresses:
            check_address(address)
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
