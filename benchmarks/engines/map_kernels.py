"""The engines' own kernels that map expert ids to replicas, on a GPU, in a captured graph.

    python3 -m benchmarks.engines.map_kernels --vllm base_router.py \
        --sglang eplb_map_record_fused.py --sglang-dispatch expert_location_dispatch.py

The files are those of the engines' wheels (vllm/model_executor/layers/fused_moe/router/,
sglang/srt/eplb/), loaded by path: the engines need not be installed. Names that they import from
their own packages are stand-ins that no kernel calls.

256 experts, 288 slots, 32 ranks on 4 nodes, lognormal(1.0) loads, shares by the planner, lists as
the plug-ins write them. 8 distinct experts a row, drawn by load. *Exact*: every id and every count
equals the rule in numpy. Errors are of a replica's part of its expert's rows; *noise* is
sqrt(p(1-p)/m), that of independent draws. Seeded.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.result_table import Row, show
from eplb import Placement, Topology, plan
from rebalance.engines.sglang.planner.replica_weights import (
    list_weights,
    replica_lists,
    shares_of,
    source_table,
)
from rebalance.engines.vllm.replica_lists import chosen_replicas, repeated_lists, repetitions

EXPERTS, SLOTS, RANKS, NODES, TOP_K = 256, 288, 32, 4, 8
ROWS, BATCHES, SEED = 4096, 50, 20261122
FEW_ROWS = 64
TOPOLOGY = Topology.uniform(NODES, RANKS // NODES, SLOTS // RANKS)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of a package that is not installed; every name in them is an empty class."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Claim the package and what is below it."""
        if name.split(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its stand-ins; triton and the platform are real."""
        import triton
        import triton.language

        vars(module).update(
            triton=triton,
            tl=triton.language,
            current_platform=SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False),
            __getattr__=lambda name: type(name, (), {}),
        )


def load(path: Path, package: str) -> Any:
    """Run one file of an engine as a module of its own."""
    sys.meta_path.insert(0, StandIns(package))
    try:
        spec = importlib.util.spec_from_file_location(f"engine_{path.stem}", path)
        assert spec is not None, "the path ends with .py"
        assert spec.loader is not None, "a source file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.meta_path.pop(0)


def planned(random: np.random.Generator) -> tuple[Placement, Floats]:
    """A plan with uneven shares for one layer, and the load that it was made for."""
    weight = random.lognormal(0.0, 1.0, EXPERTS)
    load = random.multinomial(4_000_000, weight / weight.sum())
    return plan(load[None], TOPOLOGY).target, load / load.sum()


def with_drawn_shares(placement: Placement, random: np.random.Generator) -> Placement:
    """The same placement with uneven shares for every expert that has replicas."""
    held, share = placement.slot_to_expert, np.ones((1, SLOTS))
    for expert in np.flatnonzero(np.bincount(held[0]) > 1):
        slots = np.flatnonzero(held[0] == expert)
        share[0, slots] = random.dirichlet(np.full(len(slots), 3.0))
    return Placement(held, EXPERTS, placement.generation, share)


def rows_of(random: np.random.Generator, chance: Floats, num_rows: int) -> Ints:
    """[N, K] distinct experts of each row, drawn in proportion to their load."""
    keys = np.log(chance) + random.gumbel(size=(num_rows, EXPERTS))
    return np.argsort(-keys, axis=1)[:, :TOP_K]


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a call after a first one, which compiles; also its output."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


class Errors:
    """How far the parts of replicas are from the plan, over batches."""

    def __init__(self, placement: Placement, share: Floats) -> None:
        self._held, self._share = placement.slot_to_expert[0], share
        self._has_peers = np.bincount(self._held, minlength=EXPERTS)[self._held] > 1
        self.total = np.zeros(SLOTS, dtype=np.int64)
        self._found: list[Floats] = []
        self._noise: list[Floats] = []

    def add(self, counts: Ints) -> None:
        """Count the rows that each slot got in a batch."""
        self.total += counts
        rows = np.bincount(self._held, counts, minlength=EXPERTS)[self._held]
        seen = self._has_peers & (rows >= FEW_ROWS)
        part, share, rows = counts[seen] / rows[seen], self._share[seen], rows[seen]
        self._found.append(np.abs(part - share))
        self._noise.append(np.sqrt(share * (1 - share) / rows))

    def text(self) -> str:
        """Mean and 99th percentile beside the noise of independent draws."""
        found, noise = np.concatenate(self._found), np.concatenate(self._noise)
        return (
            f"{found.mean():.2%} mean, {np.quantile(found, 0.99):.2%} p99; noise {noise.mean():.2%}"
        )

    def over_all(self) -> str:
        """The largest error over all batches together, and the imbalance of ranks."""
        rows = np.bincount(self._held, self.total, minlength=EXPERTS)[self._held]
        error = np.abs(self.total / np.maximum(rows, 1) - self._share)[self._has_peers]
        ranks = self.total.reshape(RANKS, -1).sum(axis=1)
        return f"{error.max():.2%} largest; imbalance of ranks {ranks.max() / ranks.mean():.4f}"


def vllm_rows(path: Path, placement: Placement, chance: Floats, random: Any) -> list[Row]:
    """The kernel of vLLM's router with repeated physical ids."""
    kernel = load(path, "vllm").eplb_map_to_physical_and_record
    held = placement.slot_to_expert.astype(np.int64)
    repeats = repetitions(held, placement.slot_share)
    experts, lists = repeated_lists(held, repeats).of_layer(0)
    width = max(lists.shape[1], int(np.bincount(held[0]).max()))
    table, counts = np.full((EXPERTS, width), -1), np.bincount(held[0], minlength=EXPERTS)
    for expert in range(EXPERTS):
        table[expert, : counts[expert]] = np.flatnonzero(held[0] == expert)
    table[experts, : lists.shape[1]], counts[experts] = lists, lists.shape[1]
    ids = torch.zeros((ROWS, TOP_K), dtype=torch.int32, device="cuda")
    load_view = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")
    given = torch.from_numpy(table).cuda(), torch.from_numpy(counts).cuda()
    switch = torch.ones(1, dtype=torch.int32, device="cuda")
    graph, out = captured(lambda: kernel(ids, load_view, *given, switch))
    share = placement.slot_share[0]

    def replay(batch: Ints) -> Ints:
        ids.copy_(torch.from_numpy(batch))
        load_view.zero_()
        graph.replay()
        rows, expected = np.arange(ROWS), np.empty_like(batch)
        for expert in np.unique(batch):
            where = batch == expert
            entries = table[expert, : counts[expert]]
            expected[where] = chosen_replicas(
                np.broadcast_to(rows[:, None], batch.shape)[where], entries
            )
        assert (out.cpu().numpy() == expected).all(), "vLLM's kernel chose another replica"
        found = load_view.cpu().numpy().astype(np.int64)
        assert (found == np.bincount(expected.ravel(), minlength=SLOTS)).all(), "another count"
        return found

    errors = Errors(placement, share)
    for _ in range(BATCHES):
        errors.add(replay(rows_of(random, chance, ROWS)))
    worst = dict.fromkeys((64, ROWS), 0.0)
    for expert in experts.tolist():
        replay(np.full((ROWS, TOP_K), expert))
        chosen = out.cpu().numpy()[:, 0]
        for count in worst:
            parts = np.bincount(chosen[:count], minlength=SLOTS) / count
            worst[count] = max(worst[count], float(np.abs(parts - share)[held[0] == expert].max()))
    return [
        (f"vLLM: {BATCHES} replays of {ROWS} rows x {TOP_K}", "exact", "exact"),
        (f"  {len(experts)} experts with lists: 64 rows", f"{worst[64]:.2%} largest", "<= 2 %"),
        (f"  the same: {ROWS} rows", f"{worst[ROWS]:.2%} largest", "<= 0.5 %"),
        (f"  rows that an expert gets, {FEW_ROWS} or more", errors.text(), "beside the noise"),
        ("  all batches together", errors.over_all(), "-"),
    ]


def sglang_static_rows(path: Path, placement: Placement, chance: Floats, random: Any) -> list[Row]:
    """SGLang's fused kernel of the ``static`` rule, for each source rank."""
    kernel = load(path, "sglang").eplb_map_and_record_fused
    held = placement.slot_to_expert.astype(np.int64)
    weights = list_weights(held, placement.slot_share, EXPERTS, RANKS, is_full=True)
    table = source_table(held, weights, EXPERTS, TOPOLOGY)[0]  # [E, R]
    each = ROWS // RANKS
    ids = torch.zeros((each, TOP_K), dtype=torch.int32, device="cuda")
    load_view = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")
    own = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    info = SimpleNamespace(
        ep_dispatch_algorithm="static", partial_logical_to_rank_dispatch_physical_map=own
    )
    graph, out = captured(lambda: kernel(ids, info, load_view, None))
    errors = Errors(placement, shares_of(held, weights)[0])
    for _ in range(BATCHES):
        load_view.zero_()
        expected = np.zeros(SLOTS, dtype=np.int64)
        for source in range(RANKS):
            batch = rows_of(random, chance, each)
            ids.copy_(torch.from_numpy(batch))
            own.copy_(torch.from_numpy(table[:, source]))
            graph.replay()
            chosen = table[batch, source]
            assert (out.cpu().numpy() == chosen).all(), "SGLang's kernel chose another replica"
            expected += np.bincount(chosen.ravel(), minlength=SLOTS)
        found = load_view.cpu().numpy().astype(np.int64)
        assert (found == expected).all(), "another count"
        errors.add(found)
    return [
        (f"SGLang static: {BATCHES} x {RANKS} sources x {each} rows", "exact", "exact"),
        (f"  rows that an expert gets, {FEW_ROWS} or more", errors.text(), "beside the noise"),
        ("  all batches together", errors.over_all(), "-"),
    ]


def sglang_dynamic_rows(path: Path, placement: Placement, chance: Floats, random: Any) -> list[Row]:
    """SGLang's ``dynamic`` rule with lists of repeated slots: by chance, and by row."""
    module = load(path, "sglang")
    held = placement.slot_to_expert.astype(np.int64)
    weights = list_weights(held, placement.slot_share, EXPERTS, 64)
    lists = replica_lists(held, weights, EXPERTS)[0]
    lengths = (lists >= 0).sum(axis=1)
    given = torch.from_numpy(lists).cuda(), torch.from_numpy(lengths).cuda()
    ids = torch.zeros((ROWS, TOP_K), dtype=torch.int64, device="cuda")
    share = shares_of(held, weights)[0]
    rows: list[Row] = []
    for name, by_row in (("by chance", False), ("by row", True)):
        info = module.ExpertLocationDispatchInfo("dynamic", None, *given, SLOTS, by_row)
        graph, out = captured(lambda info=info: module.topk_ids_logical_to_physical(ids, info))
        errors = Errors(placement, share)
        for _ in range(BATCHES):
            batch = rows_of(random, chance, ROWS)
            ids.copy_(torch.from_numpy(batch))
            graph.replay()
            chosen = out.cpu().numpy()
            assert (held[0][chosen] == batch).all(), "SGLang chose a slot of another expert"
            if by_row:
                row = np.arange(ROWS)[:, None]
                assert (chosen == lists[batch, row % lengths[batch]]).all(), "another replica"
            errors.add(np.bincount(chosen.ravel(), minlength=SLOTS))
        rows += [
            (f"SGLang dynamic, {name}: {BATCHES} x {ROWS} rows", "right", "right"),
            (f"  rows that an expert gets, {FEW_ROWS} or more", errors.text(), "beside the noise"),
            ("  all batches together", errors.over_all(), "-"),
        ]
    return rows


def main() -> None:
    """Run the kernels of the files that are given, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--sglang-dispatch", type=Path)
    given = parser.parse_args()
    random = np.random.default_rng(SEED)
    placement, chance = planned(random)
    rows: list[Row] = []
    if given.vllm is not None:
        rows.append(("shares drawn, Dirichlet(3):", "", "-"))
        rows += vllm_rows(given.vllm, with_drawn_shares(placement, random), chance, random)
        rows.append(("shares of the planner:", "", "-"))
    for path, measure in (
        (given.vllm, vllm_rows),
        (given.sglang, sglang_static_rows),
        (given.sglang_dispatch, sglang_dynamic_rows),
    ):
        if path is not None:
            rows += measure(path, placement, chance, random)
    show(rows, max((len(row[0]) for row in rows), default=0))


if __name__ == "__main__":
    main()
