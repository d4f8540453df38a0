"""All that ``eplb demo`` can be told, and what of it fits together.

Where a setting comes from, and how a refusal names that, is in ``api/settings.py``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from eplb.decision.gate import CostModel
from telemetry.records.sample_codec import READABLE_VERSIONS, SAMPLE_VERSION

HOUR_S, YEAR_S = 3600, 31_536_000
DEFAULT_REDUNDANCY = 1.25  # slots over experts when the slots are not given

View = Literal["auto", "live", "plain", "off"]
Precision = Literal["float32", "bfloat16", "fp8"]

# On GPUs the sizes are those that DeepEP's kernels know, and ranks are GPUs of one host.
CUDA_DEFAULTS: dict[str, Any] = {
    "nodes": 1,
    "ranks": 4,
    "layers": 3,
    "experts": 32,
    "hidden": 2048,
    "intermediate": 1408,
    "tokens_per_rank": 128,
    "precision": "bfloat16",
}


def _not_a_switch(value: object) -> object:
    """Refuse true and false where a number is meant; pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Whole = Annotated[int, BeforeValidator(_not_a_switch)]
Number = Annotated[float, BeforeValidator(_not_a_switch), Field(allow_inf_nan=False)]


class DemoSettings(BaseModel):
    """All that ``eplb demo`` can be told; a field stands after those it is checked against.

    Every number has an upper bound, far above what is of use: a slip of the finger is refused here
    and not found by a process that runs out of memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    device: Literal["cpu", "cuda"] = Field("cpu", description="where the ranks run")
    precision: Precision = Field("float32", description="of weights; fp8 has block scales")
    dispatcher: str = Field(
        "auto", description="auto, or one of runtime.dispatch.selftest.DISPATCHERS"
    )
    nodes: Whole = Field(2, ge=1, le=256, description="nodes; the ranks of one share a fast fabric")
    ranks: Whole = Field(8, ge=1, le=4096, description="rank processes, a multiple of the nodes")
    layers: Whole = Field(6, ge=1, le=1024, description="MoE layers")
    experts: Whole = Field(64, ge=1, le=65_536, description="experts of each layer")
    top_k: Whole = Field(6, ge=1, le=256, description="experts that each token goes to")
    slots: Whole = Field(
        0, ge=0, le=1_048_576, description="slots of all ranks; 0: 1.25 times the experts"
    )
    spare_slots: Whole = Field(
        0, ge=0, le=4096, description="further slots of each rank, kept empty"
    )
    host_cache_mode: Literal["full", "hot", "ring"] = Field(
        "full", description="records in host memory: all, those used last, or a small ring"
    )
    host_cache_records: Whole = Field(
        0, ge=0, le=100_000_000, description="records that a hot host cache or a ring has room for"
    )
    other_hosts: Literal["off", "before_disk", "after_disk"] = Field(
        "off", description="whether a host asks the others for records, and when; and ranks, ranks"
    )
    record_file: bool = Field(False, description="keep expert records in a file beside the weights")
    hidden: Whole = Field(64, ge=1, le=65_536, description="width of a token")
    intermediate: Whole = Field(128, ge=1, le=65_536, description="width inside an expert")
    shared_experts: Whole = Field(1, ge=0, le=1, description="experts that every token goes to")
    tokens_per_rank: Whole = Field(
        256, ge=1, le=1_048_576, description="tokens of each rank in a step"
    )
    window_tokens: Whole = Field(
        16384, ge=1, le=1_000_000_000, description="tokens of all ranks in a load window"
    )
    seconds: Number = Field(60.0, gt=0, le=YEAR_S, description="how long the ranks run")
    text: list[Path] = Field([], description="files or folders of text; none: what is installed")
    trace: Path | None = Field(None, description="recorded routing instead of text (.npz)")
    seed: Whole = Field(1, ge=0, le=2**32 - 1, description="seed of weights, text and planner")
    policy: str = Field("auto", min_length=1, description="placement policy")
    observe: bool = Field(False, description="plan and report, but publish nothing")
    movement: bool = Field(True, description="the kill switch: off means that no weight moves")
    join: bool = Field(False, description="start although another runs on this store")
    serve: bool = Field(False, description="serve on until interrupted")
    host: str = Field("127.0.0.1", min_length=1, description="address of the HTTP service")
    port: Whole = Field(8765, ge=0, le=65535, description="port of the HTTP service; 0: any free")
    json_path: Path | None = Field(None, description="where to write the summary")
    state_dir: Path = Field(Path(".eplb"), description="folder of the store and the weights")
    store: str = Field("", description="URL of the load store; none: a file in the state folder")
    spool_dir: Path | None = Field(
        None, description="where ranks keep samples that the store lacks; none: the state folder"
    )
    spool_mb: Whole = Field(
        64, ge=1, le=1_000_000, description="MB of disk for such samples of each rank"
    )
    store_interval: Number = Field(
        0.0, ge=0, le=HOUR_S, description="least seconds between two writes of a rank to the store"
    )
    sample_version: Whole = Field(
        SAMPLE_VERSION,
        ge=1,
        le=max(READABLE_VERSIONS),
        description="in which ranks write samples; an older one in an upgrade",
    )
    window_seconds: Number = Field(
        0.0,
        ge=0,
        le=HOUR_S,
        description="seconds of a load window; 0: as many steps as window_tokens take",
    )
    keep_samples_s: Number = Field(
        3600.0,
        gt=0,
        le=10 * YEAR_S,
        description="seconds that samples are kept; then a minute is one roll-up",
    )
    keep_minutes_s: Number = Field(
        86_400.0,
        gt=0,
        le=10 * YEAR_S,
        description="seconds that roll-ups of a minute are kept; then of an hour",
    )
    keep_hours_s: Number = Field(
        2_592_000.0, gt=0, le=10 * YEAR_S, description="seconds that roll-ups of an hour are kept"
    )
    keep_events: Whole = Field(
        100_000, ge=0, le=10_000_000, description="events that are kept, the latest"
    )
    lease_ttl_s: Number = Field(
        10.0,
        gt=0,
        le=HOUR_S,
        description="seconds that the controller's lease lasts; more than a plan takes",
    )
    pay_back_s: Number = Field(
        CostModel.pay_back_s,
        ge=0,
        le=1_000_000_000,
        description="seconds of serving in which a move must pay back",
    )
    plan_windows: Whole = Field(16, ge=1, le=64, description="windows that a plan looks back on")
    resume: bool = Field(False, description="go on from the placement of the last run")
    restart_after_death: Whole = Field(
        3,
        ge=0,
        le=1_000_000,
        description="restarts of the ranks within restart_window_s; one more exit ends the demo",
    )
    process_restarts: Whole = Field(
        20,
        ge=0,
        le=1_000_000,
        description="restarts of each other process within restart_window_s; then it stays down",
    )
    restart_window_s: Number = Field(
        3600.0, ge=1, le=2_592_000, description="seconds that both budgets of restarts look back on"
    )
    restart_delay_s: Number = Field(
        5.0, ge=0, le=3600, description="most seconds before such a process is started again"
    )
    hung_after_s: Number = Field(
        30.0,
        ge=1,
        le=3600,
        description="seconds without a turn until such a process is killed; more than a plan takes",
    )
    scrub_every_steps: Whole = Field(
        64,
        ge=0,
        le=1_000_000_000,
        description="idle steps from one scrubbed slot to the next; 0: none is scrubbed",
    )
    plan_deadline_s: Number = Field(
        30.0,
        gt=0,
        le=HOUR_S,
        description="how long a migration may stand still before it is dropped",
    )
    vote_deadline_s: Number = Field(
        30.0, gt=0, le=HOUR_S, description="how late a rank may be before the others end without it"
    )
    check_every: Whole = Field(
        8, ge=1, le=1_000_000_000, description="steps between two reference checks"
    )
    metrics_level: Literal["default", "layer", "rank"] = Field(
        "default", description="series of /metrics for each layer, or each layer and rank"
    )
    view: View = Field("auto", description="auto: live on a terminal, plain elsewhere")

    @field_validator("precision")
    @classmethod
    def _precision_fits_device(cls, precision: str, info: ValidationInfo) -> str:
        if (precision == "float32") != (info.data.get("device") == "cpu"):
            raise ValueError("expected float32 on the cpu, bfloat16 or fp8 on cuda")
        return precision

    @field_validator("ranks")
    @classmethod
    def _ranks_fill_nodes(cls, ranks: int, info: ValidationInfo) -> int:
        nodes = info.data.get("nodes")
        if nodes and ranks % nodes:
            raise ValueError(f"expected a multiple of {nodes}, the number of nodes")
        return ranks

    @field_validator("top_k")
    @classmethod
    def _top_k_within_experts(cls, top_k: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts")
        if experts and top_k > experts:
            raise ValueError(f"expected at most {experts}, the number of experts")
        return top_k

    @field_validator("slots")
    @classmethod
    def _slots_fit(cls, slots: int, info: ValidationInfo) -> int:
        experts, ranks = info.data.get("experts"), info.data.get("ranks")
        if not experts or not ranks:
            return slots  # one of those two is refused already
        if slots == 0:
            # Two replicas of an expert on one rank balance nothing: experts * ranks are enough.
            wanted = min(DEFAULT_REDUNDANCY * experts, experts * ranks)
            even: int = ranks * math.ceil(wanted / ranks)
            return even
        if slots < experts:
            raise ValueError(f"expected at least {experts}, the number of experts")
        if slots % ranks:
            raise ValueError(f"expected a multiple of {ranks}, the number of ranks")
        if slots > experts * ranks:
            raise ValueError(f"expected at most {experts * ranks}, every expert on every rank")
        return slots

    @field_validator("host_cache_records")
    @classmethod
    def _host_cache_has_room(cls, records: int, info: ValidationInfo) -> int:
        if (info.data.get("host_cache_mode") == "full") != (records == 0):
            raise ValueError("expected a number of records with hot or ring, and none with full")
        return records

    @field_validator("store")
    @classmethod
    def _store_is_shared(cls, store: str) -> str:
        if store == "memory:":
            raise ValueError("expected a store that several processes can share")
        return store

    @field_validator("sample_version")
    @classmethod
    def _version_is_known(cls, version: int) -> int:
        if version not in READABLE_VERSIONS:
            raise ValueError(f"expected one of {', '.join(map(str, READABLE_VERSIONS))}")
        return version

    @field_validator("trace")
    @classmethod
    def _trace_or_text(cls, trace: Path | None, info: ValidationInfo) -> Path | None:
        if trace is not None and info.data.get("text"):
            raise ValueError("expected either a trace or text, not both")
        return trace
