"""What is served: one engine, its model, its load and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.engines.served.load import Load


@dataclass(frozen=True)
class Run:
    """One engine that serves."""

    name: str
    mode: str  # "none", "own" or "plugin"
    load: Load
    rounds: int
    size: str = "small"
    dtype: str = "bfloat16"
    quantization: str = ""
    asynchronous: bool = True
    graphs: bool = False
    ranks: int = 4
    sequences: int = 32  # of a rank at once
    interval: int = 4  # steps of vLLM's window, and between two rebalances
    redundant: int = 8
    changes: int = 0  # rebalances that change a slot, at least
    faults: int = 0  # that are planted afterwards
    probes: int = 128
    order: str = "forward"
    is_judged: bool = True  # whether log-probabilities are asked for
    reference: str = ""  # the run whose answers these are compared with
    at_most_s: float = 150.0
    settings: dict[str, str] = field(default_factory=dict)  # of the plug-in's file, by section.name
    communicator: str = "torch_gloo"  # vLLM's, which moves experts
    incidents: dict[str, str] = field(default_factory=dict)  # names of ``incidents``, by round
