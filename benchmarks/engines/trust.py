"""Planted faults of ten kinds in vLLM's own layers: are they found, and do they spread?

    .venv-vllm/bin/python -m benchmarks.engines.trust [--seeds 6]

Four gloo ranks with vLLM's own layers, loader and mover (``tests.support.engines.vllm_bench``) and
the plug-in's mover and placement check. After a move one fault is planted on one rank, all slots
are looked at, and all layers are moved once more: a fault that another slot has then has spread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from rebalance.engines.common.conform import EACH, LAYERS, RANKS
from rebalance.engines.common.fsck import check
from rebalance.engines.common.plugin_settings import settings_of
from rebalance.engines.vllm.conform import subject_of
from rebalance.engines.vllm.hooks import install
from rebalance.engines.vllm.process import PluginProcess
from tests.support.engines import vllm_bench

# Kinds, and the quantisations in which each is planted.
WITH_SCALES = ("fp8 block", "mxfp4", "int8")
KINDS = {
    "scales swapped": WITH_SCALES,
    "stale slot": WITH_SCALES,
    "off by one": WITH_SCALES,
    "bit": WITH_SCALES,
    "NaN": ("fp8 block", "int8"),
    "derived factor": ("fp8 tensor",),
    "map entry": WITH_SCALES,
    "list entry": WITH_SCALES,
    "reload": ("fp8 block", "mxfp4", "int8"),
    "half a move": WITH_SCALES,
}
SPREADING = ("scales swapped", "stale slot", "off by one", "bit", "NaN", "half a move")


class Planter:
    """One rank with the plug-in, in which faults are planted and looked for."""

    def __init__(self, rank: int, case: str, folder: Path) -> None:
        file = folder / f"eplb-{rank}.toml"
        file.write_text(
            '[deployment]\nname = "trust"\n[engine]\nplan = false\ntap = false\nrecords = "off"\n'
        )
        settings = settings_of({"EPLB_CONFIG": str(file)})
        assert settings is not None
        check.PART = 1e6  # a look in every visit
        self.rank, self.process = rank, PluginProcess(settings)
        install(self.process)
        _, self.state, self.group, self.reload = vllm_bench.made(rank, case, seed=0)
        served = self.process._target
        assert served is not None
        self.held = served.held
        rows, keeps_map = list(range(LAYERS)), self.process.keeps_map
        self.subject = subject_of(self.state, self.held, self.group, rows, keeps_map=keeps_map)
        self.first = self.held.copy()
        self.saved = [[one.clone() for one in self.moved(layer)] for layer in range(LAYERS)]
        self.factors = {
            (layer, name): one.clone()
            for layer in range(LAYERS)
            for name, one in self.subject.view.tensors(layer)[1]
        }

    def moved(self, layer: int) -> list[torch.Tensor]:
        """What vLLM moves of a layer."""
        return list(self.state.model.expert_weights[layer])

    def plant(self, kind: str, seed: int) -> tuple[int, int]:
        """Plant a fault after a move; its rank and layer."""
        random = np.random.default_rng((seed, sorted(KINDS).index(kind)))
        rank, layer = int(random.integers(RANKS)), int(random.integers(LAYERS))
        target = np.stack([random.permutation(row) for row in self.first])
        own = slice(rank * EACH, (rank + 1) * EACH)
        before, after = self.held[layer, own].copy(), target[layer, own]
        # A slot that the move has changed, and another one with another expert.
        slot = int(random.choice(np.flatnonzero(before != after)))
        other = int(random.choice(np.flatnonzero(after != after[slot])))
        old = [one[slot].clone() for one in self.moved(layer)]
        self.subject.move(target)
        if kind == "reload":
            self.reload()
        elif self.rank == rank:
            self._plant(kind, layer, slot, other, old, random)
        return rank, layer

    def _plant(
        self,
        kind: str,
        layer: int,
        slot: int,
        other: int,
        old: list[torch.Tensor],
        random: np.random.Generator,
    ) -> None:
        tensors, first = self.moved(layer), self.rank * EACH
        scales = [one for name, one in self._named(layer) if "scale" in name]
        weights = [one for name, one in self._named(layer) if "scale" not in name]
        if kind == "scales swapped":
            for one in scales:
                one[[slot, other]] = one[[other, slot]]
        elif kind == "stale slot":
            for one, record in zip(tensors, old, strict=True):
                one[slot] = record
        elif kind == "off by one":
            for one in tensors:
                one[slot] = one[other]
        elif kind == "bit":
            record = weights[int(random.integers(len(weights)))][slot].view(torch.uint8)
            record.view(-1)[int(random.integers(record.numel()))] ^= 1 << int(random.integers(8))
        elif kind == "NaN":
            scales[0][slot].view(-1)[0] = float("nan")
        elif kind == "half a move":
            tensors[0][slot] = old[0]
        elif kind == "derived factor":
            _, factor = self.subject.view.tensors(layer)[1][0]
            factor.mul_(2)
        elif kind == "map entry":
            wrong = self.held[layer, first + other]
            self.state.physical_to_logical_map[layer, first + slot] = wrong
        elif kind == "list entry":
            expert = int(self.held[layer, first + slot])
            self.state.logical_to_physical_map[layer, expert, 0] = first + other

    def _named(self, layer: int) -> list[tuple[str, torch.Tensor]]:
        """[C, ...] what vLLM moves of a layer, by its names."""
        experts = self.state.model.moe_layers[layer]
        return [(name, one.data) for name, one in experts.named_parameters() if one.dim() > 0]

    def found(self) -> list[dict[str, Any]]:
        """What the placement check finds in all slots of this rank, each once."""
        checks = self.process.checks
        assert checks is not None
        checks.faults.clear()
        for _ in range(2 * LAYERS * EACH + 2):
            checks.visit(is_idle=True)
        return [vars(fault) for fault in checks.faults]

    def reset(self) -> None:
        """Weights, factors and maps of the start."""
        for layer, tensors in enumerate(self.saved):
            for one, record in zip(self.moved(layer), tensors, strict=True):
                one.copy_(record)
            for name, factor in self.subject.view.tensors(layer)[1]:
                factor.copy_(self.factors[layer, name])
        self.subject.commit(self.first)
        assert not self.found(), "as at the start"


def run(rank: int, case: str, plants: list[tuple[str, int]], folder: Path) -> None:
    """Plant the faults of one quantisation, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=600),
    )  # fmt: skip
    planter, rows = Planter(rank, case, folder), []
    gather: Callable[[Any], list[Any]] = planter.subject.gather
    for kind, seed in plants:
        where, layer = planter.plant(kind, seed)
        by_rank = gather(planter.found())
        spread = 0
        if kind in SPREADING:
            before = {(one["row"], one["slot"]) for listed in by_rank for one in listed}
            planter.subject.move(planter.first)
            after = [one for listed in gather(planter.found()) for one in listed]
            spread = len({(one["row"], one["slot"]) for one in after} - before)
        others = (
            sum(one["row"] != layer for listed in by_rank for one in listed)
            if kind != "reload"
            else 0
        )
        text = next((f"{one['name']} {one['what']}" for one in by_rank[where]), "")
        rows.append({"kind": kind, "case": case, "seed": seed, "found": bool(text) and not others,
                     "spread": spread, "text": text})  # fmt: skip
        planter.reset()
    if rank == 0:
        (folder / "rows").write_text(json.dumps(rows))
    dist.barrier()


def main() -> None:
    """Print how many faults of each kind were found, and how many have spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    of_case: dict[str, list[tuple[str, int]]] = {}
    for kind, cases in KINDS.items():
        for seed in range(arguments.seeds):
            of_case.setdefault(cases[seed % len(cases)], []).append((kind, seed))
    rows = []
    for case, plants in of_case.items():
        with tempfile.TemporaryDirectory() as folder:
            start_processes(run, (case, plants, Path(folder)), RANKS, start_method="fork")
            rows += json.loads(Path(folder, "rows").read_text())
    print("| planted | in | faults | found | spread to other slots |\n|---|---|---|---|---|")
    for kind, cases in KINDS.items():
        own = [one for one in rows if one["kind"] == kind]
        found, spread = (sum(one[name] for one in own) for name in ("found", "spread"))
        shown = spread if kind in SPREADING else "-"
        print(f"| {kind} | {', '.join(cases)} | {len(own)} | {found} | {shown} |")
    for one in rows:
        if not one["found"] or one["spread"]:
            print(one)


if __name__ == "__main__":
    main()
