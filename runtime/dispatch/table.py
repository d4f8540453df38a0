"""Which dispatchers there are, and the choice of one: the first that passes its self-test.

A new dispatcher is a name in ``DISPATCHERS`` and a maker in ``_makers``. The order of the names is
that in which ``auto`` tries them.

The self-test runs routing that breaks incorrect dispatchers. Experts are replaced by a known factor
for each slot, so every rank can compute by itself what must come back; the counters must show what
was really sent. Every rank runs the same cases in the same order, and all receive the same result.

Shapes:  T tokens of this rank, K top-k, H hidden, S slots, C slots of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.load import Phase
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import (
    AllToAllDispatcher,
    Dispatcher,
    OverlappedDispatcher,
    PhasedDispatcher,
    Received,
    begin_combine,
)
from runtime.group import first_refusal

DISPATCHERS = ("deepep_low_latency", "deepep_normal", "deepep_by_phase", "all_to_all")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
TOLERANCE_FP8 = 5e-2  # for rows that travel as FP8


@dataclass(frozen=True)
class Trial:
    """Settings of the self-test; equal on every rank."""

    topology: Topology  # of all ranks; the group's are those that are alive, in their order
    hidden: int
    top_k: int
    num_tokens: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def rank_in(self, group: dist.ProcessGroup) -> int:
        """Return the number in the topology of this rank of the group of live ranks."""
        return int(np.flatnonzero(self.topology.alive)[group.rank()])


def choose_dispatcher(
    name: str, trial: Trial, counter: SlotCounter, group: dist.ProcessGroup, *, max_tokens: int
) -> tuple[Dispatcher, str]:
    """Make the dispatcher of that name, or with "auto" the first that passes on every rank.

    Returns:
        The dispatcher, and one sentence with the reason of the choice.

    Raises:
        ConfigError: an unknown name, or the named dispatcher fails its proof.
    """
    if name != "auto" and name not in DISPATCHERS:
        raise ConfigError(
            f"unknown dispatcher {name!r}, expected auto or one of: {', '.join(DISPATCHERS)}"
        )
    refusals: list[str] = []
    for candidate in DISPATCHERS if name == "auto" else (name,):
        made: Dispatcher | None = None
        try:
            made = _makers(trial, counter, group, max_tokens)[candidate]()
            wrong = check_dispatcher(made, counter, trial, group)
        except ConfigError as exc:
            wrong = str(exc)
        wrong = first_refusal(wrong, group)
        if not wrong and made is not None:
            passed = f"{candidate} gives right results on {group.size()} ranks"
            return made, "; ".join([passed, *refusals])
        refusals.append(f"{candidate} refused: {wrong}")
    raise ConfigError("; ".join(refusals))


def _makers(
    trial: Trial, counter: SlotCounter, group: dist.ProcessGroup, max_tokens: int
) -> dict[str, Callable[[], Dispatcher]]:
    # Imported here: the module is about a library that need not be installed.
    from runtime.dispatch.deepep import DeepEPByPhase, DeepEPLowLatency, DeepEPNormal, DeepEPShape

    rank = trial.rank_in(group)
    shape = DeepEPShape(trial.topology, trial.hidden, trial.top_k, max_tokens)
    return {
        "deepep_low_latency": lambda: DeepEPLowLatency(shape, group, counter),
        "deepep_normal": lambda: DeepEPNormal(shape, group, counter),
        "deepep_by_phase": lambda: DeepEPByPhase(shape, group, counter),
        "all_to_all": lambda: AllToAllDispatcher(trial.topology, group, rank, counter),
    }


def routing_cases(trial: Trial, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (name, slots [T, K]) of each case; T may differ by rank, dead ranks receive none."""
    random = torch.Generator().manual_seed(trial.seed * 1009 + rank)
    topology, shape = trial.topology, (trial.num_tokens, trial.top_k)
    live = np.flatnonzero(topology.alive)
    slots = torch.from_numpy(np.flatnonzero(topology.alive[topology.rank_of_slot]))

    def distinct(num_tokens: int, among: torch.Tensor = slots) -> torch.Tensor:
        scores = torch.rand((num_tokens, len(among)), generator=random)
        return among[scores.topk(min(trial.top_k, len(among)), dim=1).indices]

    yield "random", distinct(trial.num_tokens)
    to_one = torch.full(shape, -1, dtype=torch.int64)
    to_one[:, 0] = slots[-1]
    yield "all tokens to one slot", to_one
    padded = distinct(trial.num_tokens)
    padded[::2] = -1
    padded[1::4, trial.top_k // 2 :] = -1
    yield "padding ids", padded
    one = torch.full(shape, -1, dtype=torch.int64)
    one[:1] = distinct(1)
    yield "one token", one if rank == live[0] else torch.full(shape, -1, dtype=torch.int64)
    others = slots[slots < topology.slots_on(live[-1]).start]
    if len(others) >= trial.top_k:
        yield "none for the last rank", distinct(trial.num_tokens, others)


def check_dispatcher(
    dispatcher: Dispatcher, counter: SlotCounter, trial: Trial, group: dist.ProcessGroup
) -> str:
    """Run every case; return what was wrong first on this rank, or "" if nothing was.

    A rank that finds something wrong runs the other cases too: its peers wait for it in them.
    Combines that can be overlapped are run both ways, and modes that depend on the phase in both.
    """
    rank, first_wrong = trial.rank_in(group), ""
    counter.drain()
    phases: tuple[Phase, ...] = ("mixed",)
    if isinstance(dispatcher, PhasedDispatcher):
        phases = ("prefill", "decode")
    overlaps = (False, True) if isinstance(dispatcher, OverlappedDispatcher) else (False,)
    for (name, slots), is_overlapped, phase in product(
        routing_cases(trial, rank), overlaps, phases
    ):
        if isinstance(dispatcher, PhasedDispatcher):
            dispatcher.begin_pass(phase)
        slots = slots.to(trial.device)
        random = torch.Generator().manual_seed(trial.seed + 31 * rank)
        tokens = torch.randn((len(slots), trial.hidden), generator=random)
        weights = torch.rand(slots.shape, generator=random) + 0.1
        tokens = tokens.to(trial.device, trial.dtype)
        weights = weights.to(trial.device)
        received = dispatcher.dispatch(0, tokens, slots, weights)
        scaled = _scaled(received, trial, rank)
        if is_overlapped:
            answer = begin_combine(dispatcher, 0, scaled, received).finish()
        else:
            answer = dispatcher.combine(0, scaled, received)
        miscounted = _compare_counts(counter, slots, trial, group)
        limit = TOLERANCE[trial.dtype] if received.scales is None else TOLERANCE_FP8
        wrong = _compare(answer, tokens, slots, weights, limit) or miscounted
        if wrong and not first_wrong:
            first_wrong = f"{name}: {wrong}"
    return first_wrong


def _factor(slots: torch.Tensor) -> torch.Tensor:
    """A factor of each slot that bfloat16 holds exactly."""
    return 0.5 + (slots % 16) / 16


def _scaled(received: Received, trial: Trial, rank: int) -> torch.Tensor:
    span = trial.topology.slots_on(rank)
    factor = _factor(torch.arange(span.start, span.stop, device=trial.device)).to(trial.dtype)
    rows = received.rows
    if received.scales is not None:  # one for each 128 columns
        rows = rows.to(trial.dtype) * received.scales.repeat_interleave(128, dim=-1).to(trial.dtype)
    if rows.dim() == 3:
        return rows * factor[:, None, None]
    return rows * factor.repeat_interleave(received.counts)[:, None]


def _compare(
    answer: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
) -> str:
    factor = torch.where(slots >= 0, _factor(slots) * weights, 0.0).sum(dim=1)
    expected = tokens.float() * factor[:, None]
    distance = float((answer.float() - expected).norm())
    error = distance / max(float(expected.norm()), 1e-20) if distance else 0.0
    return "" if error <= limit else f"relative error {error:.2e}, expected at most {limit:.0e}"


def _compare_counts(
    counter: SlotCounter, slots: torch.Tensor, trial: Trial, group: dist.ProcessGroup
) -> str:
    sent = torch.bincount(slots[slots >= 0].flatten(), minlength=trial.topology.num_slots)
    dist.all_reduce(sent, group=group)
    expected = sent[trial.topology.slots_on(trial.rank_in(group))].tolist()
    found = counter.drain()[0].tolist()
    return "" if found == expected else f"counted {found} received rows, expected {expected}"
