"""Just-in-time replicas on a GPU: graphs that decide, redirect, pull and serve, as the reference.

Eight ranks are banks of one process on one GPU, each with streams and buffers of its own.
"""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from runtime.batch.pull_rule import PullRule, plan_pulls, slot_tokens
from runtime.batch.split_rule import SplitRule

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from runtime.batch.counts import Exchange
from runtime.batch.pulls import DevicePulls, PulledExperts
from runtime.batch.split import BatchSplit
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import GroupedExperts
from runtime.routing import RoutingTable

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K, TOKENS, RANKS, SLOTS, LAYERS = 64, 4, 200, 8, 10, 2
HIDDEN, INTERMEDIATE = 512, 256
CUDA = torch.device("cuda")
RULE = PullRule(spare_slots=2, least_rows=8, least_gain=8, most_readers=3)
TOPOLOGY = Topology.uniform(1, RANKS, SLOTS)


def random_bank(seed: int, num_slots: int = SLOTS, layers: int = LAYERS) -> ExpertBank:
    schema = ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, torch.bfloat16)
    arena = PlainArena(bank_bytes(schema, layers, num_slots, 0), CUDA)
    bank = ExpertBank(schema, layers, num_slots, num_staging=0, arena=arena)
    generator = torch.Generator(CUDA).manual_seed(seed)
    for layer in range(layers):
        for tensor in bank.weights(layer).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, device=CUDA) * 0.05)
    return bank


