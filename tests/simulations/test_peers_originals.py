"""The peers against the planners that they re-implement, on seeded loads.

The originals are not part of this project. ``EPLB_PEER_ORIGINALS`` names a folder with
``policy_flashlb.py`` and ``policy_swift_balancer.py`` of vllm-project/vllm-ascend; what these
import beside numpy, scipy, numba and torch is not used in planning, and is stood in for by empty
modules.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb import Placement, Topology, imbalance
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from simulations.peers import PEERS

ORIGINALS = os.environ.get("EPLB_PEER_ORIGINALS", "")
NUM_LOADS = int(os.environ.get("EPLB_PEER_LOADS", "20"))
CLASSES = {
    "flashlb": ("policy_flashlb", "FlashLB"),
    "swift_balancer": ("policy_swift_balancer", "SwiftBalanceEplb"),
}
Figures = NDArray[np.int64]

pytestmark = pytest.mark.slow


@pytest.fixture
def originals(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Their classes, from the folder that the environment names."""
    if not ORIGINALS:
        pytest.skip("the planners that peers re-implement are not here: set EPLB_PEER_ORIGINALS")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "npu", SimpleNamespace(device_count=lambda: 8), raising=False)
    package = stand_in("originals", __path__=[str(Path(ORIGINALS))])
    modules = {
        "originals": package,
        "originals.policy_abstract": stand_in("policy_abstract", EplbPolicy=object),
        "torch_npu": stand_in("torch_npu"),
        "vllm": stand_in("vllm"),
        "vllm.logger": stand_in("vllm.logger", logger=logging.getLogger("originals")),
        "vllm_ascend": stand_in("vllm_ascend"),
        "vllm_ascend.distributed": stand_in("vllm_ascend.distributed"),
        "vllm_ascend.distributed.parallel_state": stand_in("state", get_dynamic_eplb_group=None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield {
        name: getattr(importlib.import_module(f"originals.{module}"), of)
        for name, (module, of) in CLASSES.items()
    }
    for module, _ in CLASSES.values():
        sys.modules.pop(f"originals.{module}", None)


def stand_in(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


# The originals give torch tensors to numpy in a way that numpy 2 warns of.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("peer", CLASSES)
def test_peer_plans_as_its_original_does(originals: dict[str, Any], peer: str) -> None:
    import torch

    alike = apart = 0.0
    for seed in range(NUM_LOADS):
        load, tables = drawn(seed)
        num_layers, num_ranks, size = tables.shape
        seen = load if peer == "flashlb" else load.sum(axis=0)
        _, _, theirs = originals[peer]().rebalance_experts(
            torch.tensor(tables), torch.tensor(in_slots(seen, tables))
        )
        ranks = Topology.uniform(1, num_ranks, size)
        serving = Placement(tables.reshape(num_layers, -1), load.shape[2])
        ours = PEERS[peer](Problem(LoadHistory(load), ranks, current=serving))
        held = np.sort(np.array(theirs), axis=2), np.sort(ours.slot_to_expert.reshape(tables.shape))
        alike += (held[0] == held[1]).all(axis=(1, 2)).mean()
        other = Placement(np.array(theirs).reshape(num_layers, -1), load.shape[2])
        balance = [imbalance(load.sum(axis=0), one, ranks).mean() for one in (other, ours)]
        apart += balance[1] - balance[0]

    # Equal loads are told apart by float32 there, and a slot that no rank can take is written past
    # the end of a table.
    assert alike >= 0.75 * NUM_LOADS
    assert abs(apart) <= 0.005 * NUM_LOADS


def drawn(seed: int) -> tuple[Figures, Figures]:
    """[T, L, E] load, and [L, R, C] a random table without an expert twice on a rank."""
    rng = np.random.default_rng(seed)
    num_experts, num_ranks = (int(rng.choice(some)) for some in ([32, 64, 128], [8, 16]))
    size = num_experts // num_ranks + int(rng.integers(1, 3))
    base = rng.dirichlet(np.full(num_experts, rng.uniform(0.7, 3.0)), 2)
    windows = int(rng.choice([1, 4, 16]))
    load = [
        [rng.multinomial(20_000, rng.dirichlet(row * 200 + 1e-3)) for row in base]
        for _ in range(windows)
    ]
    return np.array(load), np.array([table_without_doubles(rng, num_experts, num_ranks, size)] * 2)


def table_without_doubles(
    rng: np.random.Generator, num_experts: int, num_ranks: int, size: int
) -> Figures:
    extra = rng.choice(num_experts, num_ranks * size - num_experts, replace=False)
    # Experts in turn over ranks; an extra one starts where no rank has it yet.
    table = rng.permutation(num_experts).reshape(num_ranks, -1)
    columns = extra.reshape(num_ranks, -1)
    for row in range(num_ranks):
        for _ in range(num_ranks):
            if not np.isin(columns[row], table[row]).any():
                break
            other = rng.integers(num_ranks)
            columns[[row, other]] = columns[[other, row]]
    full = np.concatenate([table, columns], axis=1)
    if any(len(set(row)) < size for row in full.tolist()):
        return table_without_doubles(rng, num_experts, num_ranks, size)
    return full


def in_slots(load: Figures, tables: Figures) -> Figures:
    """[..., L, R, C] load [..., L, E] as slots report it: all in the first slot of an expert."""
    found = np.zeros((*load.shape[:-2], *tables.shape), dtype=np.int64)
    flat = found.reshape(*load.shape[:-2], len(tables), -1)
    for layer, table in enumerate(tables):
        experts, slots = np.unique(table, return_index=True)
        flat[..., layer, slots] = load[..., layer, experts]
    return found
