"""Experts pulled for one batch between real processes: right outputs, or one sentence on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.errors import BrokenGroup, ConfigError, RankError
from runtime.batch.counts import all_gather_counts
from runtime.batch.pulls import HostPulls
from runtime.batch.split import BatchSplit
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.counters import SlotCounter
from runtime.experts import ExpertSchema, PeerBank
from runtime.routing import RoutingTable
from tests.support.limits import NEVER_S
from tests.support.models.pulling_ranks import (
    EAGER,
    ONE_DOMAIN,
    OTHER,
    START,
    TOPOLOGY,
    PullingRank,
    Weights,
    build,
    spare_bank,
)

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
LAYERS, TOKENS, TOP_K, HOT = 2, 40, 2, 6
MODEL = ModelShape((0, 1), 8, TOP_K, hidden=16, intermediate=8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    schema = ExpertSchema.swiglu(MODEL.hidden, MODEL.intermediate)
    path = tmp_path_factory.mktemp("weights") / "pulled"
    write_random_checkpoint(path, MODEL, schema, vocabulary=64, seed=2)
    return Weights(MODEL, schema, Checkpoint(path))


def ids_of(rank: int) -> torch.Tensor:
    """[1, T] tokens; none on rank 2."""
    ids = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    return ids[:, :0] if rank == 2 else ids


def all_to_one(rank: int) -> torch.Tensor:
    """[L, T, K] every token to one expert, which has one replica; the other choice is padding."""
    return torch.tensor([HOT, -1]).expand(LAYERS, ids_of(rank).numel(), TOP_K).contiguous()


def skewed(rank: int) -> torch.Tensor:
    """[L, T, K] two hot experts, some without tokens, and padding."""
    rng = np.random.default_rng(rank)
    share = np.array([0.05, 0.1, 0, 0.4, 0.05, 0, 0.4, 0])
    shape = (LAYERS, ids_of(rank).numel())
    chosen = [rng.choice(8, TOP_K, replace=False, p=share) for _ in range(np.prod(shape))]
    found = torch.from_numpy(np.array(chosen, dtype=np.int64).reshape(*shape, TOP_K))
    found[:, 3:5] = -1
    return found


def counted(rank: PullingRank, held: np.ndarray[Any, Any]) -> list[int]:
    """[E] tokens of a layer's experts by this rank's counters."""
    tokens = rank.counter.drain()
    mine = held[:, TOPOLOGY.slots_on(rank.rank)]
    return [int(tokens[mine == expert].sum()) for expert in range(8)]


@pytest.mark.parametrize("routed", [all_to_one, skewed])
def test_pulled_experts_give_the_reference_outputs_and_count_at_home(
    run_ranks: RunRanks, weights: Weights, routed: Callable[[int], torch.Tensor]
) -> None:
    def serve(rank: int) -> tuple[float, int, list[int], int]:
        made = build(rank, weights)
        error = made.error(ids_of(rank), routed(rank))
        by_expert = counted(made, START.slot_to_expert)
        return error, made.received_by_spares, by_expert, made.table.generation

    results = run_ranks(3, serve)

    assert max(error for error, *_ in results) <= 1e-5
    assert sum(pulled for _, pulled, *_ in results) > 0
    routes = torch.cat([routed(rank).flatten() for rank in range(3)])
    expected = torch.bincount(routes[routes >= 0], minlength=8).tolist()
    assert np.sum([found for *_, found, _ in results], axis=0).tolist() == expected
    assert {generation for *_, generation in results} == {START.generation}


def test_busiest_rank_has_the_mean_once_the_hot_expert_is_pulled(
    run_ranks: RunRanks, weights: Weights
) -> None:
    def serve(rank: int) -> list[int]:
        made = build(rank, weights)
        made.error(ids_of(rank), all_to_one(rank))
        received: list[int] = made.counter.received.sum(dim=1).tolist()
        return received

    # Rows that came minus those counted at home, which others served.
    by_rank = np.array(run_ranks(3, serve))

    home = np.where(np.arange(3)[:, None] == [[2, 0]], 2 * TOKENS, 0)
    served = by_rank - np.where(home > 0, home - home // 3, 0)
    assert served.max() <= 2 * TOKENS // 3 + 2


def test_without_spare_slots_nothing_is_pulled(run_ranks: RunRanks, weights: Weights) -> None:
    def serve(rank: int) -> tuple[float, int]:
        made = build(rank, weights, replace(EAGER, spare_slots=0))
        return made.error(ids_of(rank), skewed(rank)), made.counter.received.shape[1]

    results = run_ranks(3, serve)

    assert max(error for error, _ in results) <= 1e-5
    assert [columns for _, columns in results] == [4, 3, 4]


def test_swap_between_steps_is_followed_by_the_pulls(run_ranks: RunRanks, weights: Weights) -> None:
    def serve(rank: int) -> list[float]:
        made, errors = build(rank, weights), []
        for placement in (START, OTHER, START, OTHER):
            # Every rank swaps at its own time: nothing but the protocol keeps it off its peers.
            made.take_over(placement)
            errors += [made.error(ids_of(rank), routed(rank)) for routed in (all_to_one, skewed)]
        assert made.received_by_spares or rank
        return errors

    assert np.max(run_ranks(3, serve)) <= 1e-5


def test_two_micro_batches_use_one_set_of_spare_records(
    run_ranks: RunRanks, weights: Weights
) -> None:
    def serve(rank: int) -> tuple[bool, int]:
        made = build(rank, weights)
        first, second = (torch.arange(rank, rank + n).view(1, n) for n in (30, 20))
        halves = made.stack.forward_two(first, second, salts=(0, 0))
        pulled = made.received_by_spares
        alone = [made.stack.forward(ids, salt=0) for ids in (first, second)]
        equal = [torch.equal(a.hidden, b.hidden) for a, b in zip(halves, alone, strict=True)]
        return all(equal), pulled

    results = run_ranks(3, serve)

    assert all(is_equal for is_equal, _ in results)
    assert sum(pulled for _, pulled in results) > 0


def test_ranks_that_disagree_on_counts_all_refuse_before_any_result(
    run_ranks: RunRanks, weights: Weights
) -> None:
    def serve(rank: int) -> str:
        assert dist.group.WORLD is not None
        gather = all_gather_counts(dist.group.WORLD)

        def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
            gather(counts, gathered)
            if rank == 1:  # received other bytes than the others
                gathered[0] = gathered[0].roll(3)

        made = build(rank, weights, exchange=exchange)
        with pytest.raises(RankError, match="ranks decided different pulls") as refusal:
            made.error(ids_of(rank), all_to_one(rank))
        return str(refusal.value)

    for rank, text in enumerate(run_ranks(3, serve)):
        assert f"rank {rank}: layer 0" in text
        assert "counts, tables or pull rules differ" in text


def test_late_pull_ends_the_step_on_all_ranks_with_one_reason(
    run_ranks: RunRanks, weights: Weights
) -> None:
    class Stuck:
        """A peer whose memory does not answer."""

        def __init__(self) -> None:
            self.may_end = threading.Event()

        def read(self, layer: int, slot: int, into: torch.Tensor, offset: int = 0) -> None:
            self.may_end.wait()

    def serve(rank: int) -> str:
        stuck = Stuck()

        def peers(found: Mapping[int, PeerBank]) -> Mapping[int, PeerBank]:
            return found if rank else dict.fromkeys(found, stuck)

        made = build(rank, weights, peers=peers, deadline_s=0.05 if rank == 0 else NEVER_S)
        with pytest.raises(BrokenGroup) as refusal:
            made.error(ids_of(rank), all_to_one(rank))
        stuck.may_end.set()
        return str(refusal.value)

    texts = run_ranks(3, serve)

    assert "the pull of layer 0 slot 0 of rank 2 was not complete within 0.05 s" in texts[0]
    assert all("ranks [0] could not pull a record" in text for text in texts[1:])


def test_peer_that_exits_before_the_layer_closes_breaks_the_step(
    run_ranks: RunRanks, weights: Weights
) -> None:
    def serve(rank: int) -> str:
        made = build(rank, weights)
        if rank == 1:  # ends after its dispatch, when others may read its memory
            layer, chosen = made.first_layer, all_to_one(1)[0]
            assert layer.split is not None
            assert layer.pulls is not None
            slots = layer.pulls.redirect(0, chosen, layer.split.slots(0, chosen))
            tokens = torch.zeros((len(chosen), MODEL.hidden))
            layer.dispatcher.dispatch(0, tokens, slots, torch.zeros(chosen.shape))
            return "exited"
        with pytest.raises(BrokenGroup) as refusal:
            made.error(ids_of(rank), all_to_one(rank))
        return str(refusal.value)

    for rank, text in enumerate(run_ranks(3, serve)):
        assert text == "exited" if rank == 1 else f"rank {rank}" in text
        assert rank == 1 or "layer 0 was not closed after its pulls, a peer is dead or late" in text


def test_table_with_another_number_of_extra_slots_is_refused() -> None:
    table = RoutingTable(START, max_replicas=3, topology=TOPOLOGY, extra_slots=2)
    split = BatchSplit(table, lambda own, to: None, source=0, num_sources=3, max_pairs=8)
    counter = SlotCounter(LAYERS, 4, extra_slots=1)

    with pytest.raises(ConfigError, match="has 2 extra slots, expected 1"):
        HostPulls(
            split,
            TOPOLOGY,
            0,
            ONE_DOMAIN,
            EAGER,
            {},
            spare_bank(ExpertSchema.swiglu(16, 8), 1),
            lambda own, to: None,
            counter,
            deadline_s=1.0,
        )
