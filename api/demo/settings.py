"""The demo's own settings: the size of the model, the text, the length, the view."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from api.config.fields import YEAR_S, Number, Section, Whole, setting

DEPLOYMENT = "demo"
DEFAULT_REDUNDANCY = 1.25  # slots over experts when the slots are not given

View = Literal["auto", "live", "plain", "off"]
Precision = Literal["float32", "bfloat16", "fp8"]

# A deployment begins by observing; the demo is to show rebalances.
DEMO_DEFAULTS: dict[str, Any] = {"controller.stage": "all"}

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


class DemoSettings(Section):
    """The model, the load and the length of ``eplb demo``."""

    device: Literal["cpu", "cuda"] = setting("cpu", "where the ranks run", short="device")
    precision: Precision = setting(
        "float32", "of the weights; fp8 has block scales", short="precision"
    )
    dispatcher: str = setting("auto", "auto, or a name of runtime.dispatch.table.DISPATCHERS")
    nodes: Whole = setting(
        2, "nodes; the ranks of one share a fast fabric", short="nodes", ge=1, le=256
    )
    ranks: Whole = setting(8, "rank processes, a multiple of the nodes", ge=1, le=4096)
    layers: Whole = setting(6, "MoE layers", short="layers", ge=1, le=1024)
    experts: Whole = setting(64, "experts of each layer", short="experts", ge=1, le=65_536)
    top_k: Whole = setting(6, "experts that each token is routed to", short="top_k", ge=1, le=256)
    slots: Whole = setting(
        0, "slots of a layer on all ranks; 0: 1.25 times the experts", ge=0, le=1_048_576
    )
    spare_slots: Whole = setting(
        0, "further slots of each rank, kept empty", short="spare_slots", ge=0, le=4096
    )
    hidden: Whole = setting(64, "width of a token", short="hidden", ge=1, le=65_536)
    intermediate: Whole = setting(
        128, "width inside an expert", short="intermediate", ge=1, le=65_536
    )
    shared_experts: Whole = setting(1, "experts that every token is routed to", ge=0, le=1)
    tokens_per_rank: Whole = setting(256, "tokens of each rank in a step", ge=1, le=1_048_576)
    seconds: Number = setting(60.0, "how long the ranks serve", unit="s", gt=0, le=YEAR_S)
    text: list[Path] = setting([], "files or folders of text; empty: text of this machine")
    trace: Path | None = setting(None, "recorded routing (.npz) in place of text")
    seed: Whole = setting(1, "seed of weights, text and planner", ge=0, le=2**32 - 1)
    join: bool = setting(False, "start although another deployment uses this store")
    serve: bool = setting(False, "serve on until interrupted")
    resume: bool = setting(False, "start from the placement of the last run")
    check_every: Whole = setting(
        8, "steps between two reference checks", unit="steps", ge=1, le=1_000_000_000
    )
    json_path: Path | None = setting(None, "file for the summary")
    view: View = setting("auto", "auto: live on a terminal, plain elsewhere")

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

    @field_validator("trace")
    @classmethod
    def _trace_or_text(cls, trace: Path | None, info: ValidationInfo) -> Path | None:
        if trace is not None and info.data.get("text"):
            raise ValueError("expected either a trace or text, not both")
        return trace
