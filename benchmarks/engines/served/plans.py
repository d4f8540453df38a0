"""The runs of each plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.engines.served.load import Load
from benchmarks.engines.served.run import Run

SEED = 20261129

# Each rebalance moves experts, whatever it costs: the plug-in's planner would keep most maps.
EAGER = {
    "engine.max_moved": "0.5",
    "planner.pay_back_s": "1e9",
    "planner.target_imbalance": "1.0",
}
PER_ROUND = 256
ALONE = {"ranks": 1, "sequences": PER_ROUND, "redundant": 0}


def proof_load(prompts: int) -> Load:
    """Short prompts whose topic changes with each round."""
    tokens = {"prompt_tokens": 16, "answer_tokens": 8}
    return Load(prompts, PER_ROUND, **tokens, rounds_of_topic=1, seed=SEED)


def proof_of(
    dtype: str, ranks: int, prompts: int, changes: int, faults: int, quantization: str = ""
) -> list[Run]:
    """A format: its reference, a run for its bound, and the plug-in while maps change."""
    name, load = quantization or dtype, proof_load(prompts)
    rounds = load.num_rounds
    common = {"load": load, "rounds": rounds, "dtype": dtype, "quantization": quantization}
    common |= {"interval": 2, "probes": PER_ROUND}
    each = {**common, "ranks": ranks, "sequences": PER_ROUND // ranks}
    moved = {**each, "mode": "plugin", "settings": EAGER, "changes": changes, "at_most_s": 90.0}
    reference = f"{name}-none"
    moved["reference"] = reference
    return [
        Run(reference, mode="none", faults=faults, **each),
        Run(f"{name}-none-alone", mode="none", reference=reference, **{**common, **ALONE}),
        Run(f"{name}-plugin-async-graphs", asynchronous=True, graphs=True, **moved),
        Run(f"{name}-plugin-sync", asynchronous=False, **moved),
        Run(f"{name}-plugin-sync-graphs", asynchronous=False, graphs=True, **moved),
        Run(f"{name}-plugin-async", asynchronous=True, **moved),
    ]


def measured(ranks: int, prompts: int, interval: int = 32) -> list[Run]:
    """Without EPLB, with vLLM's own, and with the plug-in as it is set by default."""
    load = Load(prompts, 64, prompt_tokens=256, answer_tokens=8, rounds_of_topic=12, seed=SEED)
    each = {
        "load": load,
        "rounds": load.num_rounds,
        "size": "wide",
        "ranks": ranks,
        "sequences": 64 // ranks,
        "interval": interval,
        "graphs": True,
        "at_most_s": 80.0,
    }
    return [Run(f"measured-{mode}", mode=mode, **each) for mode in ("none", "own", "plugin")]


def bring_up(ranks: int) -> list[Run]:
    """A first look at everything, in two minutes."""
    proof = proof_of("float32", ranks, prompts=2048, changes=10, faults=4)[:3]
    return [*proof, *measured(ranks, prompts=1024)]


def proof(ranks: int) -> list[Run]:
    """Over 10,000 answers and 300 maps in each run of the plug-in."""
    many = {"prompts": 10240, "changes": 300, "faults": 20}
    return [
        *proof_of("bfloat16", ranks, **many),
        *proof_of("bfloat16", ranks, **many, quantization="fp8_per_channel")[:3],
        *proof_of("float32", ranks, **many)[:3],
    ]


def final(ranks: int) -> list[Run]:
    """Proof and measurement, in the order of their weight: time may end before the last ones."""
    runs = proof(ranks)
    settings = {**EAGER, "engine.records": '"on"'}
    kept = replace(runs[2], name="bfloat16-plugin-records", settings=settings, changes=100)
    return [*runs[:4], *measured(ranks, prompts=6144), *runs[6:], kept, *runs[4:6]]


def on_cpu(ranks: int) -> list[Run]:
    """The harness without a GPU."""
    load = Load(64, 16, prompt_tokens=8, answer_tokens=6, rounds_of_topic=1, seed=SEED)
    common = {"load": load, "rounds": 4, "size": "tiny", "dtype": "float32", "redundant": 0}
    return [
        Run("none", mode="none", ranks=1, sequences=16, **common),
        Run("alone", mode="none", ranks=1, sequences=8, reference="none", **common),
    ]


PLANS: dict[str, Callable[[int], list[Run]]] = {
    "bring-up": bring_up,
    "proof": proof,
    "final": final,
    "measured": lambda ranks: measured(ranks, prompts=6144),
    "cpu": on_cpu,
}
