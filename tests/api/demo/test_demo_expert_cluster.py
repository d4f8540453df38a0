"""Ranks with tokens and no experts, beside ranks with experts and no tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.config.tree import load
from api.demo.checking import Sampling
from api.demo.text import Batches, Load
from api.deploy.deployment import topology_of
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from tests.api.demo.test_demo_faults import TEXT, serves_in_start, serves_on

MODEL = ModelShape((0, 1), 8, 2, hidden=32, intermediate=32)


def topology(**named: int) -> Topology:
    settings = {f"topology.{name}": value for name, value in named.items()}
    return topology_of(load({}, config=None, environ={}, named=settings), MODEL)


def test_ranks_of_token_nodes_have_no_slots_and_the_others_hold_every_expert() -> None:
    found = topology(nodes=3, ranks_per_node=2, token_nodes=1)

    assert found.slots_of_rank.tolist() == [0, 0, 3, 3, 3, 3]  # 1.25 times 8 / 4
    assert found.has_tokens.tolist() == [True, True, False, False, False, False]
    assert topology(nodes=3, ranks_per_node=2).has_tokens.all()


def test_token_nodes_that_leave_no_node_for_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"token_nodes is 2.*, expected fewer than"):
        topology(nodes=2, token_nodes=2)


def test_too_few_slots_of_the_ranks_with_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 4 to 8: 2 ranks hold 8 experts"):
        topology(nodes=2, ranks_per_node=2, token_nodes=1, slots_per_rank=3)


def test_rank_without_tokens_has_empty_batches_and_no_sampled_step(tmp_path: Path) -> None:
    import torch

    routes = tmp_path / "routes.npz"
    np.savez(routes, expert_ids=np.zeros((2, 64, 2), dtype=np.int16))
    batches = Batches(Load(16, 0, 10.0, None, routes), -1, 2, torch.device("cpu"))
    sampling = Sampling(1, -1, 2)

    ids, forced = batches.at(3, 0.0)

    assert forced is not None
    assert (ids.numel(), forced.shape) == (0, (2, 0, 2))
    assert not any(sampling.is_due(step, "swap") for step in range(10))


@pytest.mark.slow
def test_expert_cluster_serves_on_after_a_death_on_either_side(
    tmp_path: Path, start_demo: Any
) -> None:
    shape = {"nodes": 2, "ranks_per_node": 2, "token_nodes": 1, "slots_per_rank": 8}
    shape["restart_after_death"] = 0
    demo = start_demo(tmp_path, "--serve", *TEXT, serve_on=True, **shape)
    demo.sees("serving", serves_in_start(1))

    demo.kill("rank 0")  # with tokens alone
    first = demo.sees("serving on", serves_on(1))
    demo.kill("rank 3")  # with half of the experts' slots
    second = demo.sees("serving on", serves_on(2))

    assert (first["survivors"], first["refills"]) == ([1, 2, 3], 0)
    assert (second["survivors"], second["refills"]) == ([1, 2], 8)
    assert demo.halts_right()["deaths"] == 2
