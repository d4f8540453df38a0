"""Switches, cordons and tasks of the deployment, as rank 0 of the real balancer obeys them."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

import torch
import torch.distributed as dist

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


def asked(rank: int, meet: Path, url: str) -> dict[str, tuple[int, str, Any]]:
    """Maps of each task, its end and what it says; between tasks the map is kept."""
    made = make_rank(rank, meet, settings_for(url), is_async=False, interval=INTERVAL)
    found: dict[str, tuple[int, str, Any]] = {}
    steps, store = count(), open_store(url, "contract") if rank == 0 else None

    def on_all(word: bool) -> bool:
        tensor = torch.tensor([int(word)])
        dist.broadcast(tensor, src=0)
        return bool(tensor.item())

    def interval() -> None:
        for step in islice(steps, INTERVAL):
            made.forward(step, popularity_of(step // INTERVAL))
            made.state.step()
            made.check_weights()

    def task(name: str, **request: Any) -> None:
        one = None if store is None else store.submit("rebalance", request)
        before = made.process.generation

        def has_ended() -> bool:
            assert store is not None, "rank 0 asks"
            now = store.task(one.id)
            return now is not None and now.state in ("done", "failed")

        while not on_all(rank == 0 and has_ended()):
            interval()
        now = None if store is None else store.task(one.id)
        words = ("", "") if now is None else (now.state, now.result.error or now.result.detail)
        found[name] = (made.process.generation - before, *words)

    task("dry", dry_run=True)
    task("moves", dry_run=False)
    task("with a policy", dry_run=False, policy="greedy")
    if store is not None:
        store.close()
    return found


def test_tasks_are_answered_at_the_next_rebalance(tmp_path: Path) -> None:
    first, *_ = on_ranks(asked, f"sqlite:{tmp_path / 'store.sqlite'}")

    assert first["dry"][1] == first["moves"][1] == "done"
    assert first["dry"][2]["dry_run"]
    assert first["moves"][0] > 0, "its map serves before the task ends"
    assert first["with a policy"][1] == "failed"
    assert "'greedy', expected 'auto'" in first["with a policy"][2]
