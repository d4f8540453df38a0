"""The reader of a run folds what is new in a store, page by page, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import HistoryError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.load.reader import RunReader
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import make_sample as make_any_sample

MODEL = ModelShape((0,), 3, 1, hidden=16, intermediate=8)
TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
NOW = 1000.0


def make_run(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "model": model_to_dict(MODEL),
        "topology": topology_to_dict(TWO_RANKS),
        "window_steps": 10,
    }
    return RunInfo("run-1", 5.0, **(fields | changes))


def make_sample(rank: int, window: int, **changes: Any) -> LoadSample:
    steps = {"first_step": window * 10, "last_step": window * 10 + 9}
    return make_any_sample(rank, window, **({"time": NOW, "tokens": [[3, 4]]} | steps | changes))


def both(*windows: int) -> list[LoadSample]:
    return [make_sample(rank, window) for window in windows for rank in (0, 1)]


def test_with_a_clock_samples_of_the_future_are_excluded(store: StateStore) -> None:
    store.begin_run(make_run())
    store.append([*both(0), make_sample(0, 1, time=NOW + 61.0), make_sample(7, 1)])
    of_now, of_the_past = (
        RunReader(store, make_run(), clock=lambda: NOW),
        RunReader(store, make_run()),
    )

    for reader, counts in ((of_now, (2, 1, 1)), (of_the_past, (3, 0, 1))):
        for _ in reader.read():
            pass
        found = reader.folder.outcomes.counts
        assert (found["accepted"], found["future"], found["malformed"]) == counts
        assert reader.num_read == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"no": "model"}}, "run 'run-1' has no readable model"),
        ({"topology": {}}, "run 'run-1' has no readable model or topology"),
        ({"window_steps": 0}, "window_steps is 0"),
    ],
)
def test_run_that_cannot_be_read_is_refused(
    store: StateStore, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HistoryError, match=message):
        RunReader(store, make_run(**changes))
