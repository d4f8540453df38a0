"""The split of a batch on a GPU, at DeepSeek-V3's sizes: one graph, new batches, swapped tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from runtime.batch.split_rule import MOST_WAYS, SplitRule, split_batch, split_layout

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from runtime.batch.counts import PeerCounts, all_gather_counts
from runtime.batch.split import BatchSplit
from runtime.routing import RoutingTable
from tests.gpu.parts import needs_two_gpus
from tests.support.launch import launch
from tests.support.limits import NEVER_S

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K, TOKENS, SOURCE = 256, 8, 300, 5
RANKS = pytest.mark.parametrize(("num_ranks", "num_slots"), [(8, 288), (32, 288), (144, 288)])


def random_placement(topology: Topology, seed: int) -> Placement:
    """Every expert once, then the hot ones again."""
    rng = np.random.default_rng(seed)
    rest = rng.choice(EXPERTS, topology.num_slots - EXPERTS, p=popularity())
    held = rng.permutation(np.concatenate([np.arange(EXPERTS), rest]))
    return Placement(held[None], EXPERTS)


def popularity() -> NDArray[np.float64]:
    part = 1.0 / np.arange(1, EXPERTS + 1) ** 0.7
    return part / part.sum()


def split_load(split: BatchSplit, table: RoutingTable, totals: NDArray[np.int64]) -> int:
    """Tokens of the busiest rank by the boundaries on the device."""
    ends = split.batch.up_to.cpu().numpy().astype(np.int64)
    layout = {name: one[0].cpu().numpy() for name, one in table.split.items()}
    fixed = np.where(layout["fixed"] >= 0, totals[layout["fixed"]], 0) * layout["fixed_share"]
    load = fixed.sum(axis=1)
    for row in np.flatnonzero(layout["expert"] >= 0):
        cut = np.minimum(ends[row], totals[layout["expert"][row]])
        for rank, tokens in zip(layout["rank"][row], np.diff(cut, prepend=0), strict=True):
            if rank >= 0:
                load[rank] += tokens
    assert load.sum() == pytest.approx(totals.sum())
    return int(load.max())


def reference_load(placement: Placement, topology: Topology, totals: NDArray[np.int64]) -> float:
    layout = split_layout(
        placement.expert_to_slots[0],
        placement.slot_share[0],
        topology.rank_of_slot,
        num_split=topology.num_slots - EXPERTS,
        ways=MOST_WAYS,
    )
    return float(split_batch(totals, layout).rank_load.max())


@RANKS
def test_graph_splits_each_batch_as_the_reference_and_follows_a_swap(
    num_ranks: int, num_slots: int
) -> None:
    topology = Topology.uniform(1, num_ranks, num_slots // num_ranks)
    placements = [random_placement(topology, seed) for seed in (1, 2)]
    table = RoutingTable(
        placements[0],
        max_replicas=min(num_ranks, num_slots - EXPERTS + 1),
        device="cuda",
        topology=topology,
    )
    others = torch.zeros((num_ranks, EXPERTS), dtype=torch.int32, device="cuda")

    def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(others)
        gathered[SOURCE].copy_(counts)

    split = BatchSplit(
        table, exchange, source=SOURCE, num_sources=num_ranks, max_pairs=TOKENS * TOP_K
    )
    experts = torch.zeros((TOKENS, TOP_K), dtype=torch.int64, device="cuda")
    split.slots(0, experts)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = split.slots(0, experts)

    rng = np.random.default_rng(num_ranks)
    for step in range(6):
        if step == 3:
            table.load(placements[1], [0])
        placement = placements[step // 3]
        batch = rng.choice(EXPERTS, (TOKENS, TOP_K), p=popularity())
        batch[step] = -1
        counts = rng.multinomial(TOKENS * TOP_K, popularity(), size=num_ranks)
        counts[SOURCE] = np.bincount(batch[batch >= 0], minlength=EXPERTS)
        experts.copy_(torch.from_numpy(batch))
        others.copy_(torch.from_numpy(counts))
        graph.replay()
        first = chosen.clone()
        graph.replay()

        assert torch.equal(first, chosen), "the same batch gives the same slots"
        found = chosen.cpu().numpy()
        assert (found[step] == -1).all()
        assert (placement.slot_to_expert[0, found[batch >= 0]] == batch[batch >= 0]).all()
        totals = counts.sum(axis=0)
        most = split_load(split, table, totals)
        assert most <= reference_load(placement, topology, totals) * 1.005 + num_slots // num_ranks
    assert int(table.strays) == 0


def test_split_over_all_sources_sends_each_replica_what_its_boundaries_say() -> None:
    topology = Topology.uniform(1, 8, 36)
    placement = random_placement(topology, 4)
    table = RoutingTable(placement, max_replicas=8, device="cuda", topology=topology)
    rng = np.random.default_rng(9)
    batches = [rng.choice(EXPERTS, (TOKENS, TOP_K), p=popularity()) for _ in range(8)]
    counts = np.stack([np.bincount(one.ravel(), minlength=EXPERTS) for one in batches])
    given = torch.from_numpy(counts.astype(np.int32)).cuda()
    received = np.zeros(topology.num_slots, np.int64)

    def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(given)

    for source, batch in enumerate(batches):
        split = BatchSplit(
            table,
            exchange,
            source=source,
            num_sources=8,
            max_pairs=TOKENS * TOP_K,
        )
        slots = split.slots(0, torch.from_numpy(batch).cuda())
        received += np.bincount(slots.flatten().cpu().numpy(), minlength=topology.num_slots)

    load = received.reshape(8, 36).sum(axis=1)
    assert load.sum() == 8 * TOKENS * TOP_K
    assert load.max() <= split_load(split, table, counts.sum(axis=0)) + 1


def test_ranks_that_exchange_over_memory_split_each_batch_as_gathered_counts_do() -> None:
    # Four sources on one GPU, a stream each (of eight that a device serves at once), whose kernels
    # wait for each other's words; of a graph each, as decode has it.
    topology, num_ranks, steps = Topology.uniform(1, 8, 36), 4, 12
    placement = random_placement(topology, 4)
    words = torch.zeros((num_ranks, 2, EXPERTS + num_ranks), dtype=torch.int64, device="cuda")
    peers = [one.data_ptr() for one in words]
    rng = np.random.default_rng(2)
    shape = (steps, num_ranks, TOKENS, TOP_K)
    batches = torch.from_numpy(rng.choice(EXPERTS, shape, p=popularity()))
    batches[3, 2] = -1  # a rank without tokens
    given = torch.stack(
        [
            torch.stack([torch.bincount(b[b >= 0], minlength=EXPERTS) for b in one])
            for one in batches.flatten(2)
        ]
    ).to(dtype=torch.int32, device="cuda")
    experts = [torch.zeros((TOKENS, TOP_K), dtype=torch.int64, device="cuda") for _ in peers]
    plain = torch.zeros((num_ranks, EXPERTS), dtype=torch.int32, device="cuda")
    tables, exchanges, splits, graphs, chosen = [], [], [], [], []
    for rank in range(num_ranks):
        tables.append(RoutingTable(placement, max_replicas=8, device="cuda", topology=topology))
        exchanges.append(PeerCounts(words[rank], peers))
        splits.append(
            BatchSplit(
                tables[rank],
                exchanges[rank],
                source=rank,
                num_sources=num_ranks,
                max_pairs=TOKENS * TOP_K,
            )
        )
    streams = [torch.cuda.Stream() for _ in peers]

    def on_all(run: Callable[[int], None]) -> None:
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                run(rank)
        torch.cuda.synchronize()

    on_all(lambda rank: chosen.append(splits[rank].slots(0, experts[rank])))  # compiled
    chosen.clear()
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chosen.append(splits[rank].slots(0, experts[rank]))
        graphs.append(graph)

    def gathered(counts: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(plain)

    reference = BatchSplit(
        tables[0], gathered, source=0, num_sources=num_ranks, max_pairs=TOKENS * TOP_K
    )
    reference.slots(0, experts[0])
    for step in range(steps):
        for rank in range(num_ranks):
            experts[rank].copy_(batches[step, rank])
        on_all(lambda rank: graphs[rank].replay())
        plain.copy_(given[step])
        wanted = reference.slots(0, experts[0])
        assert not any(int(one.late) for one in exchanges)
        assert torch.equal(chosen[0], wanted)
        for split in splits:
            assert torch.equal(split.batch.totals, reference.batch.totals)
            assert torch.equal(split.batch.sent, plain.sum(dim=1))
            assert torch.equal(split.batch.up_to, reference.batch.up_to)
        assert splits[3].switches() == reference.switches()
        for rank in range(num_ranks):
            valid = batches[step, rank] >= 0
            found = chosen[rank].cpu()
            assert (
                placement.slot_to_expert[0, found[valid]] == batches[step, rank][valid].numpy()
            ).all()
            assert (found[~valid] == -1).all()
    assert not words.any(), "every word was read and cleared"


def test_rank_whose_peer_does_not_come_splits_by_its_own_counts() -> None:
    topology = Topology.uniform(1, 8, 36)
    placement = random_placement(topology, 4)
    table = RoutingTable(placement, max_replicas=8, device="cuda", topology=topology)
    words = torch.zeros((8, 2, EXPERTS + 8), dtype=torch.int64, device="cuda")
    exchange = PeerCounts(words[0], [one.data_ptr() for one in words], deadline_s=0.2)
    split = BatchSplit(table, exchange, source=0, num_sources=8, max_pairs=TOKENS * TOP_K)
    batch = np.random.default_rng(1).choice(EXPERTS, (TOKENS, TOP_K), p=popularity())

    slots = split.slots(0, torch.from_numpy(batch).cuda()).cpu()

    assert (placement.slot_to_expert[0, slots] == batch).all()
    assert int(exchange.late) == 1


def run_exchange(rank: int, num_ranks: int) -> list[list[int]]:
    """Slots of three batches by counts over peer memory, and totals of the last."""
    assert dist.group.WORLD is not None
    device = torch.device("cuda", rank % torch.cuda.device_count())
    topology = Topology.uniform(1, num_ranks, 300 // num_ranks)
    placement = random_placement(topology, 4)
    most = int(placement.replica_count.max())
    table = RoutingTable(placement, max_replicas=most, device=device, topology=topology)
    exchange = PeerCounts.join(EXPERTS, dist.group.WORLD, device)
    pairs = TOKENS * TOP_K
    split = BatchSplit(table, exchange, source=rank, num_sources=num_ranks, max_pairs=pairs)
    by_group = BatchSplit(
        table,
        all_gather_counts(dist.group.WORLD),
        source=rank,
        num_sources=num_ranks,
        max_pairs=pairs,
    )
    rng = np.random.default_rng(rank)
    wrong = []
    for _ in range(3):
        batch = torch.from_numpy(rng.choice(EXPERTS, (TOKENS, TOP_K), p=popularity())).to(device)
        wrong.append([int((split.slots(0, batch) != by_group.slots(0, batch)).sum())])
    assert int(exchange.late) == 0
    return wrong


@needs_two_gpus
def test_two_gpus_that_exchange_over_memory_choose_as_by_all_gather() -> None:
    for wrong in launch(run_exchange, min(4, torch.cuda.device_count()), deadline_s=NEVER_S):
        assert wrong == [[0], [0], [0]]


def test_eager_passes_leave_out_a_layer_that_gains_nothing_and_try_it_again() -> None:
    topology = Topology.uniform(1, 8, 36)
    placement = random_placement(topology, 4)
    two_layers = Placement(np.tile(placement.slot_to_expert, (2, 1)), EXPERTS)
    table = RoutingTable(two_layers, max_replicas=8, device="cuda", topology=topology)
    counts = torch.zeros((8, EXPERTS), dtype=torch.int32, device="cuda")
    exchanges = []

    def exchange(own: torch.Tensor, gathered: torch.Tensor) -> None:
        exchanges.append(1)
        gathered.copy_(counts)

    pairs = TOKENS * TOP_K
    rule = SplitRule(worth=1.0, num_tried=3, num_off=6)
    split = BatchSplit(table, exchange, source=0, num_sources=8, max_pairs=pairs, rule=rule)
    batch = torch.from_numpy(np.random.default_rng(1).choice(EXPERTS, (TOKENS, TOP_K))).cuda()
    seen = []
    for _ in range(24):
        for layer in range(2):
            # Layer 0 is uneven in every batch. Of layer 1 every count is 0: nothing to gain.
            counts.fill_(0)
            if layer == 0:
                counts[:, placement.slot_to_expert[0, :36]] = 100
            if split.is_on(layer, batch):
                split.slots(layer, batch)
            else:
                seen.append(layer)
    torch.cuda.synchronize()

    assert set(seen) == {1}
    # Tried in three passes, known two passes later, then left out of six, and so on.
    assert 8 <= len(seen) <= 14
    assert len(exchanges) == 48 - len(seen)


def test_captured_graph_of_few_rows_holds_no_split() -> None:
    topology = Topology.uniform(1, 8, 36)
    table = RoutingTable(
        random_placement(topology, 4), max_replicas=8, device="cuda", topology=topology
    )
    split = BatchSplit(table, lambda own, to: None, source=0, num_sources=8, max_pairs=8192 * TOP_K)
    held = []
    for tokens in (32, 8192):
        experts = torch.zeros((tokens, TOP_K), dtype=torch.int64, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            held.append(split.is_on(0, experts))
            experts.add_(1)
    assert held == [False, True]