def random_placement(seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    rest = rng.choice(EXPERTS, TOPOLOGY.num_slots - EXPERTS)
    layers = [rng.permutation(np.concatenate([np.arange(EXPERTS), rest])) for _ in range(LAYERS)]
    return Placement(np.stack(layers), EXPERTS)


class Group:
    """All ranks of a process."""

    def __init__(self, placement: Placement) -> None:
        self.gathered = torch.zeros((RANKS, EXPERTS), dtype=torch.int32, device=CUDA)
        self.words = torch.zeros((RANKS, 1), dtype=torch.int32, device=CUDA)
        self.banks = [random_bank(rank) for rank in range(RANKS)]
        self.spares = [random_bank(99, RULE.spare_slots, 1) for _ in range(RANKS)]
        self.tables = [
            RoutingTable(
                placement,
                max_replicas=RANKS,
                device="cuda",
                topology=TOPOLOGY,
                extra_slots=RULE.spare_slots,
            )
            for _ in range(RANKS)
        ]
        self.splits = [self._split(rank) for rank in range(RANKS)]
        self.counters = [
            SlotCounter(LAYERS, SLOTS, CUDA, extra_slots=RULE.spare_slots) for _ in range(RANKS)
        ]
        bases = [bank.records(0).data_ptr() for bank in self.banks]
        domain = np.zeros(RANKS, np.int64)
        self.pulls = [
            DevicePulls(
                self.splits[rank],
                TOPOLOGY,
                rank,
                domain,
                RULE,
                bases,
                self.spares[rank],
                self._close(rank),
                self.counters[rank],
            )
            for rank in range(RANKS)
        ]

    def _split(self, rank: int) -> BatchSplit:
        def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
            gathered.copy_(self.gathered)

        return BatchSplit(
            self.tables[rank],
            exchange,
            source=rank,
            num_sources=RANKS,
            max_pairs=TOKENS * TOP_K,
            rule=SplitRule(worth=-math.inf),
        )

    def _close(self, rank: int) -> Exchange:
        # One process runs rank after rank, so nobody has all words yet: the test compares them.
        def exchange(word: torch.Tensor, words: torch.Tensor) -> None:
            self.words[rank].copy_(word)
            words.copy_(word)

        return exchange


def popularity() -> NDArray[np.float64]:
    part = 1.0 / np.arange(1, EXPERTS + 1)
    return part / part.sum()


def test_one_graph_follows_each_batch_and_swap_and_pulls_what_it_redirects_to() -> None:
    placements = [random_placement(seed) for seed in (1, 2)]
    group = Group(placements[0])
    experts = torch.zeros((RANKS, TOKENS, TOP_K), dtype=torch.int64, device=CUDA)
    layer = 1

    def one_layer() -> list[torch.Tensor]:
        chosen = []
        for rank in range(RANKS):
            slots = group.splits[rank].slots(layer, experts[rank])
            chosen.append(group.pulls[rank].redirect(layer, experts[rank], slots))
        for rank in range(RANKS):
            group.pulls[rank].close_layer()
        return chosen

    one_layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = one_layer()

    rng, num_pulled = np.random.default_rng(3), 0
    wide = TOPOLOGY.widened(RULE.spare_slots)
    for step in range(6):
        placement = placements[step // 3]
        if step == 3:
            for table in group.tables:
                table.load(placement, range(LAYERS))
        batch = rng.choice(EXPERTS, (RANKS, TOKENS, TOP_K), p=popularity())
        batch[:, step] = -1
        if step == 2:
            batch[2:] = -1  # ranks without tokens
        counts = np.stack([np.bincount(one[one >= 0], minlength=EXPERTS) for one in batch])
        experts.copy_(torch.from_numpy(batch))
        group.gathered.copy_(torch.from_numpy(counts))
        before = [counter.received.clone() for counter in group.counters]
        graph.replay()
        torch.cuda.synchronize()

        layout = {name: one[layer].cpu() for name, one in group.tables[0].split.items()}
        host = RoutingTable(
            placement,
            max_replicas=RANKS,
            topology=TOPOLOGY,
            extra_slots=RULE.spare_slots,
        )
        split = BatchSplit(host, lambda own, to: None, source=0, num_sources=1, max_pairs=8)
        assert torch.equal(layout["row"], host.split["row"][layer])
        ends = group.splits[0].batch.up_to.cpu().numpy().astype(np.int64)
        served = slot_tokens(counts.sum(axis=0), split.layout(layer), ends)
        expected = plan_pulls(served, np.zeros(RANKS, np.int64), RULE)
        received = np.zeros(wide.num_slots, int)
        for rank in range(RANKS):
            for spare, source in enumerate(expected.source[rank]):
                if source >= 0:
                    giver, slot = divmod(int(source), SLOTS)
                    record = group.banks[giver].live(layer, slot)
                    assert torch.equal(group.spares[rank].live(0, spare), record)
                    num_pulled += 1
            slots, wanted = chosen[rank].cpu().numpy(), batch[rank]
            assert ((slots < 0) == (wanted < 0)).all()
            for slot, expert in zip(slots[wanted >= 0], wanted[wanted >= 0], strict=True):
                holder, place = divmod(int(slot), SLOTS + RULE.spare_slots)
                if place >= SLOTS:
                    source = int(expected.source[holder, place - SLOTS])
                    holder, place = divmod(source, SLOTS)
                assert placement.slot_to_expert[layer, holder * SLOTS + place] == expert
                received[slot] += 1
        by_slot = received.reshape(RANKS, -1)
        assert by_slot[:, SLOTS:].tolist() == (expected.end - expected.first)[:, :].tolist()
        assert by_slot.sum(axis=1).max() <= expected.busiest + RANKS
        moved = sum(
            int((counter.received - old).sum())
            for counter, old in zip(group.counters, before, strict=True)
        )
        assert moved == int((expected.end - expected.first).sum())
        assert len(set(group.words.flatten().tolist())) == 1, "all ranks decided alike"
        assert all(int(pulls.differences) == 0 for pulls in group.pulls)
    assert num_pulled > RANKS
    # A rank of another opinion is counted: by its own word, and by whoever reads it.
    group.words[5] += 1
    group.pulls[0]._kernels.count_differences(group.words, group.pulls[0].differences)
    assert int(group.pulls[0].differences) > 0


@pytest.mark.parametrize("is_padded", [False, True])
def test_spare_slots_are_served_by_the_record_that_was_pulled(is_padded: bool) -> None:
    resident, spare = random_bank(1, 4, 1), random_bank(2, 2, 1)
    whole = random_bank(3, 6, 1)
    whole.records(0)[:4] = resident.records(0)
    whole.records(0)[4:] = spare.records(0)
    counts = torch.tensor([70, 0, 5, 130, 33, 90], dtype=torch.int32, device=CUDA)
    shape = (6, 160, HIDDEN) if is_padded else (int(counts.sum()), HIDDEN)
    given = Received(torch.randn(shape, device=CUDA).to(torch.bfloat16), counts, None)
    first, second, both = (GroupedExperts(one, usual_rows=64) for one in (resident, spare, whole))

    class Closed:
        num_closed = 0

        def redirect(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return slots

        def close_layer(self) -> None:
            self.num_closed += 1

    pulls = Closed()
    found = PulledExperts(first, second, 4, pulls).run(0, given)

    expected = both.run(0, given)
    assert pulls.num_closed == 1
    if is_padded:
        for slot, count in enumerate(counts.tolist()):
            assert torch.equal(found[slot, :count], expected[slot, :count])
    else:
        assert torch.equal(found, expected)


def _two_gpus(rank: int, port: int) -> None:
    from runtime.batch.kernels import pulls as kernels
    from runtime.memory.symmetric import SymmetricArena

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    schema = ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, torch.bfloat16)
    arena = SymmetricArena(bank_bytes(schema, 1, 3, 0), group, device)
    bank = ExpertBank(schema, 1, 3, num_staging=0, arena=arena)
    bank.records(0).fill_(rank + 1)
    bases = [arena.peer(other).data_ptr() for other in range(2)]
    topology = Topology.uniform(1, 2, 3)
    ranks = kernels.Ranks.on(device, topology, np.zeros(2, np.int64), 1, bases)
    decided = kernels.Decided.on(device, 2)
    decided.source.copy_(torch.tensor([3, 0]))  # each the other's slot 0
    records = torch.zeros((1, schema.record_bytes), dtype=torch.uint8, device=device)
    dist.barrier(group)
    kernels.pull(0, rank, ranks, decided, 3, records)
    torch.cuda.synchronize()
    dist.barrier(group)
    assert bool((records == 2 - rank).all())
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")
def test_pull_reads_the_memory_of_another_gpu() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for ended in [pool.submit(_two_gpus, rank, 29811) for rank in range(2)]:
            ended.result()
