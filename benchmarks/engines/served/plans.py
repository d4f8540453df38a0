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


def measured(ranks: int, rounds: int = 90, interval: int = 64) -> list[Run]:
    """Without EPLB, with vLLM's own, and with the plug-in as it is set by default; each twice.

    The second half is in the reverse order, so that a drift of the machine does not favour one.
    """
    tokens = {"prompt_tokens": 512, "answer_tokens": 32}
    load = Load(256 * rounds, 256, **tokens, rounds_of_topic=15, seed=SEED)
    each = {
        "load": load,
        "rounds": rounds,
        "size": "wide",
        "ranks": ranks,
        "sequences": 256 // ranks,
        "interval": interval,
        "graphs": True,
        "is_judged": False,
        "at_most_s": 60.0,
    }
    modes = ("none", "own", "plugin")
    first = [Run(f"measured-{mode}", mode=mode, **each) for mode in modes]
    return [*first, *(replace(run, name=f"{run.name}-again") for run in reversed(first))]


def incidents(ranks: int) -> list[Run]:
    """Deaths, stops, reloads and sleep while maps change, compared with BF16's reference."""
    moved = proof_of("bfloat16", ranks, prompts=10240, changes=20, faults=0)[2]
    moved = replace(moved, interval=16, at_most_s=150.0)
    reload = replace(moved, incidents={"12": "reload"})
    kept = {**EAGER, "engine.records": '"on"'}
    return [
        replace(moved, name="incident-deaths", incidents={"6": "kill-store", "20": "stop-rank"}),
        replace(moved, name="incident-sleep", incidents={"10": "sleep", "20": "sleep"}),
        replace(reload, name="incident-reload"),
        replace(reload, name="incident-reload-own", mode="own", changes=0),
        replace(moved, name="records", settings=kept, interval=2, changes=100),
    ]


def communicators(ranks: int) -> list[Run]:
    """BF16 while vLLM moves by NIXL, and by NCCL; with a reference and bounds of their own."""
    runs = proof_of("bfloat16", ranks, prompts=10240, changes=100, faults=20)
    _, _, graphs, sync = runs[:4]
    return [
        *runs[:2],
        replace(graphs, name="nixl-async-graphs", communicator="nixl"),
        replace(sync, name="nixl-sync", communicator="nixl"),
        replace(sync, name="nccl-sync", communicator="torch_nccl"),
    ]


def bring_up(ranks: int) -> list[Run]:
    """A first look at everything, in two minutes."""
    proof = proof_of("float32", ranks, prompts=2048, changes=10, faults=4)[:3]
    return [*proof, *measured(ranks, rounds=10)[:3]]


def proof(ranks: int) -> list[Run]:
    """Over 10,000 answers and 300 maps in each run of the plug-in."""
    many = {"prompts": 10240, "changes": 300, "faults": 20}
    return [
        *proof_of("bfloat16", ranks, **many),
        *incidents(ranks),
        *proof_of("float32", ranks, **many)[:3],
        *proof_of("bfloat16", ranks, **many, quantization="fp8_per_channel"),
    ]


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
    "communicators": communicators,
    "measured": measured,
    "cpu": on_cpu,
}
