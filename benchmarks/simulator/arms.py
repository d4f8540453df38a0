"""Arms of balancing on H20, A100 and GB200 as sjqsjq/EPLB published them (unreviewed): signs alone.

Qwen3-235B (94 x 128) in prefill, within one domain and over six switches of domain. Time of a pass
by the published hinge T = T_flat (1 + beta max(0, r - r_k)), under SGLang's ``static`` dispatch;
rebalances take the published seconds. Fitted: the skew, to the published imbalance without
balancing. Assumed, because not published: a window is 16 passes, a domain lasts 6 of them, EPLB
plans every 64 passes. Not modelled: the KV cache that redundant slots take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from eplb import DispatchRule, Topology
from simulations.peers import register_peers
from simulations.replay import Replay, Scenario, replay_all
from simulations.traffic import Traffic, drawn, profiles_of
from simulations.windows import Tokens, Windows

EXPERTS, TOP_K, PASSES, STAY, DOMAINS = 128, 8, 16, 6, 7
TOKENS = 65_536  # of a window
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


def windows_of(shape: float, layers: int, seed: int, *, is_across: bool) -> Windows:
    """Windows of one domain, or of seven in turn."""
    traffic = Traffic(
        layers,
        EXPERTS,
        TOP_K,
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
            yield drawn(profiles[domain], TOKENS * TOP_K, 4.0, rng)

    return Windows(layers, EXPERTS, read, DOMAINS * STAY, PASSES, "prefill")


def replayed(
    card: Card, windows: Windows, policy: str, redundant: int, every: int, seed: int
) -> Replay:
    """One policy on one group."""
    topology = Topology.uniform(1, card.ranks, (EXPERTS + redundant) // card.ranks)
    # A slot that a plan leaves empty is not legal in the engine; without redundancy there is none.
    rule = DispatchRule.SGLANG_STATIC if redundant else DispatchRule.WEIGHTED
    scenario = Scenario(windows, topology, plan_every=every, dispatch=rule, seed=seed)
    (found,) = replay_all(scenario, [policy])
    assert not found.failed, found.failed
    return found


def fitted_shape(card: Card, layers: int, seed: int) -> float:
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


def main(layers: int, seed: int) -> None:
    """Print each arm against no balancing: found, published, and whether the signs agree."""
    register_peers()
    few = min(layers, 24)
    print("| hardware | arm | within: found, published | across: found, published |")
    for card in CARDS:
        shape = fitted_shape(card, few, seed)
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
