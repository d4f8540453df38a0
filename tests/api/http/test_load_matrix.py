"""Load over a range of time as a matrix, in each format."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from api.http import load_files
from api.http.app import create_app
from api.http.problems import ProblemType
from eplb import ModelShape, Placement
from telemetry.load.load_range import load_rows
from telemetry.load.rollup import Rollup
from tests.support.http import client_of, problem_of
from tests.support.stores import MemoryStore
from tests.support.two_ranks import begin_run, serve

MODEL = ModelShape((0, 1), num_experts=3, top_k=1, hidden=2, intermediate=2)
HELD = Placement(np.array([[0, 1, 2, 0]] * 2), num_experts=3, generation=1)
START = 720_000.0
PATH = "/api/v1/load/matrix"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A roll-up of a minute, and four windows of two ranks in the minute after it."""
    store = MemoryStore("d")
    begin_run(store, at=START, model=MODEL, window_steps=10)
    tokens, received = np.array([[7, 8, 9]] * 2), np.array([[15, 9]] * 2)
    ranks, served = frozenset({0, 1}), frozenset({1})
    rolled = Rollup("a", "decode", 60, START, 0, 99, 20, served, ranks, tokens, received)
    store.add_rollups([rolled])
    for window in range(10, 14):
        load, at = [[[window - 10, 10 + rank]] * 2 for rank in (0, 1)], START + 10 + 5 * window
        serve(store, window, load, placement=HELD, at=at, steps=10, phase="decode")
    with client_of(create_app(store)) as opened:
        yield opened


def asked(client: httpx.Client, **params: Any) -> httpx.Response:
    given = {"since": START, "until": START + 600} | params
    return client.get(PATH, params=given)


def test_matrix_has_rollups_then_windows_in_every_format(client: httpx.Client) -> None:
    found = asked(client).json()
    array = np.load(io.BytesIO(asked(client, format="npy").content))
    lines = list(csv.reader(io.StringIO(asked(client, format="csv").text)))

    assert found["shape"] == [5, 2, 3] == list(array.shape)
    assert array[0].tolist() == [[7, 8, 9]] * 2
    assert array[4].tolist() == [[3 + 11, 10, 3]] * 2
    assert (found["of"], found["values"]) == ("tokens", array.tolist())
    assert lines[0][:7] == [*load_matrix_columns(), "layer"]
    assert lines[0][7:] == ["0", "1", "2"]
    assert [[int(one) for one in line[7:]] for line in lines[1:]] == array.reshape(10, 3).tolist()
    assert [float(line[0]) for line in lines[1:3]] == [START + 60] * 2


def load_matrix_columns() -> list[str]:
    return ["time", "seconds", "first_step", "last_step", "generation", "missing_ranks"]


def test_windows_name_time_steps_and_what_is_missing(client: httpx.Client) -> None:
    windows = asked(client).json()["windows"]
    table = np.load(io.BytesIO(asked(client, of="windows", format="npy").content))
    lines = asked(client, of="windows", format="csv").text.splitlines()

    columns = load_matrix_columns()
    assert windows[0] == {"run": "a", "phase": "decode"} | dict(
        zip(columns, [START + 60, 60, 0, 99, 1, 0], strict=True)
    )
    assert table.tolist() == [[one[name] for name in columns] for one in windows]
    assert lines[0] == ",".join(columns)
    assert len(lines) == 6


def test_matrix_by_rank_is_what_ranks_received(client: httpx.Client) -> None:
    array = np.load(io.BytesIO(asked(client, of="rank_load", format="npy").content))

    assert array[1].tolist() == [[10, 11]] * 2


def test_format_that_nobody_writes_is_refused(client: httpx.Client) -> None:
    assert asked(client, format="png").status_code == 422
    assert asked(client, formats="npy").status_code == 422


def test_range_without_load_is_an_empty_matrix(client: httpx.Client) -> None:
    assert asked(client, since=START + 300).json()["values"] == []
    empty = np.load(io.BytesIO(asked(client, since=START + 300, format="npy").content))
    assert len(empty) == 0
    assert asked(client, since=START + 900).json()["values"] == []


def test_matrix_past_the_limit_of_bytes_is_refused(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(load_files.MOST_BYTES, "npy", 100)

    refused = asked(client, format="npy")

    kind, detail = problem_of(refused)
    assert (kind, "100 bytes" in detail) == (ProblemType.TOO_MUCH_LOAD, True)


def test_more_matrices_at_once_than_allowed_are_refused(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Semaphore(0), threading.Event()

    def slow_rows(*args: Any) -> Any:
        begun.release()
        released.wait()
        return load_rows(*args)

    monkeypatch.setattr(load_files, "load_rows", slow_rows)
    askers = [threading.Thread(target=asked, args=(client,)) for _ in range(load_files.AT_ONCE)]
    for asker in askers:
        asker.start()
    for _ in askers:
        begun.acquire()
    refused = asked(client)
    released.set()
    for asker in askers:
        asker.join()

    assert problem_of(refused)[0] is ProblemType.TOO_BUSY
    assert refused.headers["retry-after"] == "1"
    assert asked(client).status_code == 200
