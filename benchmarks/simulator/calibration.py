"""Published figures beside what the simulator gives, fitted figures named as fitted.

    python -m benchmarks.simulator.calibration [--part trt,...] [--layers 200] [--seed 0]

TensorRT-LLM's table (DeepSeek-R1, translation, 1,024 rows a rank): the skew of generated layers is
fitted to the imbalance without balancing alone; the rows with its balancer are then predicted, on
batches that come after those that were planned on. The dispersion of requests is that of recorded
prefill (2 to 5), not fitted; every value of that range is shown.

Per-batch plans (UltraEP's set-up: 64 ranks, 4 slots and 2 redundant ones, 8,192 tokens a rank):
skew fitted to each of its three imbalances, and what a fresh plan for each batch leaves.

The other parts: SGLang's gains, its dispatch, and arms of balancing on three kinds of hardware.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.dispatch_rules import Case
from benchmarks.planner.plan import numpy_greedy
from eplb import DispatchRule, Placement, Topology, effective_shares, imbalance, preset
from eplb.core.kernels import kernel_for
from simulations.peers import register_peers
from simulations.replay import Replay, Scenario, replay_all
from simulations.step_time import StepModel, hardware_named
from simulations.windows import Tokens, WindowSeries
from simulations.workloads import Traffic, drawn, profiles_of, traffic_windows

# -- Layers of one skew for calibration: one domain, nothing that drifts, skew fitted by bisection.

EXPERTS, TOP_K = 256, 8
PLANNED_ON, JUDGED = 16, 8  # batches


def traffic_of(shape: float, layers: int, tokens: int, dispersion: float) -> Traffic:
    """Layers of one skew, one domain, nothing that drifts."""
    return Traffic(
        layers,
        EXPERTS,
        TOP_K,
        PLANNED_ON + JUDGED,
        tokens=tokens,
        decode=0,
        shape_low=shape,
        shape_high=shape,
        hot_layers=0.0,
        domains=1,
        domain_spread=0.0,
        dispersion=dispersion,
        drift=0.0,
        diurnal=0.0,
        shift_hours=0.0,
    )


def imbalances(traffic: Traffic, topology: Topology, names: list[str], seed: int) -> list[float]:
    """Mean imbalance of each policy on the batches after the first plan."""
    scenario = Scenario(topology, load=traffic_windows(traffic, seed), plan_every=PLANNED_ON)
    found = replay_all(scenario, names)
    return [float(one.per_window[PLANNED_ON - 1 :].mean()) for one in found]


def fitted(
    wanted: float, topology: Topology, layers: int, tokens: int, dispersion: float, seed: int
) -> float:
    """The Gamma shape whose consecutive experts give the wanted imbalance."""
    low, high = 0.05, 50.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        traffic = traffic_of(middle, layers, tokens, dispersion)
        (found,) = imbalances(traffic, topology, ["none"], seed)
        low, high = (middle, high) if found > wanted else (low, middle)
    return (low * high) ** 0.5


# -- SGLang's figures on 96 H100 beside the step model: what balance is worth in tokens a second.
#
# Published: prefill EP32, 16,384 tokens a rank, 59,337 tokens/s a node with simulated perfect
# balance, +18.0 % over its default; EPLB against none 1.49x in prefill; decode EP72, 256 sequences
# a rank, 22,282 tokens/s a node, EPLB against none 2.54x.
#
# Fitted: the time outside of experts, to each absolute rate; the skew of "default", to +18 %.
# Predicted: EPLB against none, with the skew of TensorRT-LLM's table, and DeepSeek's balancer.

MODEL, CARD = preset("deepseek-v3"), hardware_named("h100")
LAYERS = 61  # of the model: dense layers take time too
PREFILL_TOKENS, PREFILL_RATE = 16_384, 59_337 / 8  # of a rank; its tokens/s
DECODE_TOKENS, DECODE_RATE = 256, 22_282 / 8
DEFAULT_TO_PERFECT, TRT_IMBALANCE = 1.18, 2.564
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
        kernel_for(CARD.name, MODEL.precision, "sglang", is_prefill=is_prefill),
        is_prefill,
        other_us,
        is_overlapped=True,
    )
    scenario = Scenario(
        topology,
        load=traffic_windows(traffic, seed),
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


def throughput_rows(layers: int, seed: int) -> None:
    """Print the fits and the predicted rows."""
    few, outside = min(layers, 16), "time of a layer outside of experts"
    plain, redundant = Topology.uniform(4, 8, 8), Topology.uniform(4, 8, 9)
    trt = fitted(TRT_IMBALANCE, plain, few, 4096, 4.0, seed)
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


# -- SGLang's ``static`` dispatch over the published plan: booked, served, and served before 0.5.7.
#
# The table was measured with the engine's own code on 12 lognormal layers of another draw. Old
# rule, written from its description: the first replica of the own GPU, else the first of the own
# node, else an even split over all.
#
# Shapes:  L layers, E experts, S slots, R ranks.

MEASURED_ON = 12  # layers of the published means
NEAR = 0.03
COLUMNS = ("none", "booked", "static", "old static")
PUBLISHED = {
    Case(128, 144, 8, 8, 0.6): (1.26, 1.003, 1.009, 1.16),
    Case(128, 144, 8, 8, 1.0): (1.52, 1.002, 1.025, 1.27),
    Case(128, 144, 8, 8, 1.4): (1.92, 1.001, 1.081, 1.30),
    Case(256, 288, 16, 8, 1.0): (1.69, 1.002, 1.094, 1.16),
    Case(256, 288, 32, 8, 0.6): (1.62, 1.007, 1.015, 1.07),
    Case(256, 288, 32, 8, 1.0): (2.28, 1.005, 1.101, 1.14),
    Case(256, 288, 32, 8, 1.4): (3.40, 1.002, 1.222, 1.26),
    Case(256, 288, 32, 32, 1.0): (2.28, 1.005, 1.019, 1.84),
    Case(256, 320, 64, 8, 1.0): (3.21, 1.018, 1.155, 1.16),
}


def old_shares(held: NDArray[np.int32], topology: Topology) -> NDArray[np.float64]:
    """[L, S] part of its expert's tokens that each slot gets under the old rule."""
    shares = np.ones(held.shape)
    ranks, nodes = topology.rank_of_slot, topology.node_of_slot
    for layer, row in enumerate(held):
        experts, counts = np.unique(row, return_counts=True)
        for expert in experts[counts > 1]:
            slots = np.flatnonzero(row == expert)
            shares[layer, slots] = 0.0
            for rank, node in enumerate(topology.node_of_rank):
                near = slots[ranks[slots] == rank]
                near = near if near.size else slots[nodes[slots] == node]
                chosen = near[:1] if near.size else slots
                shares[layer, chosen] += 1.0 / topology.num_ranks / chosen.size
    return shares


