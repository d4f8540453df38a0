"""Times of the kernels on one GPU, against the draw that they replace, and of the exchange by NCCL.

Kernels are timed in a CUDA graph of 58 layers: each kernel, all of them without an exchange
("all"), and with eight ranks on that GPU that exchange counts over memory ("exchanged": a graph on
a stream of its own each, all at once; what NVLink adds is not in it). "off" is a layer whose switch
is off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ranks.batch_split.balance import optimum
from benchmarks.ranks.batch_split.recorded import Ints
from eplb import Placement, Topology, plan
from eplb.shares.batch import EVERY_BATCH, SplitRule
from runtime.batch_split import BatchSplit, Exchange, all_gather_counts
from runtime.model.graph_times import replayed_us
from runtime.peer_counts import PeerCounts
from runtime.routing import RoutingTable

GRAPH_LAYERS, REPLAYS = 58, 60
RANKS_AT_ONCE, EXCHANGED_LAYERS, HELD_CYCLES = 8, 16, 20_000_000
NEVER = SplitRule(worth=math.inf, num_tried=1, num_off=10**6)


def skewed(num_experts: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """[58, E] loads."""
    return rng.gamma(0.5, 1.0, (GRAPH_LAYERS, num_experts)) + 0.01


def drawn(load: NDArray[np.float64], tokens: int, top_k: int, seed: int) -> torch.Tensor:
    """[L, tokens, K] distinct experts by load (Gumbel top-k)."""
    made = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.from_numpy(np.log(load)).float().cuda()
    shape = (len(load), tokens, load.shape[1])
    noise = -torch.empty(shape, device="cuda").exponential_(generator=made).log()
    return torch.topk(logits[:, None] + noise, top_k, dim=2).indices.contiguous()


def placed(load: NDArray[np.float64], topology: Topology) -> Placement:
    """The plan for loads [L, E]."""
    return plan(load * 1000, topology).target


def show_device(sizes: Sequence[int]) -> None:
    """Print one line for each shape and size, and check every slot of the last layer."""
    # Before the first use of the device: ranks that wait for each other need a queue each.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'experts, slots/ranks':24}{'tokens':>7}{'draw':>8}", end="")
    print(f"{'count':>8}{'split':>8}{'choose':>8}{'all':>8}{'off':>8}{'exchanged':>10}", end="")
    print(f"{'p99':>8}{'added':>8}{'split/LP':>10}")
    for num_experts, top_k, num_ranks, num_slots in (
        (32, 4, 8, 40),
        (32, 4, 32, 64),
        (256, 8, 8, 288),
        (256, 8, 32, 288),
        (256, 8, 64, 320),
        (256, 8, 144, 288),
    ):
        rng = np.random.default_rng(num_slots)
        load = skewed(num_experts, rng)
        topology = Topology.uniform(1, num_ranks, num_slots // num_ranks)
        placement = placed(load, topology)
        drifted = load * rng.lognormal(0, 0.3, load.shape)
        table = RoutingTable(
            placement,
            max_replicas=min(num_ranks, num_slots - num_experts + 1),
            device="cuda",
            topology=topology,
        )
        for tokens in sizes:
            line = timed_line(table, placement, topology, drifted, tokens, top_k)
            name = f"{num_experts}, {num_slots}/{num_ranks}"
            print(f"{name:24}{tokens:7}{line}", flush=True)


def timed_line(
    table: RoutingTable,
    placement: Placement,
    topology: Topology,
    load: NDArray[np.float64],
    tokens: int,
    top_k: int,
) -> str:
    """Times and the realised balance of one case."""
    num_sources, num_experts = topology.num_ranks, load.shape[1]
    batches = drawn(load, tokens, top_k, seed=tokens)
    others = np.random.default_rng(tokens)
    share = load / load.sum(axis=1, keepdims=True)
    pairs = tokens * top_k
    counts = np.stack([others.multinomial(pairs, share) for _ in range(num_sources)])  # [N, L, E]
    counts[0] = (
        torch.stack([torch.bincount(one.flatten(), minlength=num_experts) for one in batches])
        .cpu()
        .numpy()
    )
    given = torch.from_numpy(counts.transpose(1, 0, 2).astype(np.int32)).cuda().contiguous()
    split = new_split(table, lambda own, gathered: None, num_sources, tokens * top_k, EVERY_BATCH)
    off = new_split(table, lambda own, gathered: None, num_sources, tokens * top_k, NEVER)
    seed = torch.ones(1, dtype=torch.int64, device="cuda")

    def whole(layer: int, split: BatchSplit = split) -> None:
        split.count(batches[layer])
        split.split(layer, given[layer])
        split.choose(layer, batches[layer])

    parts = (
        lambda layer: table.draw(layer, batches[layer], seed),
        lambda layer: split.count(batches[layer]),
        lambda layer: split.split(layer, given[layer]),
        lambda layer: split.choose(layer, batches[layer]),
        whole,
        lambda layer: whole(layer, off),
    )
    middle = [median(replayed_us(part, GRAPH_LAYERS, REPLAYS)) for part in parts]
    together = exchanged(table, load, tokens, top_k)
    middle += [float(np.median(together)), float(np.quantile(together, 0.99))]
    gaps = []
    for layer in range(0, GRAPH_LAYERS, 7):
        total = counts[:, layer].sum(axis=0)
        split.split(layer, given[layer])
        found = realised(split, table, layer, total, topology)
        held = placement.expert_to_slots[layer]
        ranks = [np.unique(topology.rank_of_slot[slots[slots >= 0]]) for slots in held]
        gaps.append(found / optimum(total, ranks, topology.num_ranks))
    figures = "".join(f"{one:8.1f}" for one in middle[:6])
    added = middle[6] - middle[0]
    return f"{figures}{middle[6]:10.1f}{middle[7]:8.1f}{added:8.1f}{max(gaps):10.4f}"


def new_split(
    table: RoutingTable,
    exchange: Exchange | PeerCounts,
    num_sources: int,
    pairs: int,
    rule: SplitRule,
) -> BatchSplit:
    """Of source 0."""
    return BatchSplit(
        table, exchange, source=0, num_sources=num_sources, max_pairs=pairs, rule=rule
    )


@cache
def _streams() -> list[torch.cuda.Stream]:
    """One for each rank; made once, so that no two share a queue of the device."""
    return [torch.cuda.Stream() for _ in range(RANKS_AT_ONCE)]


def exchanged(
    table: RoutingTable, load: NDArray[np.float64], tokens: int, top_k: int, replays: int = REPLAYS
) -> list[float]:
    """Microseconds of a layer of the first of several ranks that exchange counts over memory."""
    num_experts = load.shape[1]
    words = torch.zeros(
        (RANKS_AT_ONCE, 2, num_experts + RANKS_AT_ONCE), dtype=torch.int64, device="cuda"
    )
    peers = [one.data_ptr() for one in words]
    streams = _streams()
    graphs, exchanges, splits = [], [], []
    batches = [drawn(load, tokens, top_k, seed=rank) for rank in range(RANKS_AT_ONCE)]
    for rank in range(RANKS_AT_ONCE):
        exchanges.append(PeerCounts(words[rank], peers))
        splits.append(
            BatchSplit(
                table,
                exchanges[rank],
                source=rank,
                num_sources=RANKS_AT_ONCE,
                max_pairs=tokens * top_k,
                rule=EVERY_BATCH,
            )
        )
    torch.cuda.synchronize()  # what they read was made on another stream
    for rank, stream in enumerate(streams):  # compiled, all at once: they wait for each other
        with torch.cuda.stream(stream):
            splits[rank].slots(0, batches[rank][0])
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(EXCHANGED_LAYERS):
                splits[rank].slots(layer, batches[rank][layer])
        graphs.append(graph)
    times = []
    for _ in range(replays):
        begin, end, gate = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        # Until all graphs are launched: they start together. Few layers, so that all kernels of all
        # ranks fit into the queues of one device.
        torch.cuda._sleep(HELD_CYCLES)
        gate.record()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                gate.wait()
                if rank == 0:
                    begin.record()
                graphs[rank].replay()
                if rank == 0:
                    end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / EXCHANGED_LAYERS)
    for one in exchanges:
        if one.late():
            raise RuntimeError(one.late())
    return sorted(times)


def realised(
    split: BatchSplit, table: RoutingTable, layer: int, total: Ints, topology: Topology
) -> float:
    """Tokens of the busiest rank by the boundaries that the kernel wrote."""
    ends = split.batch.up_to.cpu().numpy().astype(np.int64)
    expert = table.split["expert"][layer].cpu().numpy()
    rank = table.split["rank"][layer].cpu().numpy()
    fixed = table.split["fixed"][layer].cpu().numpy()
    share = table.split["fixed_share"][layer].cpu().numpy()
    load = (np.where(fixed >= 0, total[fixed], 0) * share).sum(axis=1)
    for row in np.flatnonzero(expert >= 0):
        cut = np.minimum(ends[row], total[expert[row]])
        np.add.at(load, np.maximum(rank[row], 0), np.diff(cut, prepend=0) * (rank[row] >= 0))
    return float(load.max())


def show_exchange() -> None:
    """Print the time of an all-gather of counts by NCCL, in a graph."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = dist.group.WORLD
    assert group is not None, "just made"
    exchange = all_gather_counts(group)
    for num_experts in (32, 256):
        counts = torch.zeros(num_experts, dtype=torch.int32, device="cuda")
        gathered = torch.zeros((group.size(), num_experts), dtype=torch.int32, device="cuda")

        def one(layer: int, counts: torch.Tensor = counts, to: torch.Tensor = gathered) -> None:
            exchange(counts, to)

        times = replayed_us(one, GRAPH_LAYERS, REPLAYS)
        if rank == 0:
            middle, late = np.median(times), np.quantile(times, 0.99)
            print(
                f"all-gather of {num_experts} counts, {group.size()} GPUs: {middle:.1f} us a layer"
            )
            print(f"  p99 {late:.1f} us")
    dist.destroy_process_group()
