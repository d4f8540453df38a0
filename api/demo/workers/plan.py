"""The arguments of every process of the demo: plain data that is sent to a child."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from api.config.migration import Staging
from api.demo.settings import DEPLOYMENT as DEPLOYMENT
from api.processes.controller import ControllerJob
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from rebalance.build.config import NetworkConfig, RankConfig, ReportingConfig
from rebalance.build.description import schema_of
from rebalance.controller.loop import ControllerSettings
from rebalance.protocol.journal import JOURNAL_FOLDER
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from runtime.experts import ExpertSchema
from telemetry.state.store import without_password

SEQUENCE_LENGTH = 64  # tokens of one sequence of text

# Largest relative error of a right answer: float32 sums in another order stay far below theirs;
# BF16 and FP8 round every activation on the way, where the reference keeps float32.
MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 3e-2, "fp8": 4e-2}
# Router logits nearer than this may be chosen either way, for the same reason.
ROUTE_TIE = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 0.5}


@dataclass(frozen=True)
class WorkerPlan:
    """Arguments of the demo's processes."""

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
    dispatcher: str  # a name of runtime.dispatch.table.DISPATCHERS, or auto; on cuda
    controller: ControllerSettings
    # Of the controller's lease: it is restarted only once it has exited, so one name will do.
    holder: str | None = None
    window_seconds: float = 0.0  # 0: windows are of window_steps
    host_cache: HostCacheSettings = field(default_factory=HostCacheSettings)  # of every host
    rank_links: RankLinkSettings | None = None  # None: ranks of other hosts are not used
    reporting: ReportingConfig = field(default_factory=ReportingConfig)  # of every rank
    controller_poll_s: float = 0.2
    staging: Staging = field(default_factory=Staging)  # what was set of the device's defaults
    scrub_every_steps: int = 64
    vote_every: int = 2
    plan_deadline_s: float = 30.0
    vote_deadline_s: float = 30.0  # for a rank's vote, and for its part in an exchange of tokens

    @property
    def store_shown(self) -> str:
        """Where the store is, without its password."""
        return without_password(str(self.store))

    @property
    def state_dir(self) -> Path:
        """The state folder of the demo."""
        return self.weights.parent

    @property
    def controller_job(self) -> ControllerJob:
        """What its controller is started with."""
        store, settings = str(self.store), self.controller
        return ControllerJob(store, DEPLOYMENT, settings, self.holder, self.controller_poll_s)

    @property
    def rank_config(self) -> RankConfig:
        """Configuration of the ranks."""
        config = RankConfig(
            DEPLOYMENT,
            sample_steps=self.sample_steps,
            staging_experts=self.staging_experts,
            vote_every=self.vote_every,
            vote_deadline_s=self.vote_deadline_s,
            plan_deadline_s=self.plan_deadline_s,
            scrub_every_steps=self.scrub_every_steps,
            network=NetworkConfig(interface="lo"),  # a host name need not resolve to anything
            rank_links=self.rank_links,
            reporting=self.reporting,
            journal_dir=self.state_dir / JOURNAL_FOLDER,
        )
        return replace(config, stage=self.staging.applied_to(config.stage_on(self.device)))

    @property
    def spare_slots(self) -> int:
        """EMPTY slots that every rank keeps in each layer."""
        return self.controller.spare_slots

    @property
    def schema(self) -> ExpertSchema:
        """Tensors of an expert."""
        return schema_of(self.model.hidden, self.model.intermediate, self.precision)

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(sequences, positions) of a rank's step."""
        length = min(SEQUENCE_LENGTH, self.tokens_per_rank)
        return self.tokens_per_rank // length, length
