"""The HTTP service answers as its document says: schemathesis, all checks, over a real store."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from api.app import create_app
from api.http.guard import DEFAULT_LIMITS
from telemetry import open_store
from telemetry.state.runs import REPORT_EVERY_S
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult
from tests.support.http import SCHEMATHESIS, serving
from tests.support.limits import NEVER_S
from tests.support.rank_reports import rank_report
from tests.support.two_ranks import FIRST, begin_run


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    """Two ranks that serve for as long as the test lasts."""
    with closing(open_store(tmp_path / "store.sqlite", "d")) as opened:
        begin_run(opened)
        opened.commit(FIRST, expected=None, reason="start")
        for rank in range(2):
            now = {"time": time.time(), "step": 7, REPORT_EVERY_S: NEVER_S}
            opened.report(rank_report("a", rank, **now))
        yield opened


@pytest.fixture
def controller(store: StateStore) -> Iterator[None]:
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
    thread.join()


@pytest.mark.system
@pytest.mark.usefixtures("controller")
def test_schemathesis_finds_no_answer_that_the_document_does_not_name(
    store: StateStore, tmp_path: Path
) -> None:
    # A stream has no end of its own that a reader of its document could wait for.
    app = create_app(store, limits=replace(DEFAULT_LIMITS, stream_s=0.1))
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
    command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    command += ["--checks", "all", "--continue-on-failure", "--generation-database", "none"]
    command += ["--max-examples", "10", "--max-time", "60", "--seed", "1", "--no-color"]
    with serving(app) as service:
        done = subprocess.run(
            [*command, f"{service.url}/api/v1/openapi.json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
