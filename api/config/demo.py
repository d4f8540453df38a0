"""The demo's own settings: the size of the model, the text, the length, the view."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from eplb.declared import Setting, check_fields
from eplb.errors import UnfitSetting

DEFAULT_REDUNDANCY = 1.25  # slots over experts when the slots are not given

View = Literal["auto", "live", "plain", "off"]
Precision = Literal["float32", "bfloat16", "fp8"]

# A deployment begins by observing; the demo is to show rebalances.
DEMO_DEFAULTS: dict[str, Any] = {"controller.stage": "all"}

# On GPUs the sizes are those that DeepEP's kernels know, and ranks are GPUs of one host.
CUDA_DEFAULTS: dict[str, Any] = {
    "demo.nodes": 1,
    "demo.ranks": 4,
    "demo.layers": 3,
    "demo.experts": 32,
    "demo.hidden": 2048,
    "demo.intermediate": 1408,
    "demo.tokens_per_rank": 128,
    "demo.precision": "bfloat16",
}


@dataclass(frozen=True)
class DemoSettings:
    """The model, the load and the length of ``eplb demo``."""

    device: Annotated[Literal["cpu", "cuda"], Setting("where the ranks run", short="device")] = (
        "cpu"
    )
    precision: Annotated[
        Precision, Setting("number format of the weights; fp8 has block scales", short="precision")
    ] = "float32"
    dispatcher: Annotated[str, Setting("auto, or a name of runtime.dispatch.table.DISPATCHERS")] = (
        "auto"
    )
    nodes: Annotated[
        int,
        Setting(
            "nodes; the ranks of one share a fast fabric", short="nodes", at_least=1, at_most=256
        ),
    ] = 2
    ranks: Annotated[
        int, Setting("rank processes, a multiple of the nodes", at_least=1, at_most=4096)
    ] = 8
    layers: Annotated[int, Setting("MoE layers", short="layers", at_least=1, at_most=1024)] = 6
    experts: Annotated[
        int, Setting("experts of each layer", short="experts", at_least=1, at_most=65_536)
    ] = 64
    top_k: Annotated[
        int, Setting("experts that each token is routed to", short="top_k", at_least=1, at_most=256)
    ] = 6
    slots: Annotated[
        int, Setting("slots of a layer on all ranks; 0: 1.25 times the experts", at_most=1_048_576)
    ] = 0
    spare_slots: Annotated[
        int, Setting("further slots of each rank, kept empty", short="spare_slots", at_most=4096)
    ] = 0
    hidden: Annotated[
        int, Setting("width of a token", short="hidden", at_least=1, at_most=65_536)
    ] = 64
    intermediate: Annotated[
        int, Setting("width inside an expert", short="intermediate", at_least=1, at_most=65_536)
    ] = 128
    shared_experts: Annotated[int, Setting("experts that every token is routed to", at_most=1)] = 1
    tokens_per_rank: Annotated[
        int, Setting("tokens of each rank in a step", unit="", at_least=1, at_most=1_048_576)
    ] = 256
    seconds: Annotated[float, Setting("how long the ranks serve", unit="s", above=0)] = 60.0
    text: Annotated[
        tuple[Path, ...], Setting("files or folders of text; empty: text of this machine")
    ] = ()
    trace: Annotated[Path | None, Setting("recorded routing (.npz) in place of text")] = None
    seed: Annotated[int, Setting("seed of weights, text and planner", at_most=2**32 - 1)] = 1
    join: Annotated[bool, Setting("start although another deployment uses this store")] = False
    serve: Annotated[bool, Setting("serve on until interrupted")] = False
    resume: Annotated[bool, Setting("start from the placement of the last run")] = False
    check_every: Annotated[
        int, Setting("steps between two reference checks", unit="steps", at_least=1)
    ] = 8
    json_path: Annotated[Path | None, Setting("file for the summary")] = None
    view: Annotated[View, Setting("auto: live on a terminal, plain elsewhere")] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.precision == "float32") != (self.device == "cpu"):
            expected = "float32 on the cpu, bfloat16 or fp8 on cuda"
            raise UnfitSetting("precision", self.precision, expected)
        if self.ranks % self.nodes:
            expected = f"a multiple of {self.nodes}, the number of nodes"
            raise UnfitSetting("ranks", self.ranks, expected)
        if self.top_k > self.experts:
            expected = f"at most {self.experts}, the number of experts"
            raise UnfitSetting("top_k", self.top_k, expected)
        if self.slots == 0:
            # Two replicas of an expert on one rank balance nothing: experts * ranks are enough.
            wanted = min(DEFAULT_REDUNDANCY * self.experts, self.experts * self.ranks)
            object.__setattr__(self, "slots", self.ranks * math.ceil(wanted / self.ranks))
        elif self.slots < self.experts:
            expected = f"at least {self.experts}, the number of experts"
            raise UnfitSetting("slots", self.slots, expected)
        elif self.slots % self.ranks:
            expected = f"a multiple of {self.ranks}, the number of ranks"
            raise UnfitSetting("slots", self.slots, expected)
        elif self.slots > self.experts * self.ranks:
            expected = f"at most {self.experts * self.ranks}, every expert on every rank"
            raise UnfitSetting("slots", self.slots, expected)
        if self.trace is not None and self.text:
            raise UnfitSetting("trace", str(self.trace), "either a trace or text, not both")