def measured(case: Case, layers: int, seed: int) -> NDArray[np.float64]:
    """[4, L] imbalance of each layer, by COLUMNS."""
    load, topology = case.draw(layers, seed), case.topology
    once = Topology.uniform(1, case.ranks, case.experts // case.ranks)
    in_order = Placement(np.tile(np.arange(case.experts), (layers, 1)), case.experts)
    held = numpy_greedy(load, case.slots, case.ranks)
    booked = Placement(held, case.experts)
    static = effective_shares(booked, topology, DispatchRule.SGLANG_STATIC)
    served = (
        Placement(held, case.experts, slot_share=share)
        for share in (static, old_shares(held, topology))
    )
    return np.array(
        [
            imbalance(load, in_order, once),
            imbalance(load, booked, topology),
            *(imbalance(load, one, topology) for one in served),
        ]
    )


def static_rows(layers: int, seed: int) -> None:
    """Print found against published; "!" marks what is off by more than both limits."""
    print(f"| E/slots/EP/ranks per node | {' | '.join(COLUMNS)} |")
    for case, published in PUBLISHED.items():
        found = measured(case, layers, seed)
        error = found.std(axis=1, ddof=1) * (1 / layers + 1 / MEASURED_ON) ** 0.5
        cells = [
            f"{mean:.3f} +- {one:.3f} of {wanted}"
            + ("" if abs(mean - wanted) <= max(NEAR, 2 * one) else " !")
            for mean, one, wanted in zip(found.mean(axis=1), error, published, strict=True)
        ]
        name = f"{case.experts}/{case.slots}/{case.ranks}/{case.per_node} sigma {case.sigma}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


# -- Arms of balancing on H20, A100 and GB200 as sjqsjq/EPLB published them (unreviewed): signs
# alone.
#
# Qwen3-235B (94 x 128) in prefill, within one domain and over six switches of domain. Time of a
# pass by the published hinge T = T_flat (1 + beta max(0, r - r_k)), under SGLang's ``static``
# dispatch; rebalances take the published seconds. Fitted: the skew, to the published imbalance
# without balancing. Assumed, because not published: a window is 16 passes, a domain lasts 6 of
# them, EPLB plans every 64 passes. Not modelled: the KV cache that redundant slots take.

ARM_EXPERTS, ARM_TOP_K, PASSES, STAY, DOMAINS = 128, 8, 16, 6, 7
ARM_TOKENS = 65_536  # of a window
REQUESTS_PER_PASS = 12.8  # of H20: 62.4 requests/s at its T(1.737); taken for the others too
EVERY = 4  # windows from one plan of EPLB to the next
ARMS = {  # policy, redundant slots of a group, interval in windows
    "frozen remap, 0 redundant": ("greedy_on_last", 0, 10**6),
    "EPLB static, 16 redundant": ("greedy_on_last", 16, 10**6),
    "EPLB dynamic, 16 redundant": ("deepseek", 16, EVERY),
    "online swap, 0 redundant (ours: auto)": ("auto", 0, 1),
}


@dataclass(frozen=True)
class Card:
    """Published figures of one kind of hardware, in the order of ARMS."""

    name: str
    ranks: int
    beta: float
    knee: float  # r_k
    requests_s: float  # without balancing, within a domain
    none: float  # imbalance without balancing
    rebalance_s: float  # of EPLB; the first takes 4.4
    within: tuple[float, ...]  # percent
    across: tuple[float, ...]


CARDS = (
    Card(
        "H20 EP8",
        *(8, 0.352, 1.093, 62.4, 1.737, 1.0),
        within=(18.0, 9.6, -1, 20.7),
        across=(0, -4.3, -6.4, 8.5),
    ),
    Card(
        "A100 EP8",
        *(8, 0.330, 1.053, 38.3, 1.737, 3.1),
        within=(21.8, -10.2, -3.2, 20.2),
        across=(3.8, -4.7, -13.8, 13.6),
    ),
    Card(
        "GB200 EP4",
        *(4, 0.184, 1.034, 151.9, 1.3345, 1.8),
        within=(6.6, 6.1, 1.9, 4.4),
        across=(1.4, -0.7, -7.4, 4.1),
    ),
)


def windows_of(shape: float, layers: int, seed: int, *, is_across: bool) -> WindowSeries:
    """Windows of one domain, or of seven in turn."""
    traffic = Traffic(
        layers,
        ARM_EXPERTS,
        ARM_TOP_K,
        decode=0,
        shape_low=shape,
        shape_high=shape,
        hot_layers=0.0,
        domains=DOMAINS,
        domain_spread=0.8,
    )

    def read() -> Iterator[Tokens]:
        profiles = profiles_of(traffic, np.random.default_rng([seed, 0]))
        rng = np.random.default_rng([seed, 1])
        for number in range(DOMAINS * STAY):
            domain = number // STAY if is_across else 0
            yield drawn(profiles[domain], ARM_TOKENS * ARM_TOP_K, 4.0, rng)

    return WindowSeries(layers, ARM_EXPERTS, read, DOMAINS * STAY, PASSES, "prefill")


def replayed(
    card: Card, windows: WindowSeries, policy: str, redundant: int, every: int, seed: int
) -> Replay:
    """One policy on one group."""
    topology = Topology.uniform(1, card.ranks, (ARM_EXPERTS + redundant) // card.ranks)
    # A slot that a plan leaves empty is not legal in the engine; without redundancy there is none.
    rule = DispatchRule.SGLANG_STATIC if redundant else DispatchRule.WEIGHTED
    scenario = Scenario(topology, seed=seed, dispatch=rule, load=windows, plan_every=every)
    (found,) = replay_all(scenario, [policy])
    assert not found.failed, found.failed
    return found


def arm_shape(card: Card, layers: int, seed: int) -> float:
    """The Gamma shape that gives the published imbalance within one domain."""
    low, high = 0.2, 200.0
    for _ in range(10):
        middle = (low * high) ** 0.5
        windows = windows_of(middle, layers, seed, is_across=False)
        found = replayed(card, replace(windows, num_windows=None), "none", 0, 1, seed).mean
        low, high = (middle, high) if found > card.none else (low, middle)
    return (low * high) ** 0.5


def seconds(card: Card, found: Replay, *, is_stalled: bool) -> float:
    """Time of all passes, and of rebalances that serving waits for."""
    whole = REQUESTS_PER_PASS / card.requests_s
    flat = whole / (1 + card.beta * max(0.0, card.none - card.knee))
    passes = PASSES * flat * (1 + card.beta * np.maximum(0.0, found.per_window - card.knee))
    count = len(found.rebalances) if is_stalled else 0
    return float(passes.sum()) + (4.4 + (count - 1) * card.rebalance_s if count else 0.0)


def arm_rows(layers: int, seed: int) -> None:
    """Print each arm against no balancing: found, published, and whether the signs agree."""
    register_peers()
    few = min(layers, 24)
    print("| hardware | arm | within: found, published | across: found, published |")
    for card in CARDS:
        shape = arm_shape(card, few, seed)
        none = {}
        for number, (name, (policy, redundant, every)) in enumerate(ARMS.items()):
            cells = []
            for is_across, published in ((False, card.within), (True, card.across)):
                windows = windows_of(shape, few, seed, is_across=is_across)
                if is_across not in none:
                    plain = replayed(card, windows, "none", 0, 1, seed)
                    none[is_across] = seconds(card, plain, is_stalled=False)
                found = replayed(card, windows, policy, redundant, every, seed)
                took = seconds(card, found, is_stalled=policy == "deepseek")
                gain, wanted = none[is_across] / took - 1, published[number]
                mark = (
                    "" if np.sign(round(gain * 100, 1)) == np.sign(wanted) or not wanted else " !"
                )
                cells.append(f"{gain:+.1%}, {wanted:+g} % (imbalance {found.mean:.2f}){mark}")
            print(f"| {card.name} | {name} | {' | '.join(cells)} |", flush=True)


TRT = {
    "EP32 x 9 slots": (Topology.uniform(4, 8, 9), 0.109),
    "EP36 x 8 slots": (Topology.uniform(9, 4, 8), 0.115),
}
TRT_WITHOUT = 1.564
ULTRA_EP = (1.51, 2.01, 3.03)


def trt_rows(layers: int, seed: int) -> None:
    """DeepSeek's balancer on the past, at each dispersion of recorded prefill."""
    print("| dispersion | shape, fitted | " + " | ".join(TRT) + " |")
    plain = Topology.uniform(4, 8, 8)
    for dispersion in (1.0, 2.0, 3.0, 4.0, 5.0):
        shape = fitted(1 + TRT_WITHOUT, plain, layers, 4096, dispersion, seed)
        cells = []
        for topology, published in TRT.values():
            traffic = traffic_of(shape, layers, topology.num_ranks * 1024 // TOP_K, dispersion)
            (found,) = imbalances(traffic, topology, ["deepseek"], seed)
            cells.append(f"{found - 1:.3f} ({(found - 1) / published - 1:+.0%})")
        print(f"| {dispersion:g} | {shape:.3f} | " + " | ".join(cells) + " |", flush=True)


def batch_rows(layers: int, seed: int) -> None:
    """What plans for each batch leave, by the way they are made."""
    print(f"| imbalance without, fitted | shape | {' | '.join(PER_BATCH)} |")
    few, tokens = min(layers, 12), 64 * 8192
    for wanted in ULTRA_EP:
        shape = fitted(wanted, Topology.uniform(8, 8, 4), few, tokens, 4.0, seed)
        traffic = traffic_of(shape, few, tokens, 4.0)
        found = imbalances(traffic, Topology.uniform(8, 8, 6), list(PER_BATCH), seed)
        cells = " | ".join(f"{one:.4f}" for one in found)
        print(f"| {wanted} | {shape:.3f} | {cells} |", flush=True)


PER_BATCH = ("oracle:re-plan", "oracle:moonep", "oracle:ultraep", "deepseek")
PARTS: dict[str, Callable[[int, int], None]] = {
    "trt": trt_rows,
    "batch": batch_rows,
    "throughput": throughput_rows,
    "static": static_rows,
    "arms": arm_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default=",".join(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.part.split(","):
        print(f"\n## {name}\n", flush=True)
        PARTS[name](arguments.layers, arguments.seed)


if __name__ == "__main__":
    main()
