"""What every process of the demo is told at its start: plain data that crosses to a child."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from rebalance.controller.loop import ControllerSettings
from rebalance.preload.cache.server import HostCacheAddress, HostCacheSettings
from rebalance.transport.ranks.settings import RankLinkSettings
from runtime.experts import ExpertSchema
from telemetry.records.sample_codec import SAMPLE_VERSION
from telemetry.reporter.drain import AT_ONCE, Tempo
from telemetry.reporter.spool import DEFAULT_BYTES, Spool
from telemetry.stores.redis.connection.address import without_password

DEPLOYMENT = "demo"
SEQUENCE_LENGTH = 64  # tokens of one sequence of text

# Largest relative error of a right answer: float32 sums in another order stay far below theirs;
# BF16 and FP8 round every activation on the way, where the reference keeps float32.
MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 3e-2, "fp8": 4e-2}
# Router logits nearer than this may be chosen either way, for the same reason.
ROUTE_TIE = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 0.5}


@dataclass(frozen=True)
class Reporting:
    """How ranks report."""

    spool_dir: Path | None = None  # of all ranks of a host; None: samples wait in memory
    spool_bytes: int = DEFAULT_BYTES  # of each rank
    tempo: Tempo = AT_ONCE
    sample_version: int = SAMPLE_VERSION

    def spool_of(self, rank: int) -> Spool | None:
        """Open a rank's spool; with what an earlier process of that rank left in it.

        Raises:
            StoreError: another process uses it.
        """
        if self.spool_dir is None:
            return None
        return Spool(self.spool_dir / f"rank-{rank:04d}", max_bytes=self.spool_bytes)


@dataclass(frozen=True)
class WorkerPlan:
    """The demo as its processes see it."""

    run: str
    store: Path | str  # a file, or a URL
    weights: Path
    text: Path | None  # an .npz of the domains' tokens; None with a trace
    trace: Path | None  # an .npz of expert_ids [L, tokens, K]; None with text
    model: ModelShape
    topology: Topology
    host_caches: tuple[HostCacheAddress, ...]  # one per host
    rendezvous: str  # handle of a runtime.group.rendezvous.Rendezvous
    tokens_per_rank: int
    window_steps: int
    sample_steps: int
    check_every: int
    drift_period_s: float
    seed: int
    staging_experts: int
    device: str  # cpu or cuda
    precision: str  # float32, bfloat16 or fp8
    dispatcher: str  # a name of runtime.dispatch.selftest.DISPATCHERS, or auto; on cuda
    controller: ControllerSettings
    # Of the controller's lease: it is started again only once it is dead, so one name will do.
    holder: str | None = None
    window_seconds: float = 0.0  # 0: windows are of window_steps
    host_cache: HostCacheSettings = field(default_factory=HostCacheSettings)  # of every host
    rank_links: RankLinkSettings | None = None  # None: ranks of other hosts are not asked
    reporting: Reporting = field(default_factory=Reporting)  # of every rank
    scrub_every_steps: int = 64
    plan_deadline_s: float = 30.0
    vote_deadline_s: float = 30.0  # for a rank's vote, and for its part in an exchange of tokens

    @property
    def store_shown(self) -> str:
        """Where the store is, as people may see it."""
        return without_password(str(self.store))

    @property
    def state_dir(self) -> Path:
        """The folder that the demo keeps what it writes in."""
        return self.weights.parent

    @property
    def spare_slots(self) -> int:
        """EMPTY slots that every rank keeps in each layer."""
        return self.controller.spare_slots

    @property
    def schema(self) -> ExpertSchema:
        """What belongs to an expert."""
        return schema_of(self.model.hidden, self.model.intermediate, self.precision)

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(sequences, positions) of a rank's step."""
        length = min(SEQUENCE_LENGTH, self.tokens_per_rank)
        return self.tokens_per_rank // length, length

    def host_of(self, rank: int) -> str | None:
        """Where other ranks reach this one, if it is said; None: the rendezvous shows it."""
        return self.rank_links.addresses[rank][0] if self.rank_links is not None else None


def schema_of(hidden: int, intermediate: int, precision: str) -> ExpertSchema:
    """What belongs to an expert of this size in this precision."""
    if precision == "fp8":
        return ExpertSchema.swiglu_fp8(hidden, intermediate)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return ExpertSchema.swiglu(hidden, intermediate, dtype)
