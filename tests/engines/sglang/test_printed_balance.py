"""The balance that ``eplb plan --target sglang`` prints is that of SGLang's own maps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# First: it skips this file where the engine is not installed.
import tests.support.engines.sglang_ranks  # noqa: F401  # isort: skip
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.runtime_context import get_context
from typer.testing import CliRunner

from api.cli.main import app

pytestmark = pytest.mark.slow
EXPERTS, DENSE, LAYERS = 32, 2, 6
WITHIN = 0.003
# Ranks, nodes and redundant experts.
GROUPS = [(4, 1, 8), (8, 2, 8), (8, 2, 16), (16, 4, 16), (16, 2, 32), (8, 8, 24)]


def printed(
    folder: Path, counts: np.ndarray, group: tuple[int, int, int], rule: str, at_start: bool
) -> tuple[dict[str, tuple[float, float]], Any]:
    """Figures of each row, live and at a start, and the map that was written."""
    load, out = folder / "counts.json", folder / "location.json"
    load.write_text(json.dumps({"logical_count": counts.tolist()}))
    ranks, nodes, redundant = map(str, group)
    done = CliRunner().invoke(
        app,
        ["plan", str(load), "--ranks", ranks, "--nodes", nodes, "--redundant", redundant,
         "--target", "sglang", "--dispatch", rule, "-o", str(out),
         *(["--start"] if at_start else [])],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = re.findall(r"^  ([a-z ]+?) +[\d.]+ +([\d.]+) +([\d.]+)$", done.output, re.MULTILINE)
    rows = {name: (float(live), float(start)) for name, live, start in found}
    return rows, json.loads(out.read_text())["physical_to_logical_map"]


def real(
    held: list[list[int]], counts: np.ndarray, rank: int, ranks: int, *, is_static: bool, path: str
) -> np.ndarray:
    """[L, S] the part of its tokens that a rank sends to each slot, by SGLang's own map."""
    table = torch.tensor(held)
    if path == "start":
        made = ExpertLocationMetadata.init_by_mapping(None, table, moe_ep_rank=rank)
        chosen = made.logical_to_rank_dispatch_physical_map
    else:
        made = ExpertLocationMetadata.init_by_mapping(None, table)
        if is_static:
            chosen = expert_location.compute_logical_to_rank_dispatch_physical_map(
                made.logical_to_all_physical_map, ranks, table.shape[1], rank
            )
    part, rows = np.zeros(table.shape), np.arange(len(held))
    for expert in range(EXPERTS):
        if is_static:
            part[rows, chosen[:, expert].numpy()] += 1
            continue
        lists = made.logical_to_all_physical_map[:, expert]
        valid = made.logical_to_all_physical_map_num_valid[:, expert]
        for row in rows:
            slots = lists[row, : int(valid[row])].numpy()
            part[row, slots] += 1 / len(slots)
    return part


def imbalance(held: np.ndarray, part: np.ndarray, counts: np.ndarray, ranks: int) -> float:
    """Mean over windows by their tokens, and over layers with routed experts."""
    tokens = np.take_along_axis(counts, np.broadcast_to(held, (len(counts), *held.shape)), axis=2)
    load = (tokens * part).reshape(*tokens.shape[:2], ranks, -1).sum(axis=3)[:, DENSE:]
    of_windows = (load.max(axis=2) / load.mean(axis=2)).mean(axis=1)
    return float(np.average(of_windows, weights=counts.sum(axis=(1, 2))))


@pytest.mark.parametrize("at_start", [False, True], ids=["plan for live", "plan for a start"])
@pytest.mark.parametrize("rule", ["sglang_static", "even"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_printed_balance_is_that_of_the_engines_own_maps(
    group: tuple[int, int, int],
    rule: str,
    at_start: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, nodes, redundant = group
    random = np.random.default_rng(ranks + redundant)
    counts = (1000 * random.lognormal(0.0, 1.0, (3, DENSE + LAYERS, EXPERTS))).astype(np.int64)
    counts[:, :DENSE] = 0
    rows, held = printed(tmp_path, counts, group, rule, at_start)
    live, start = rows["for a start" if at_start else "after"]
    if at_start:
        assert start <= rows["plan for live"][1]
    is_static = rule == "sglang_static"
    get_context().override_server_args(
        device="cpu", ep_size=ranks, tp_size=ranks, nnodes=nodes, moe_a2a_backend="deepep",
        ep_num_redundant_experts=redundant, init_expert_location="trivial",
        ep_dispatch_algorithm="static" if is_static else "dynamic",
    ).install()  # fmt: skip
    shape = ModelConfigForExpertLocation(DENSE + LAYERS, EXPERTS, None)
    monkeypatch.setattr(
        ModelConfigForExpertLocation, "from_model_config", staticmethod(lambda config: shape)
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for path, figure in (("live", live), ("start", start)):
        part = (
            sum(
                real(held, counts, rank, ranks, is_static=is_static, path=path)
                for rank in range(ranks)
            )
            / ranks
        )
        found = imbalance(np.array(held), part, counts, ranks)
        print(f"{group} {rule} {path}: printed {figure:.4f}, engine {found:.4f}")
        assert found == pytest.approx(figure, abs=WITHIN), path
