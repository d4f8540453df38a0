"""What ``eplb demo`` takes: its own options, the settings that have a flag, and its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

# A deployment begins by observing, on GPUs; the demo is to show rebalances, on any machine.
DEFAULTS: dict[str, Any] = {
    "controller.stage": "all",
    "topology.device": "cpu",
    "topology.nodes": 2,
    "topology.ranks_per_node": 4,
    "model.layers": 6,
    "model.experts": 64,
    "model.top_k": 6,
    "model.hidden": 64,
    "model.intermediate": 128,
    "model.precision": "float32",
    "telemetry.sample_steps": 1,  # until the steps of a window are known (api/demo/setup.py)
}
# On GPUs the sizes are those that DeepEP's kernels know, and ranks are GPUs of one host.
CUDA_DEFAULTS: dict[str, Any] = {
    "topology.nodes": 1,
    "model.layers": 3,
    "model.experts": 32,
    "model.hidden": 2048,
    "model.intermediate": 1408,
    "model.precision": "bfloat16",
}
TOKENS_PER_RANK = {"cpu": 256, "cuda": 128}


@dataclass(frozen=True)
class Options:
    """What a demo has beside the settings of its deployment."""

    seconds: Annotated[float, typer.Option(min=0.001, max=31_536_000, help="How long.")] = 60.0
    tokens_per_rank: Annotated[
        int,
        typer.Option(min=0, max=1_048_576, help="Tokens of a rank in a step; 0: 256, on GPUs 128."),
    ] = 0
    text: Annotated[list[Path] | None, typer.Option(help="Files or folders of text.")] = None
    trace: Annotated[Path | None, typer.Option(help="Recorded routing instead of text.")] = None
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed of weights and text.")
    ] = 1
    check_every: Annotated[
        int, typer.Option(min=1, max=10**9, help="Steps between two reference checks.")
    ] = 8
    dispatcher: Annotated[str, typer.Option(help="cuda: auto, or a name.")] = "auto"
    serve: Annotated[bool, typer.Option("--serve", help="Serve until interrupted.")] = False
    resume: Annotated[bool, typer.Option("--resume", help="Start from the last placement.")] = False
    view: Annotated[
        Literal["auto", "live", "plain", "off"], typer.Option(help="What is shown meanwhile.")
    ] = "auto"


@dataclass(frozen=True)
class SettingFlags:
    """Settings that have a flag of their own; None: it is not given."""

    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default cpu.")] = None
    precision: Annotated[str | None, typer.Option(help="cuda: bfloat16 or fp8.")] = None
    nodes: Annotated[int | None, typer.Option(help="Nodes of the ranks. Default 2.")] = None
    layers: Annotated[int | None, typer.Option(help="MoE layers. Default 6.")] = None
    experts: Annotated[int | None, typer.Option(help="Experts a layer. Default 64.")] = None
    top_k: Annotated[int | None, typer.Option(help="Experts a token. Default 6.")] = None
    policy: Annotated[str | None, typer.Option(help="Placement policy. Default auto.")] = None
    observe: Annotated[bool | None, typer.Option(help="Plan and report; publish nothing.")] = None
    movement: Annotated[bool | None, typer.Option(help="The kill switch.")] = None
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free. 8765.")] = None
    state_dir: Annotated[Path | None, typer.Option(help="Store and weights. .eplb")] = None
    store: Annotated[str | None, typer.Option(help="URL of the store; none: a file.")] = None
    metrics_level: Annotated[str | None, typer.Option(help="layer or rank: more series.")] = None
    log_format: Annotated[str | None, typer.Option(help="text or json, one line each.")] = None
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None
