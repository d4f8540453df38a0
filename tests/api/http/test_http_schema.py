"""The HTTP service answers as its document says: schemathesis, all checks, over a real store."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from api.http.app import create_app
from api.http.limits import DEFAULT_LIMITS
from api.http.server import HttpService
from eplb import ModelShape, Placement, Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry import open_store
from telemetry.store import LoadStore, RunInfo, TaskResult
from tests.support.rank_reports import rank_report

MODEL = ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
FIRST = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=1)
A_DAY_S = 86_400.0
DEADLINE_S = 600.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LoadStore]:
    """Two ranks that serve for as long as the test lasts."""
    with closing(open_store(tmp_path / "store.sqlite", "d")) as opened:
        shapes = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
        opened.begin_run(RunInfo("a", 0.0, *shapes, window_steps=1))
        opened.commit(FIRST, expected=None, reason="start")
        for rank in range(2):
            reported = time.time() + A_DAY_S
            opened.report(rank_report("a", rank, time=reported, step=7))
        yield opened


@pytest.fixture
def controller(store: LoadStore) -> Iterator[None]:
    """Works off every task."""
    is_stopping = threading.Event()

    def work() -> None:
        version = -1
        while not is_stopping.is_set():
            while (task := store.claim()) is not None:
                store.finish(task.id, "done", TaskResult(detail={"decision": "KEEP"}))
            version = store.wait(version, 0.05)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    is_stopping.set()
    thread.join(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("controller")
def test_schemathesis_finds_no_answer_that_the_document_does_not_name(
    store: LoadStore, tmp_path: Path
) -> None:
    # A stream has no end of its own that a reader of its document could wait for.
    service = HttpService(create_app(store, limits=replace(DEFAULT_LIMITS, stream_s=0.1)))
    service.start()
    command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    command += [f"{service.url}/api/v1/openapi.json", "--checks", "all", "--continue-on-failure"]
    # 412: a request of the right form, at a revision that is not the latest.
    accepted = '["2xx", "401", "403", "404", "409", "412", "5xx"]'
    # 422: no pattern can state that a list of ranks, layers or pins names each once.
    of_settings = accepted.replace('"5xx"', '"422", "5xx"')
    (tmp_path / "schemathesis.toml").write_text(
        f"[checks.positive_data_acceptance]\nexpected-statuses = {accepted}\n"
        '[[operations]]\ninclude-name = "PATCH /api/v1/settings"\n'
        f"checks.positive_data_acceptance.expected-statuses = {of_settings}\n"
        '[[operations]]\ninclude-name = "PUT /api/v1/pins"\n'
        f"checks.positive_data_acceptance.expected-statuses = {of_settings}\n"
        # One simulation at a time: how long it takes is a matter of the host.
        '[[operations]]\ninclude-name = "POST /api/v1/simulations"\n'
        'checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]\n'
    )
    command += ["--max-examples", "10", "--max-time", "60", "--seed", "1", "--no-color"]
    try:
        done = subprocess.run(
            [*command, "--generation-database", "none"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    finally:
        service.stop()

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
