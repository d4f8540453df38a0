"""What a split of each batch brings, and what it costs: recorded routing, unseen windows.

    python -m benchmarks.ranks.batch_split balance [--tokens 64 256]
    python -m benchmarks.ranks.batch_split device
    python -m benchmarks.ranks.batch_split rows && python -m benchmarks.ranks.batch_split experts

"balance" plans on earlier windows and judges later ones: max/mean over ranks with the planned
shares, with the split, and the optimum of the batch's linear program on the same replicas. Windows
hold the given tokens of each rank, in recorded order (one request after another) or with blocks of
32 tokens mixed, as a batch of many requests. 256 experts are made of four layers of 64, or eight of
32, beside each other: each token goes to the experts that it had in all of them.

"device" times the kernels on one GPU, in a CUDA graph of 58 layers, against the draw that they
replace: each kernel, all of them without an exchange ("all"), and with eight ranks on that GPU that
exchange counts over memory ("exchanged": a graph on a stream of its own each, all at once; what
NVLink adds is not in it). "off" is a layer whose switch is off. The exchange over a collective is
timed apart, by NCCL, under torchrun:

    torchrun --nproc-per-node 2 -m benchmarks.ranks.batch_split exchange

Traces lie where EPLB_DATA points, or at ../shared/data beside the repository.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from eplb import Placement, Topology, plan
from eplb.shares.batch import EVERY_BATCH, MOST_WAYS, ROUNDS, SplitRule, split_batch, split_layout
from runtime.batch_split import BatchSplit, Exchange, all_gather_counts
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import Experts, GroupedExperts
from runtime.peer_counts import PeerCounts
from runtime.routing import RoutingTable

DATA = Path(os.environ.get("EPLB_DATA", Path(__file__).parents[3] / "shared" / "data"))
Ints = NDArray[np.int64]
MOST_WINDOWS, NUM_HISTORY, GRAPH_LAYERS = 8, 8, 58
RANKS_AT_ONCE, EXCHANGED_LAYERS, HELD_CYCLES = 8, 16, 20_000_000
NEVER = SplitRule(worth=math.inf, num_tried=1, num_off=10**6)


@dataclass(frozen=True)
class Case:
    """A model's routing on a number of ranks."""

    model: str
    wide: int  # layers that make one
    num_ranks: int
    num_slots: int

    @property
    def name(self) -> str:
        """As tables show it."""
        made = f" x{self.wide}" if self.wide > 1 else ""
        return f"{self.model}{made}, {self.num_slots}/{self.num_ranks}"

    @property
    def topology(self) -> Topology:
        """All ranks in one domain."""
        return Topology.uniform(1, self.num_ranks, self.num_slots // self.num_ranks)


CASES = (
    Case("gpt-oss", 1, 8, 40),
    Case("gpt-oss", 1, 32, 64),
    Case("V2-Lite", 1, 8, 72),
    Case("V2-Lite", 1, 32, 96),
    Case("gpt-oss", 8, 32, 288),
    Case("gpt-oss", 8, 64, 320),
    Case("V2-Lite", 4, 32, 288),
    Case("V2-Lite", 4, 64, 320),
)


def expert_ids(case: Case) -> Ints:
    """[L, tokens, K] in recorded order."""
    if case.model == "gpt-oss":
        found = np.load(DATA / "gptoss20b_decode.npz")["expert_ids"].transpose(1, 0, 2)
    else:
        both = [np.load(DATA / f"dsv2lite_{name}.npz")["expert_ids"] for name in DOMAINS]
        found = np.concatenate(both, axis=1)
    ids: Ints = found.astype(np.int64)
    if case.wide == 1:
        return ids
    one = 32 if case.model == "gpt-oss" else 64
    num_layers = len(ids) // case.wide
    ids = ids[: num_layers * case.wide].reshape(num_layers, case.wide, *ids.shape[1:])
    ids = ids + (np.arange(case.wide) * one)[:, None, None]
    return np.concatenate([ids[:, nth] for nth in range(case.wide)], axis=2)


DOMAINS = ("intent", "summary")


def windows(ids: Ints, tokens: int, order: str = "mixed") -> Ints:
    """[T, L, E] of runs of tokens: as recorded, or with blocks of 32 tokens mixed."""
    if order == "mixed":
        blocks = ids.shape[1] // 32
        drawn = np.random.default_rng(0).permutation(blocks)
        ids = ids[:, : blocks * 32].reshape(len(ids), blocks, 32, -1)[:, drawn]
        ids = ids.reshape(len(ids), blocks * 32, -1)
    num, num_experts = ids.shape[1] // tokens, int(ids.max()) + 1
    return np.array(
        [
            [
                np.bincount(layer[w * tokens : (w + 1) * tokens].ravel(), minlength=num_experts)
                for layer in ids
            ]
            for w in range(num)
        ]
    )


def optimum(counts: Ints, ranks: list[Ints], num_ranks: int) -> float:
    """Least tokens of the busiest rank: the linear program on given replicas."""
    return optimal_parts(counts, ranks, num_ranks)[0]


def optimal_parts(
    counts: Ints, ranks: list[Ints], num_ranks: int
) -> tuple[float, list[tuple[int, int]], NDArray[np.float64]]:
    """The optimum, the pairs of expert and rank, and the tokens of each pair."""
    from scipy.optimize import linprog

    pairs = [(expert, rank) for expert, held in enumerate(ranks) for rank in held.tolist()]
    columns = np.arange(len(pairs))
    expert, rank = np.array(pairs).T
    on_rank = np.zeros((num_ranks, len(pairs) + 1))
    on_rank[rank, columns], on_rank[:, -1] = 1.0, -1.0
    of_expert = np.zeros((len(counts), len(pairs) + 1))
    of_expert[expert, columns] = 1.0
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    found = linprog(cost, on_rank, np.zeros(num_ranks), of_expert, counts, method="highs")
    return float(found.fun), pairs, found.x[:-1]


@dataclass(frozen=True)
class Judged:
    """Max/mean over ranks of one layer and window."""

    planned: float
    split: float
    best: float


def judge(case: Case, tokens: int, rounds: int, order: str) -> Iterator[Judged]:
    """Layers of the windows that follow the plan's."""
    loads = windows(expert_ids(case), tokens * case.num_ranks, order)
    half = min(NUM_HISTORY, len(loads) // 2)
    topology = case.topology
    placement = plan(loads[:half].sum(axis=0), topology).target
    rank_of = topology.rank_of_slot
    for layer in range(placement.num_layers):
        held = placement.expert_to_slots[layer]
        layout = split_layout(
            held,
            placement.slot_share[layer],
            rank_of,
            num_split=case.num_slots - placement.num_experts,
            ways=MOST_WAYS,
        )
        ranks = [np.unique(rank_of[slots[slots >= 0]]) for slots in held]
        share = placement.slot_share[layer]
        for counts in loads[half : half + MOST_WINDOWS, layer]:
            mean = counts.sum() / case.num_ranks
            per_slot = counts[placement.slot_to_expert[layer]] * share
            planned = np.bincount(rank_of, per_slot).max()
            split = split_batch(counts, layout, SplitRule(rounds=rounds)).rank_load.max()
            yield Judged(
                planned / mean, split / mean, optimum(counts, ranks, case.num_ranks) / mean
            )


def show_balance(tokens: list[int], rounds: int, order: str) -> None:
    """Print one line for each case and size."""
    print(f"{'case':28}{'tokens':>7}{'layers':>7}{'planned':>9}{'split':>9}{'LP':>9}", end="")
    print(f"{'split/LP':>10}{'p99':>9}{'max':>9}{'excess kept':>12}")
    for case in CASES:
        for size in tokens:
            found = list(judge(case, size, rounds, order))
            planned, split, best = np.array([(j.planned, j.split, j.best) for j in found]).T
            gap = split / best
            kept = (split - 1).mean() / (planned - 1).mean()
            print(
                f"{case.name:28}{size:7}{len(found):7}{planned.mean():9.4f}{split.mean():9.4f}"
                f"{best.mean():9.4f}{gap.mean():10.4f}{np.quantile(gap, 0.99):9.4f}"
                f"{gap.max():9.4f}{kept:12.2f}",
                flush=True,
            )


# -- on a GPU


def replayed(run: Callable[[int], object], replays: int = 60) -> list[float]:
    """Microseconds of a layer, of graphs of 58."""
    for layer in range(3):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(GRAPH_LAYERS):
            run(layer)
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / GRAPH_LAYERS)
    return sorted(times)


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


def show_device() -> None:
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
        for tokens in (32, 128, 512, 1024):
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
    middle = [float(np.median(replayed(part))) for part in parts]
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
    table: RoutingTable, load: NDArray[np.float64], tokens: int, top_k: int, replays: int = 60
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


EXPERT_CASES = (
    (CASES[0], (13, 102, 819, 3277)),
    (CASES[1], (8, 64, 256, 512, 2048)),
    (CASES[2], (43, 171, 683)),
    (CASES[3], (32, 256)),
)
MOST_TIMED = 10  # layers and windows of a row of the table


def busiest(case: Case, rows: int, order: str) -> Iterator[tuple[Ints, ...]]:
    """Rows by slot [C] of the busiest rank with planned shares and with the split."""
    top_k = 4 if case.model == "gpt-oss" else 6
    loads = windows(expert_ids(case), rows * case.num_slots // top_k, order)
    half = min(NUM_HISTORY, len(loads) // 2)
    topology, per_rank = case.topology, case.num_slots // case.num_ranks
    placement = plan(loads[:half].sum(axis=0), topology).target
    rng = np.random.default_rng(rows)
    for _ in range(MOST_TIMED):
        layer = int(rng.integers(placement.num_layers))
        counts = loads[half + int(rng.integers(len(loads) - half)), layer]
        planned, split = rows_of_slots(case, placement, layer, counts)
        yield tuple(
            np.rint(by_rank[by_rank.sum(axis=1).argmax()]).astype(np.int64)
            for by_rank in (planned.reshape(-1, per_rank), split.reshape(-1, per_rank))
        )


def rows_of_slots(
    case: Case, placement: Placement, layer: int, counts: Ints
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows [S] with planned shares and with the split."""
    layout = split_layout(
        placement.expert_to_slots[layer],
        placement.slot_share[layer],
        case.topology.rank_of_slot,
        num_split=case.num_slots - placement.num_experts,
        ways=MOST_WAYS,
    )
    planned = counts[placement.slot_to_expert[layer]] * placement.slot_share[layer]
    split = planned.copy()
    parts = split_batch(counts, layout).tokens
    used = layout.slot >= 0
    split[layout.slot[used]] = parts[used]
    return planned, split


def write_rows(path: Path) -> None:
    """Write the rows of busiest ranks, planned with and without the split, for ``show_experts``."""
    found = [
        {
            "case": case.name,
            "order": order,
            "rows": rows,
            "busiest": [[one.tolist() for one in both] for both in busiest(case, rows, order)],
        }
        for order in ("recorded", "mixed")
        for case, sizes in EXPERT_CASES
        for rows in sizes
    ]
    path.write_text(json.dumps(found))


def show_experts(path: Path) -> None:
    """Print one line for each case and size."""
    from runtime.kernels.quantise import GROUP

    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'case':20}{'order':>10}{'rows a slot':>12}{'planned':>10}{'split':>10}", end="")
    print(f"{'balanced':>10}{'gain':>8}")
    schema, layers = ExpertSchema.swiglu_fp8(7168, 2048), 4
    for row in json.loads(path.read_text()):
        num_slots, rows = len(row["busiest"][0][0]), row["rows"]
        arena = PlainArena(bank_bytes(schema, layers, num_slots, 0), torch.device("cuda"))
        arena.bytes.copy_(torch.randint_like(arena.bytes, 0, 120))
        bank = ExpertBank(schema, layers, num_slots, num_staging=0, arena=arena)
        for layer in range(layers):
            for name, tensor in bank.weights(layer).items():
                if name.endswith("scale"):
                    tensor.fill_(1e-3)
        experts, times = GroupedExperts(bank, usual_rows=rows), []
        for both in row["busiest"]:
            found = []
            for counts in (*both, [rows] * num_slots):
                given = torch.randint(0, 120, (sum(counts), 7168), dtype=torch.uint8, device="cuda")
                received = Received(
                    given.view(torch.float8_e4m3fn),
                    torch.tensor(counts, dtype=torch.int32, device="cuda"),
                    None,
                    torch.full((sum(counts), 7168 // GROUP), 1e-3, device="cuda"),
                )
                run = partial(_run, experts, layers, received)
                found.append(float(np.median(replayed(run, 7))))
            times.append(found)
        planned, split, even = np.median(np.array(times), axis=0)
        print(
            f"{row['case']:20}{row['order']:>10}{rows:12}{planned:10.1f}{split:10.1f}{even:10.1f}"
            f"{1 - split / planned:8.1%}",
            flush=True,
        )
        del bank, arena, experts


def _run(experts: Experts, num_layers: int, received: Received, layer: int) -> None:
    experts.run(layer % num_layers, received)


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

        times = replayed(one)
        if rank == 0:
            middle, late = np.median(times), np.quantile(times, 0.99)
            print(
                f"all-gather of {num_experts} counts, {group.size()} GPUs: {middle:.1f} us a layer"
            )
            print(f"  p99 {late:.1f} us")
    dist.destroy_process_group()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("balance", "device", "rows", "experts", "exchange"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--order", choices=("recorded", "mixed"), default="recorded")
    parser.add_argument("--file", type=Path, default=Path("rows.json"))
    asked = parser.parse_args()
    if asked.what == "balance":
        show_balance(asked.tokens, asked.rounds, asked.order)
    elif asked.what == "device":
        show_device()
    elif asked.what == "rows":
        write_rows(asked.file)
    elif asked.what == "experts":
        show_experts(asked.file)
    else:
        show_exchange()


if __name__ == "__main__":
    main()
