"""The configuration of a rank: plain values, alike on every rank of a deployment.

Nothing here reads a file or the environment; code that does can fill these classes field by field.
Host weight caches are configured by ``rebalance.weights.cache.cache_settings.HostCacheSettings``,
controllers by ``rebalance.controller.loop.ControllerSettings``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from eplb.core.load import Phase
from eplb.declared import Setting, check_fields, documented
from eplb.errors import ConfigError
from rebalance.stage.stage_settings import StageSettings
from telemetry.load.reporter import AT_ONCE, Tempo
from telemetry.load.spool import Spool


@documented
@dataclass(frozen=True)
class NetworkConfig:
    """How the processes of ranks reach each other.

    Args:
        hosts: address of each rank's machine by which the other ranks reach it, by rank. (): the
            one from which the rendezvous is reached.
    """

    # For example "eth0"; GLOO_SOCKET_IFNAME of the environment has precedence.
    interface: Annotated[
        str | None,
        Setting("network interface of gloo and NCCL; none: the one with the host's address"),
    ] = None
    hosts: tuple[str, ...] = ()
    join_deadline_s: Annotated[
        float,
        Setting(
            "deadline for all ranks to form a group, and to reach the host cache",
            above=0,
            at_most=3600,
        ),
    ] = 60.0
    fill_deadline_s: Annotated[
        float, Setting("deadline for all ranks to load their first experts", above=0, at_most=3600)
    ] = 120.0

    def __post_init__(self) -> None:
        check_fields(self)


@documented
@dataclass(frozen=True)
class ReportingConfig:
    """How a rank reports load to the store."""

    # None where no settings are read: samples wait in memory.
    spool_dir: Annotated[
        Path | None,
        Setting("where ranks keep samples that the store lacks; none: the state folder"),
    ] = None
    spool_mb: Annotated[int, Setting("disk for such samples, each rank", at_least=1)] = (
        64  # 24,000 samples of 58 layers x 9 slots: three hours at two a second
    )
    tempo: Tempo = AT_ONCE

    def spool_of(self, rank: int) -> Spool | None:
        """Open a rank's spool; with what an earlier process of that rank left in it.

        Raises:
            StoreError: another process uses it.
        """
        if self.spool_dir is None:
            return None
        return Spool(self.spool_dir / f"rank-{rank:04d}", max_bytes=self.spool_mb * 1_000_000)


@documented
@dataclass(frozen=True)
class RankConfig:
    """How ranks balance; alike on every rank.

    Args:
        deployment: name of the deployment.
        sample_steps: steps of a sample; a divisor of the window.
        staging_experts: entries of the staging ring; the pace of migrations must fit in it.
        load_phase: of forward passes whose phase the engine does not name.
        stage: how much staging may take; None: the device's, see ``stage_on``.
        network: how the processes of ranks reach each other.
        reporting: how a rank reports load to the store.
        journal_dir: None: no journal is kept.

    Raises:
        ConfigError: a value is out of its range.
    """

    deployment: str
    sample_steps: int
    staging_experts: int
    vote_every: Annotated[
        int, Setting("steps from one vote to the next", unit="steps", at_least=2)
    ] = 2
    vote_deadline_s: Annotated[
        float,
        Setting("how late a rank's vote may be before the others time out", above=0, at_most=3600),
    ] = 30.0
    silence_s: Annotated[
        float,
        Setting(
            "time without a heartbeat after which a rank that serves counts as dead; 0: only a "
            "closed connection counts",
            at_most=3600,
        ),
    ] = 0.0
    serve_on: Annotated[
        bool,
        Setting(
            "whether the survivors of a death serve on in their processes, on CPU ranks; else all "
            "ranks end and start again"
        ),
    ] = False
    plan_deadline_s: Annotated[
        float,
        Setting("time without progress after which a migration is aborted", above=0, at_most=3600),
    ] = 30.0
    scrub_every_steps: Annotated[
        int, Setting("idle steps from one digest check of a live slot to the next; 0: no check")
    ] = 64
    load_phase: Phase = "mixed"
    stage: StageSettings | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    reporting: ReportingConfig = field(default_factory=ReportingConfig)
    journal_dir: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sample_steps < 1 or self.staging_experts < 0:
            raise ConfigError(
                f"sample_steps is {self.sample_steps} and staging_experts {self.staging_experts}, "
                "expected 1 or more and 0 or more"
            )

    def stage_on(self, device_type: str) -> StageSettings:
        """How much staging may take on "cuda" or "cpu"."""
        if self.stage is not None:
            return self.stage
        return StageSettings.while_serving() if device_type == "cuda" else StageSettings()

    def host_of(self, rank: int) -> str | None:
        """Address by which other ranks reach this one; None: the rendezvous shows it."""
        return self.network.hosts[rank] if self.network.hosts else None

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse addresses for another number of ranks.

        Raises:
            ConfigError: a rank has no address, or an address no rank.
        """
        if self.network.hosts and len(self.network.hosts) != num_ranks:
            raise ConfigError(
                f"network.hosts has {len(self.network.hosts)} addresses, "
                f"expected one for each of {num_ranks} ranks"
            )
