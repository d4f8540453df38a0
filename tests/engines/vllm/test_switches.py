"""The deployment's switches and cordons, as rank 0 of the real balancer obeys them."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from telemetry import open_store
from tests.support.engines.vllm_ranks import make_rank, on_ranks, popularity_of, settings_for

INTERVAL = 8
pytestmark = pytest.mark.slow


def switched(rank: int, meet: Path, url: str) -> dict[str, int]:
    """Maps in three intervals each: as it is, with movement off, with a cordon, and free again."""
    made = make_rank(rank, meet, settings_for(url), is_async=False, interval=INTERVAL)
    found: dict[str, int] = {}
    steps = count()

    def maps(name: str) -> None:
        before = made.process.generation
        for step in islice(steps, 3 * INTERVAL):
            made.forward(step, popularity_of(step // INTERVAL))
            made.state.step()
            made.check_weights()
        found[name] = made.process.generation - before

    def seen(word: str) -> None:
        while (word not in made.process.why_kept) if word else made.process.why_kept:
            time.sleep(0.01)

    def change(store: Any, *, movement: bool, cordons: str, word: str) -> None:
        store.set_control(replace(store.control(), movement=movement), reason="test")
        store.change_live({"cordons": cordons}, expected=store.live().revision, reason="test")
        seen(word)

    maps("free")
    for name, given in (
        ("movement off", {"movement": False, "cordons": "", "word": "movement is switched off"}),
        ("cordoned", {"movement": True, "cordons": "1:drain", "word": "'1:drain', expected none"}),
        ("free again", {"movement": True, "cordons": "", "word": ""}),
    ):
        if rank == 0:
            with closing(open_store(url, "contract")) as store:
                change(store, **given)
        maps(name)
    return found


def test_switches_and_cordons_of_the_deployment_keep_the_map(tmp_path: Path) -> None:
    found = on_ranks(switched, f"sqlite:{tmp_path / 'store.sqlite'}")

    assert all(one == found[0] for one in found), "alike on all ranks"
    assert found[0]["movement off"] == found[0]["cordoned"] == 0
    assert found[0]["free"] > 0
    assert found[0]["free again"] > 0
