"""Tasks, switches and cordons of the deployment, as the plug-in obeys them in a real balancer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from telemetry import open_store
from tests.support.engines.installed import engine
from tests.support.engines.ranks import NAME, config_in, on_ranks, settings_in

pytestmark = pytest.mark.slow


class Deployment:
    """A rank, and on rank 0 the store by which an operator asks it for something."""

    def __init__(self, rank: int, config: Path) -> None:
        self.made = engine.make_rank(rank, config, **engine.WITH_TASKS_ALONE)
        url = settings_in(config).deployment.store
        self.store: Any = open_store(url, NAME) if rank == 0 else None
        self.tasks: dict[str, dict[str, Any]] = {}

    def switch(self, word: str, *, movement: bool = True, cordons: str = "") -> None:
        """Set the switches, and step until the plug-in says a word about them."""
        if self.store is not None:
            control = replace(self.store.control(), movement=movement)
            self.store.set_control(control, reason="test")
            revision = self.store.live().revision
            self.store.change_live({"cordons": cordons}, expected=revision, reason="test")
        recorder = self.made.recorder
        self.made.until(lambda: word in recorder.why_kept if word else not recorder.why_kept)

    def task(self, name: str, **request: Any) -> None:
        """Ask for a rebalance, and step until it has ended."""
        task = None if self.store is None else self.store.submit("rebalance", request)
        before = self.made.generation

        def result() -> Any:
            now = self.store.task(task.id)
            return now if now is not None and now.state in ("done", "failed") else None

        self.made.until(result)
        maps = self.made.generation - before
        if self.store is not None:
            found = result()
            said = found.result.error or found.result.detail
            self.tasks[name] = {"state": found.state, "said": said, "maps": maps}


def asked(rank: int, config: Path) -> dict[str, dict[str, Any]]:
    """The end of each task, what it says, and how many maps served meanwhile."""
    deployment = Deployment(rank, config)
    made = deployment.made
    made.until(lambda: made.recorder is not None)
    deployment.switch("movement is switched off", movement=False)
    deployment.task("paused", dry_run=False)
    deployment.switch("'1:cordon', expected none", cordons="1:cordon")
    deployment.task("cordoned", dry_run=False)
    deployment.switch("")
    deployment.task("with a throttle", dry_run=False, throttle={"link_part": 0.5})
    deployment.task("with a policy", dry_run=False, policy="greedy")
    deployment.task("dry", dry_run=True)
    deployment.task("moving", dry_run=False)
    if deployment.store is not None:
        deployment.store.close()
    made.close()
    return deployment.tasks


def test_tasks_and_switches_decide_when_a_map_moves(tmp_path: Path) -> None:
    found, *_ = on_ranks(asked, config_in(tmp_path))

    failed = {name for name, one in found.items() if one["state"] == "failed"}
    assert failed == {"with a throttle", "with a policy"}
    assert "{'link_part': 0.5}, expected none" in found["with a throttle"]["said"]
    assert "'greedy', expected 'auto'" in found["with a policy"]["said"]
    assert "movement is switched off" in found["paused"]["said"]["kept"]
    assert "'1:cordon', expected none" in found["cordoned"]["said"]["kept"]
    assert found["paused"]["maps"] == found["cordoned"]["maps"] == 0
    assert found["paused"]["said"]["num_moves"], "the paused task has the moves of its plan"
    assert found["dry"]["said"]["dry_run"]
    assert found["moving"]["maps"] > 0, "its map serves before the task ends"
    assert found["moving"]["said"]["decision"] == "MOVE"
    assert found["moving"]["said"]["num_moves"] > 0
    if engine.WITH_TASKS_ALONE:  # else maps of the engine's intervals serve meanwhile
        others = ("with a throttle", "with a policy", "dry")
        assert [found[name]["maps"] for name in others] == [0, 0, 0]
        assert found["moving"]["maps"] == 1
