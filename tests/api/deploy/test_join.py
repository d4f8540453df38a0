"""Ranks of another host join one that serves, or are refused: real processes of the commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eplb.core.model import ModelShape
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertSchema
from telemetry import open_store
from telemetry.state.events import REGROUPED
from telemetry.state.runs import add_run
from telemetry.state.store import StateStore
from tests.support.deployments import CommandProcess, OneHost

TWO_HOSTS = {
    "EPLB_TOPOLOGY__NODES": "2",
    "EPLB_TOPOLOGY__RANKS_PER_NODE": "1",
    "EPLB_TOPOLOGY__SLOTS_PER_RANK": "8",
    "EPLB_TOPOLOGY__HOSTS": "127.0.0.1,127.0.0.2",
    "EPLB_AGENT__SERVE_ON": "true",
}
# The bundled engine, which ends at a death, as one that serves on.
SERVES_ON = {
    "build_rank_from_env()": "build_rank_from_env(passes=passes)",
    "torch.set_num_threads(1)\n": "torch.set_num_threads(1)\npasses = PassCounter()\n",
    "rank.step(number, ": "rank.step(None, ",
    "        tokens, chosen, shares = batch": "        number = passes.begin()\n"
    "        tokens, chosen, shares = batch",
    "        number += 1\n": "",
    "from runtime.model.compute import LoopExperts\n": "from runtime.counters import PassCounter\n"
    "from runtime.model.compute import LoopExperts\n",
    "try:\n    serve(rank)\nexcept BrokenGroup as exc:": "while True:\n    try:\n"
    "        serve(rank)\n        break\n    except BrokenGroup as exc:\n"
    "        if rank.survive():\n            continue\n"
    "        sys.exit(0 if rank.has_left else f'engine: {exc}')\nif False:",
    '    rank.survive()\n    sys.exit(f"engine: {exc}")': "    pass",
}


def seen(store: StateStore, look: Callable[[StateStore], Any]) -> Any:
    version = -1
    while not (found := look(store)):
        version = store.wait(version, 0.2)
    return found


ENGINE = ("--", sys.executable, "engine.py")


class FirstHost(OneHost):
    """Rank 0 of two serves alone, on the first of two hosts; both host caches may start."""

    def __init__(self, stack: ExitStack, folder: Path, weights: Path) -> None:
        super().__init__(stack, folder, weights)
        self.environ |= TWO_HOSTS | {"EPLB_STORE": str(folder / "store.sqlite")}
        text = (folder / "engine.py").read_text()
        for before, after in SERVES_ON.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (folder / "engine.py").write_text(text)
        self.store = stack.enter_context(closing(open_store(folder / "store.sqlite", self.name)))
        self.want(0)
        self.start_cache_of(0)
        self.first = self.launch(0)
        self.first.wait_for("engine: generation")

    def want(self, *ranks: int) -> None:
        name = f"ranks {ranks}"
        alive = (True, False)
        self.store.change_membership(name, ranks, asked=name, alive=alive, reason=name, by="test")

    def start_cache_of(self, host: int, **environ: str) -> CommandProcess:
        cache = self.start("eplb", "host-cache", "--host", str(host), **environ)
        cache.wait_for("ready: 16 records")
        return cache

    def launch(self, host: int, **environ: str) -> CommandProcess:
        return self.start("eplb", "launch", "--host", str(host), *ENGINE, **environ)

    def admits_and_ends_right(self, second: CommandProcess) -> None:
        """Wait until the rank of the other host serves, end both, and look at their answers."""
        seen(self.store, lambda s: [one for one in s.latest_events() if one.kind == REGROUPED])
        second.wait_for("rank 1 serves in run")
        assert self.first.ends(signal.SIGTERM) == 0, self.first.lines
        assert second.ends() == 0, second.lines
        lines = [*self.first.lines, *second.lines]
        ended = [line for line in lines if "ended, 0 of" in line]
        assert len(ended) == 2, lines


@pytest.mark.slow
def test_host_with_another_configuration_is_refused_and_one_with_the_same_joins(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    with ExitStack() as stack:
        host = FirstHost(stack, tmp_path, small_checkpoint.path)
        host.start_cache_of(1)
        idle = host.launch(1)
        assert idle.ends() == 0
        assert idle.lines[-1].endswith("none of ranks [1] should serve: [0] do")

        host.want(0, 1)
        other = host.launch(1, EPLB_AGENT__VOTE_EVERY="4")
        other.wait_for("the configurations of the hosts differ: settings is")
        other.ends(signal.SIGTERM)

        host.admits_and_ends_right(host.launch(1))


@pytest.mark.slow
def test_host_that_returns_with_other_weights_is_refused_until_it_has_those_that_serve(
    tmp_path: Path,
    small_checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
) -> None:
    weights = tmp_path / "older"
    write_random_checkpoint(weights, small_model, small_schema, vocabulary=64, seed=2)
    older = {"EPLB_MODEL__CHECKPOINT": str(weights)}
    accept = ("eplb", "check", "--accept-checkpoint")
    with ExitStack() as stack:
        host = FirstHost(stack, tmp_path, small_checkpoint.path)
        host.want(0, 1)
        refused = host.start("eplb", "host-cache", "--host", "1", **older)
        assert refused.ends() == 2
        assert "has other bytes" in refused.lines[-1], refused.lines

        host.start(*accept, **older).ends()  # for the next start of all; now others serve
        cache = host.start_cache_of(1, **older)
        rank = host.launch(1, **older)
        rank.wait_for("it has other weights")
        rank.ends(signal.SIGTERM)
        cache.ends(signal.SIGTERM)
        assert host.store.recovery() is None

        host.start(*accept).ends()
        host.start_cache_of(1)
        host.admits_and_ends_right(host.launch(1))


@pytest.mark.slow
def test_start_that_the_others_missed_ends_and_its_rank_joins(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    with ExitStack() as stack:
        host = FirstHost(stack, tmp_path, small_checkpoint.path)
        host.start_cache_of(1)
        host.want(0, 1)
        run = host.store.current_run()
        assert run is not None
        # As until survivors have recorded that they serve without a rank.
        both = replace(run, topology=dict(run.topology) | {"alive": [True, True]})
        host.store.backend.make("run", lambda change: add_run(change, both))
        second = host.launch(1)
        second.wait_for("found a placement")
        host.store.backend.make("run", lambda change: add_run(change, run))

        host.admits_and_ends_right(second)
        assert not any("does not answer" in line for line in second.lines), second.lines
