"""Pipeline stages of vLLM are EP groups, with runs, maps and faults of their own in the store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rebalance.engines.common.fsck.report import report_of
from telemetry import open_store
from tests.support.engines.ranks import (
    NAME,
    NUM_LAYERS,
    NUM_RANKS,
    WINDOW,
    config_in,
    look_in_every_pass,
    on_ranks,
    settings_in,
)
from tests.support.engines.vllm_ranks import make_rank

pytestmark = pytest.mark.slow
STAGES = 2
BAD_LAYER, BAD_SLOT = 1, 2  # of rank 1 of the second stage


def staged(rank: int, config: Path) -> dict[str, Any]:
    """Steps until the map of each stage has changed; then a slot of the second loses its bytes."""
    look_in_every_pass()
    made = make_rank(rank, config, stages=STAGES)
    first = made.generation
    while not on_every(not made.recorder.why_kept and made.generation > first + 1):
        made.steps(WINDOW)
    if rank == NUM_RANKS - 1:
        for tensor in made.layers[BAD_LAYER]:
            tensor[BAD_SLOT] = 0
    made.visit_all()
    return made.result() | {"rank": made.rank, "refused": made.why_off}


def on_every(word: bool) -> bool:
    """Whether it holds on all ranks of all stages."""
    words = [False] * NUM_RANKS
    dist.all_gather_object(words, word)
    return all(words)


def test_stages_keep_runs_maps_and_faults_apart(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    found = on_ranks(staged, config)
    url, names = settings_in(config).deployment.store, [f"{NAME}/pp0", f"{NAME}/pp1"]

    assert [(one["rank"], one["refused"]) for one in found] == [(0, ""), (1, "")] * STAGES
    with closing(open_store(url, NAME)) as whole:
        assert (whole.groups(), whole.current_run()) == (names, None)
    for stage, name in enumerate(names):
        with closing(open_store(url, name)) as store:
            run, report, served = store.current_run(), report_of(store), store.committed()
            assert run is not None
            assert served is not None
            samples = [sample for _, sample in store.samples(run.run)]
        numbers = [3 + stage * NUM_LAYERS + layer for layer in range(NUM_LAYERS)]
        assert run.model["layer_ids"] == numbers, "the layers of the stage"
        assert {sample.rank for sample in samples} == {0, 1}
        assert served.placement.slot_to_expert.tolist() == found[2 * stage]["map"]
        assert report.ranks == {0: "", 1: ""}
        assert [fault.startswith(f"rank 1: layer {BAD_LAYER} slot") for fault in report.faults] == (
            [True, True] if stage else []
        )
