"""One whole journey: tokens become swapped weights, a page shows it, a rank dies, serving goes on.

The tests of this file are steps of one run, in their order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from api.cli.main import app
from telemetry.state.store import StateStore
from tests.support.demo import DemoProcess, StartDemo
from tests.support.documents import blocks
from tests.support.limits import NEVER_S
from tests.support.pages.document_facts import run_to_end
from tests.support.repository import ROOT

RUN_BLOCKS = ROOT / "tests" / "support" / "pages" / "run_blocks.py"


def generation(store: StateStore) -> int:
    committed = store.committed()
    return -1 if committed is None else committed.placement.generation


def starts(store: StateStore) -> int:
    """How often the ranks of the demo have started."""
    return sum(event.kind == "run" for event in store.events(limit=100_000))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, start_demo: StartDemo) -> Iterator[DemoProcess]:
    """A model on four rank processes, as two hosts, until Ctrl-C; it has moved experts once."""
    started = start_demo(tmp_path_factory.mktemp("journey"), "--serve")
    started.sees("a rebalance", lambda store: generation(store) >= 1)
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGINT)


def test_page_and_api_show_the_placement_that_serves(demo: DemoProcess) -> None:
    address = demo.wait_for_line("eplb demo: http").split()[-1]
    with httpx.Client(base_url=address, timeout=None, trust_env=False) as client:
        page = client.get("/")
        state = client.get("/api/v1/state").json()
        placements = client.get("/api/v1/placements").json()["placements"]
        metrics = client.get("/metrics").text

    assert page.headers["content-type"].startswith("text/html")
    assert max(placement["generation"] for placement in placements) >= 1
    # Its generation may be that of an older reading, from before the rebalance.
    assert (state["deployment"], state["num_experts"], state["num_slots"]) == ("demo", 8, 12)
    assert 'eplb_placement_version{deployment="demo"}' in metrics


def test_load_of_the_demo_becomes_a_file_that_sglang_reads(
    demo: DemoProcess, tmp_path: Path
) -> None:
    store, file = str(demo.state_dir / "store.sqlite"), tmp_path / "placement.json"
    words = ["plan", store, "--ranks", "4", "--redundant", "4", "--target", "sglang"]
    planned = CliRunner().invoke(app, [*words, "--output", str(file)])
    validated = CliRunner().invoke(app, ["validate", str(file), "--target", "sglang"])

    assert planned.exit_code == 0, planned.output
    assert validated.exit_code == 0, validated.output
    slots = np.array(json.loads(file.read_text())["physical_to_logical_map"])
    assert slots.shape == (2, 12)
    assert all(set(layer) == set(range(8)) for layer in slots.tolist())


def test_killed_rank_ends_no_serving_and_all_ranks_restart(demo: DemoProcess) -> None:
    demo.kill("rank 1")

    record = demo.sees("the record", lambda store: store.recovery())
    assert record.survivors == (0, 2, 3)
    demo.sees("the next start", lambda store: starts(store) == 2)
    demo.sees("a rebalance after it", lambda store: generation(store) > record.generation)


def test_demo_that_is_interrupted_has_lost_nothing_and_was_never_wrong(demo: DemoProcess) -> None:
    demo.process.send_signal(signal.SIGINT)
    assert demo.ends() == 0, demo.output_text()

    summary = demo.summary()
    assert summary["deaths"] == 1
    assert summary["rebalances"] >= 1
    assert summary["reference_checks"] > 0
    assert (summary["reference_failures"], summary["samples_lost"]) == (0, 0)


def test_engine_that_embeds_the_agent_as_the_guide_says_is_rebalanced(tmp_path: Path) -> None:
    page = "docs/embedding.md"
    code = [b for b in blocks(page) if b.language == "python" and not b.not_run]
    patient = f"DEADLINE_S = {NEVER_S}"  # the page gives its example 300 s
    run = [[b.line, b.code.replace("DEADLINE_S = 300", patient)] for b in code]

    status, output, errors = run_to_end(
        [sys.executable, str(RUN_BLOCKS), page],
        tmp_path,
        os.environ | {"PYTHONPATH": str(ROOT)},
        json.dumps(run),
    )

    assert any(patient in block for _, block in run)
    assert status == 0, errors
    assert "serves on every rank" in output
