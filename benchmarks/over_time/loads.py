"""The streams of windows that ``run`` and ``objective`` replay: recorded routing in several orders.

Requests are split in two halves. Defaults are chosen on ``tune``; ``judge`` is only judged on.
gpt-oss-20b is split by benchmark, so that the halves differ as loads do; V2-Lite has one text of
each kind, and every second request goes to either half.

Shapes:  T windows, L MoE layers, E experts, K experts of a token.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import DATA, Tokens, windows
from eplb import Topology

TUNED_ON = ("gpqa_main", "mmlu_dev")  # the benchmarks of gpt-oss; the others are judged on
HALVES = ("tune", "judge")
GPT, LITE = "gpt-oss-20b", "V2-Lite"
TOP_K = {GPT: 4, LITE: 6}
MOST_WINDOWS = 96
NUM_EXPERTS = {GPT: 32, LITE: 64}
WINDOW_TOKENS = {GPT: 1024, LITE: 512}
RANKS = {
    (GPT, "40/8"): Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5),
    (GPT, "48/16"): Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=3),
    (GPT, "64/32"): Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=2),
    (LITE, "72/8"): Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=9),
    (LITE, "96/32"): Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=3),
}
ORDERS = {
    GPT: ("in order", "shuffled", "shuffled x4"),  # x4: windows of four times as many tokens
    LITE: ("intent", "summary", "switch", "mix"),
}
AT_ONCE, STEPS = 16, 256  # requests of a steady load, and tokens of each in a window


@dataclass(frozen=True)
class Case:
    """One stream on one topology."""

    model: str
    order: str
    slots: str  # slots / ranks
    seed: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.model} {self.slots}, {self.order}"

    @property
    def topology(self) -> Topology:
        """Ranks and slots."""
        return RANKS[self.model, self.slots]


def cases(seeds: int) -> Iterator[Case]:
    """All of them; a recorded order needs one seed."""
    for model, slots in RANKS:
        for order in ORDERS[model]:
            for seed in range(1 if order == "in order" else seeds):
                yield Case(model, order, slots, seed)


@cache
def requests(name: str, half: str) -> tuple[NDArray[np.int64], ...]:
    """The requests of a half, each as ids [L, tokens, K]."""
    file = np.load(DATA / f"{name}.npz")
    ids = file["expert_ids"].astype(np.int64)
    length = file["request_len"]
    is_tuned_on = np.arange(len(length)) % 2 == 0
    if "subject" in file:
        ids = ids.transpose(1, 0, 2)
        is_tuned_on = np.array([subject.split("/")[0] in TUNED_ON for subject in file["subject"]])
    parts = np.split(ids, np.cumsum(length)[:-1], axis=1)
    kept = is_tuned_on if half == "tune" else ~is_tuned_on
    return tuple(part for part, is_kept in zip(parts, kept, strict=True) if is_kept)


def stream(case: Case, half: str, most: int) -> Tokens:
    """[T, L, E] windows of a case, at most so many."""
    rng = np.random.default_rng(case.seed)
    tokens = WINDOW_TOKENS[case.model] * (4 if case.order.endswith("x4") else 1)
    if case.model == GPT:
        ids = requests("gptoss20b_decode", half)
        if case.order == "in order":
            return windows(np.concatenate(ids, axis=1), tokens, NUM_EXPERTS[GPT])[:most]
        passes = [ids[index] for _ in range(4) for index in rng.permutation(len(ids))]
        return windows(np.concatenate(passes, axis=1), tokens, NUM_EXPERTS[GPT])[:most]
    part = most // 3
    texts = {"intent": [(0.0, most)], "summary": [(1.0, most)], "mix": _walk(rng, most)}
    texts["switch"] = [(0.0, part), (1.0, part), (0.0, most - 2 * part)]
    spans = [drawn(half, summaries, count * tokens, rng) for summaries, count in texts[case.order]]
    return windows(np.concatenate(spans, axis=1), tokens, NUM_EXPERTS[LITE])


def _walk(rng: np.random.Generator, most: int) -> list[tuple[float, int]]:
    """Part of the tokens that are of summaries, for stretches of four windows: a random walk."""
    steps = rng.normal(0.0, 0.8, most // 4).cumsum()
    return [(float(1 / (1 + np.exp(-step))), 4) for step in steps]


def drawn(half: str, summaries: float, tokens: int, rng: np.random.Generator) -> Tokens:
    """[L, tokens, K] of whole V2-Lite requests, so great a part of the tokens of summaries."""
    intent, summary = (requests(f"dsv2lite_{text}", half) for text in ("intent", "summary"))
    parts, given = [], 0
    of_summaries = 0
    while given < tokens:
        is_behind = of_summaries < summaries * (given + 1)
        source = summary if is_behind and summaries else intent
        part = source[rng.integers(len(source))]
        parts.append(part)
        given += part.shape[1]
        of_summaries += part.shape[1] if source is summary else 0
    return np.concatenate(parts, axis=1)[:, :tokens]


def of_tokens(model: str, half: str, num_windows: int) -> Tokens:
    """[T, L, E] windows of single tokens drawn anew from one load: nothing changes.

    Tokens are drawn whole, so that all layers see the same ones.
    """
    ids, rng = _together(model, half), np.random.default_rng(0)
    drawn = (rng.integers(ids.shape[1], size=WINDOW_TOKENS[model]) for _ in range(num_windows))
    return np.array([_counted(model, ids[:, pick]) for pick in drawn])


def of_requests(model: str, half: str, num_windows: int) -> Tokens:
    """[T, L, E] windows of 16 requests that are served at once, another where one ends.

    Nothing changes, but windows fluctuate, and requests that span two make neighbours alike.
    """
    ids, rng = _together(model, half), np.random.default_rng(0)
    length = np.array([one.shape[1] for one in _requests_of(model, half)])
    end, start = np.cumsum(length), np.cumsum(length) - length
    served = rng.integers(len(length), size=AT_ONCE)
    place = (start[served] + rng.random(AT_ONCE) * length[served]).astype(np.int64)
    counts = []
    for _ in range(num_windows):
        pick = []
        for _ in range(STEPS):
            pick.append(place.copy())
            place += 1
            ended = place == end[served]
            served[ended] = rng.integers(len(length), size=int(ended.sum()))
            place[ended] = start[served[ended]]
        counts.append(_counted(model, ids[:, np.concatenate(pick)]))
    return np.array(counts)


STEADY = {"single tokens": of_tokens, "16 requests at once": of_requests}


def _requests_of(model: str, half: str) -> list[Tokens]:
    names = ("gptoss20b_decode",) if model == GPT else ("dsv2lite_intent", "dsv2lite_summary")
    return [one for name in names for one in requests(name, half)]


def _together(model: str, half: str) -> Tokens:
    return np.concatenate(_requests_of(model, half), axis=1)


def _counted(model: str, ids: Tokens) -> Tokens:
    return windows(ids, ids.shape[1], NUM_EXPERTS[model])[0]


def kill(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.kill()
