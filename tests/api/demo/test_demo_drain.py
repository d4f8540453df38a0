"""A rank of a demo that serves is drained, stays empty, and takes experts again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from eplb.core.placement import EMPTY
from telemetry import open_store
from telemetry.state.store import StateStore

pytestmark = pytest.mark.slow  # a demo with its ranks
SLOTS, RANK = 4, 3  # of each rank; the drained one


def held(store: StateStore) -> int:
    committed = store.committed()
    assert committed is not None
    mine = committed.placement.slot_to_expert[:, RANK * SLOTS : (RANK + 1) * SLOTS]
    return int((mine != EMPTY).sum())


def test_drained_rank_of_a_demo_holds_nothing_and_no_output_is_wrong(
    tmp_path: Path, start_demo: Any
) -> None:
    demo = start_demo(tmp_path, "--serve", slots_per_rank=SLOTS)
    place = ["--store", str(demo.state_dir / "store.sqlite"), "--deployment", "demo"]
    demo.sees("a rebalance", lambda store: store.committed().placement.generation)

    drained = CliRunner().invoke(app, ["drain", str(RANK), "--reason", "change 4711", *place])
    assert drained.exit_code == 0, drained.output
    demo.sees("an empty rank", lambda store: held(store) == 0)
    with closing(open_store(demo.state_dir / "store.sqlite", "demo")) as store:
        first = store.committed().placement.generation
    demo.sees("a later plan", lambda store: store.committed().placement.generation > first + 1)
    listed = CliRunner().invoke(app, ["ranks", *place])
    assert "drained" in listed.output, listed.output

    back = CliRunner().invoke(app, ["uncordon", str(RANK), *place])
    assert back.exit_code == 0, back.output
    demo.sees("experts on it again", lambda store: held(store) > 0)

    summary = demo.halts_right()
    assert (summary["deaths"], summary["unserved_s"]) == (0, 0)
