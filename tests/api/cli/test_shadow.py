"""``eplb shadow`` on what engines write, and the record endpoints of an engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from api.cli.shadow import EngineRecorder, Watch, run
from api.interrupts import StopSignals
from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from simulations.schemes import PlanTerms
from simulations.shadow.comparison import Comparison, Group
from simulations.shadow.report import Prices
from simulations.shadow.sources import SourceOptions, open_source
from telemetry.formats.types import ReadOptions
from telemetry.state.runs import RunInfo
from tests.support.formats.seeds import torch_file
from tests.support.stores import sqlite_store

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
HELD = [0, 1, 2, 3, 0, 1]  # experts 0 and 1 on both ranks; 2 on the first, 3 on the second
LOAD = [900, 100, 200, 4000]  # tokens of each expert: the second rank has 4,500 of 5,200
WINDOWS = 12


def eplb(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def lines(path: Path) -> Path:
    record = {"record_type": "eplb_load_stats", "version": 1, "num_ranks": 2, "p2l_map": [HELD]}
    counted = [LOAD[0] // 2, LOAD[1] // 2, LOAD[2], LOAD[3], LOAD[0] // 2, LOAD[1] // 2]
    steps = (
        json.dumps(record | {"step": step, "expert_load": [counted]}) for step in range(WINDOWS)
    )
    (path / "load.jsonl").write_text("\n".join(steps) + "\n")
    return path / "load.jsonl"


def dumps(path: Path) -> Path:
    """Dumps of two hidden layers, the first a dense one."""
    counted = np.array([[[0, 0, 0, 0], LOAD]], dtype=np.int32)
    for window in range(WINDOWS):
        name = f"expert_distribution_recorder_{1763828000 + window}.25.pt"
        (path / name).write_bytes(torch_file({"rank": 0, "logical_count": counted}))
    return path


def store(path: Path) -> Path:
    found = sqlite_store(path / "engine.sqlite", "serving")
    model = ModelShape((1,), 4, 1, 8, 8, expert_bytes=10**6)
    found.begin_run(RunInfo("run", 0.0, model_to_dict(model), topology_to_dict(TWO_RANKS), 10))
    found.commit(Placement(np.array([HELD], np.int32), 4, 1), expected=None, reason="start")
    every = np.arange(4, dtype=np.int32)[None]
    half = np.array([LOAD]) // 2
    for window in range(WINDOWS):
        span = (float(window), 10 * window, 10 * window + 9, "decode", 1)
        found.append(
            [LoadSample("serving", "run", rank, window, *span, every, half) for rank in (0, 1)]
        )
    found.close()
    return path / "engine.sqlite"


@pytest.mark.parametrize(
    ("written", "flags", "engine", "placements"),
    [
        (lines, ("--ranks", 2, "--window-steps", 1), "vllm", "its own maps"),
        (
            dumps,
            ("--ranks", 2, "--redundant", 2, "--engine-plans", "none"),
            "vllm",
            "its first map, never rebalanced",
        ),
        (store, ("--deployment", "serving"), "eplb", "its own maps"),
    ],
)
def test_shadow_prices_its_plans_on_what_an_engine_writes(
    tmp_path: Path, written: Any, flags: tuple[object, ...], engine: str, placements: str
) -> None:
    place, out = written(tmp_path), tmp_path / "report.json"
    bytes_given = () if written is store else ("--expert-bytes", 10**6)

    done = eplb(
        "shadow",
        place,
        "--engine",
        engine,
        *flags,
        *bytes_given,
        "--window-seconds",
        60,
        "--output",
        out,
    )

    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    theirs, ours = found["engine"], found["ours"][0]
    assert found["windows"] == {"used": WINDOWS, "judged": WINDOWS - 1, "skipped": {}}
    assert theirs["placements"] == placements
    # Rank 1 has 4,500 of 5,200 tokens; expert 3 on both ranks leaves 3,100 or less on a rank.
    assert theirs["imbalance_mean"] == pytest.approx(4500 / 2600)
    assert ours["imbalance_mean"] < 3100 / 2600
    assert ours["bytes_moved"] == 10**6 * ours["experts_moved"] > 0
    assert theirs["bytes_moved"] == 0
    assert ours["gain"]["imbalance"]["verdict"] == "better"
    assert ours["gain"]["net_seconds"]["verdict"] == "better"
    assert ours["gain"]["bytes"]["mean"] < 0
    assert "better" in done.output


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "expected --ranks"),
        (("--ranks", 2, "--nodes", 3), "2 ranks on 3 nodes"),
        (("--ranks", 4), "4 experts and 2 redundant ones on 4 ranks"),
        (("--ranks", 2, "--redundant", 4), "the map names expert 3"),
        (("--ranks", 2, "--also-redundant", "a"), "expected numbers of 0 to 65536, as 1,2,4"),
        (("--ranks", 2, "--policy", "none"), "unknown policy"),
        (("--ranks", 2, "--record-url", "http://127.0.0.1:1"), "expected --watch or --for"),
        (("--ranks", 2, "--current", "no.json"), "no.json"),
    ],
)
def test_shadow_refuses_flags_that_do_not_fit_in_a_sentence(
    tmp_path: Path, flags: tuple[object, ...], why: str
) -> None:
    done = eplb("shadow", lines(tmp_path), "--engine", "vllm", "--window-steps", 1, *flags)

    assert done.exit_code == 2
    assert why in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_ranks_that_contradict_the_store_are_refused(tmp_path: Path) -> None:
    place = store(tmp_path)

    done = eplb("shadow", place, "--engine", "eplb", "--deployment", "serving", "--ranks", 4)

    assert done.exit_code == 2
    assert "the source has 2 ranks on 1 node" in done.output


def test_folder_without_windows_exits_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"no archive")

    done = eplb("shadow", tmp_path, "--engine", "sglang", "--ranks", 2)

    assert done.exit_code == 2
    assert "no window could be used" in done.output
    assert "1 x not readable" in done.output


# -- record endpoints


class Engine(BaseHTTPRequestHandler):
    """The endpoints of an engine; a dump is written into its folder, as the engine does."""

    def __init__(self, info: dict[str, Any], asked: list[str], folder: Path, *rest: Any) -> None:
        self._info, self._asked, self._folder = info, asked, folder
        super().__init__(*rest)

    def do_GET(self) -> None:
        self._answer(json.dumps(self._info).encode())

    def do_POST(self) -> None:
        self._asked.append(self.path)
        if self.path.startswith("/dump"):
            counted = np.array([[LOAD]], dtype=np.int32)
            name = f"expert_distribution_recorder_{len(self._asked)}.5.pt"
            (self._folder / name).write_bytes(torch_file({"rank": 0, "logical_count": counted}))
        self._answer(b"done\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Address, ``/server_info``, and what was asked for."""
    info: dict[str, Any] = {"enable_eplb": False, "expert_distribution_recorder_mode": "stat"}
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Engine, info, asked, tmp_path))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", info, asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"enable_eplb": True}, "serves with --enable-eplb"),
        (
            {"expert_distribution_recorder_mode": None},
            "without --expert-distribution-recorder-mode",
        ),
        ({"enable_eplb": "gone"}, "does not tell how it records"),
    ],
)
def test_engine_that_recording_would_harm_is_asked_nothing(
    engine: tuple[str, dict[str, Any], list[str]], changed: dict[str, Any], why: str
) -> None:
    url, info, asked = engine
    info |= changed
    if changed == {"enable_eplb": "gone"}:
        del info["enable_eplb"]

    with pytest.raises(ConfigError, match=why):
        EngineRecorder(url).start()
    assert asked == []


