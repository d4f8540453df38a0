"""SGLang's figures on 96 H100 beside the step model: what balance is worth in tokens a second.

Published: prefill EP32, 16,384 tokens a rank, 59,337 tokens/s a node with simulated perfect
balance, +18.0 % over its default; EPLB against none 1.49x in prefill; decode EP72, 256 sequences
a rank, 22,282 tokens/s a node, EPLB against none 2.54x.

Fitted: the time outside of experts, to each absolute rate; the skew of "default", to +18 %.
Predicted: EPLB against none, with the skew of TensorRT-LLM's table, and DeepSeek's balancer.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulator.loads import JUDGED, PLANNED_ON, fitted, traffic_of
from eplb import Topology, preset
from simulations.cost.expert_time import from_data_sheet
from simulations.cost.hardware import hardware_named
from simulations.cost.step_time import StepModel
from simulations.replay import Replay, Scenario, replay_all
from simulations.traffic import traffic_windows

MODEL, CARD = preset("deepseek-v3"), hardware_named("h100")
LAYERS = 61  # of the model: dense layers take time too
PREFILL_TOKENS, PREFILL_RATE = 16_384, 59_337 / 8  # of a rank; its tokens/s
DECODE_TOKENS, DECODE_RATE = 256, 22_282 / 8
DEFAULT_TO_PERFECT, TRT_WITHOUT = 1.18, 2.564
NAMES = ["none", "deepseek", "oracle:force-balanced"]
PERFECT = "oracle:force-balanced"


def replays(
    shape: float, topology: Topology, tokens: int, other_us: float, layers: int, seed: int
) -> dict[str, Replay]:
    """Steps of so many tokens a rank, by NAMES."""
    is_prefill = tokens == PREFILL_TOKENS
    traffic = traffic_of(shape, layers, topology.num_ranks * tokens, 4.0 if is_prefill else 30.0)
    step = StepModel(
        replace(MODEL, layer_ids=MODEL.layer_ids[:layers]),
        topology,
        CARD,
        from_data_sheet(CARD, MODEL),
        is_prefill,
        other_us,
        is_overlapped=True,
    )
    scenario = Scenario(
        traffic_windows(traffic, seed),
        topology,
        plan_every=PLANNED_ON,
        step_model=step,
        tokens_per_step=float(topology.num_ranks * tokens),
    )
    return {one.policy: one for one in replay_all(scenario, NAMES)}


def step_us(found: Replay) -> float:
    """Mean of the windows after the first plan."""
    return float(found.step_us[-JUDGED:].mean())


def balance(found: Replay) -> float:
    """As ``step_us``, of imbalance."""
    return float(found.per_window[-JUDGED:].mean())


def other_us(topology: Topology, tokens: int, rate: float, layers: int, seed: int) -> float:
    """Time of a layer outside of experts at which perfect balance gives the published rate."""
    wanted = tokens / rate / LAYERS * 1e6
    # So long that communication is hidden behind it: what is left beside it are the experts.
    hidden = 1e6
    found = replays(1.0, topology, tokens, hidden, layers, seed)[PERFECT]
    return wanted - (step_us(found) / layers - hidden)


def main(layers: int, seed: int) -> None:
    """Print the fits and the predicted rows."""
    few, outside = min(layers, 16), "time of a layer outside of experts"
    plain, redundant = Topology.uniform(4, 8, 8), Topology.uniform(4, 8, 9)
    trt = fitted(TRT_WITHOUT, plain, few, 4096, 4.0, seed)
    prefill_us = other_us(plain, PREFILL_TOKENS, PREFILL_RATE, few, seed)
    low, high = 0.05, 50.0
    for _ in range(10):
        middle = (low * high) ** 0.5
        found = replays(middle, plain, PREFILL_TOKENS, prefill_us, few, seed)
        gain = step_us(found["none"]) / step_us(found[PERFECT])
        low, high = (middle, high) if gain > DEFAULT_TO_PERFECT else (low, middle)
    default = balance(found["none"])
    print("| what | published | found | |")
    print(
        f"| prefill, time of a layer outside of experts | - | {prefill_us / 1e3:.1f} ms | fitted |"
    )
    print(
        f"| prefill, perfect over default | 1.18 | {gain:.2f} | fitted: imbalance {default:.2f} |"
    )
    _row(
        "prefill, EPLB over none",
        1.49,
        replays(trt, redundant, PREFILL_TOKENS, prefill_us, few, seed),
    )
    decode = Topology.uniform(9, 8, 4)  # 256 experts and 32 redundant ones on 72 ranks
    decode_us = other_us(decode, DECODE_TOKENS, DECODE_RATE, few, seed)
    print(f"| decode, {outside} | - | {decode_us / 1e3:.2f} ms | fitted |")
    _row("decode, EPLB over none", 2.54, replays(trt, decode, DECODE_TOKENS, decode_us, few, seed))


def _row(what: str, published: float, found: dict[str, Replay]) -> None:
    none, engine, perfect = (found[name] for name in NAMES)
    gain, limit = (step_us(none) / step_us(one) for one in (engine, perfect))
    print(
        f"| {what} | {published} | {gain:.2f} ({gain / published - 1:+.0%}) | predicted: imbalance "
        f"{balance(none):.2f} -> {balance(engine):.2f}; perfect balance {limit:.2f} |",
        flush=True,
    )