class StoppedAfterOnePoll(StopSignals):
    """The user stops the command while it waits for its second poll."""

    def wait(self, seconds: float, alive: Callable[[], None] = lambda: None) -> bool:
        self.received = signal.SIGINT
        return super().wait(seconds, alive)


def test_watching_asks_for_dumps_and_reads_the_last_one(
    engine: tuple[str, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    url, _, asked = engine
    source = open_source([str(tmp_path)], SourceOptions(ReadOptions()))
    group = Group(PlanTerms(TWO_RANKS), 2, engine_plans="none")
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    watch = Watch(StoppedAfterOnePoll(), 0.0, None, EngineRecorder(url), 0.0)

    found = run(source, Comparison(group, source.skips), Prices(), watch=watch)

    for one, handler in kept.items():
        signal.signal(one, handler)

    name = "expert_distribution_record"
    assert asked == [f"/start_{name}", f"/dump_{name}", f"/dump_{name}", f"/stop_{name}"]
    assert found["windows"]["used"] == 2


def test_engine_behind_a_path_is_asked_under_that_path(
    engine: tuple[str, dict[str, Any], list[str]],
) -> None:
    url, _, asked = engine
    EngineRecorder(f"{url}/engine7/").start()

    assert asked == ["/engine7/start_expert_distribution_record"]
    with pytest.raises(ConfigError, match="a query or a fragment"):
        EngineRecorder(f"{url}/engine7?x=1")


def test_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        EngineRecorder("localhost:30000")
