"""Ranks of another host join one that serves, or are refused: real processes of the commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoints.checkpoint import Checkpoint
from telemetry import open_store
from telemetry.state.events import REGROUPED
from telemetry.state.store import StateStore
from tests.support.deployments import OneHost

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
    "rank.agent.step(number, ": "rank.agent.step(None, ",
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


@pytest.mark.slow
def test_host_with_another_configuration_is_refused_and_one_with_the_same_joins(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    with ExitStack() as stack:
        host = OneHost(stack, tmp_path, small_checkpoint.path)
        host.environ |= TWO_HOSTS | {"EPLB_STORE": str(tmp_path / "store.sqlite")}
        text = (tmp_path / "engine.py").read_text()
        for before, after in SERVES_ON.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (tmp_path / "engine.py").write_text(text)
        store = stack.enter_context(closing(open_store(tmp_path / "store.sqlite", host.name)))
        store.change_membership("alone", [0], asked="alone", members=[0], reason="alone", by="test")
        for number in "01":
            host.start("eplb", "host-cache", "--host", number).wait_for("ready: 16 records")
        engine = ("--", sys.executable, "engine.py")
        first = host.start("eplb", "launch", "--host", "0", *engine)
        first.wait_for("engine: generation")
        idle = host.start("eplb", "launch", "--host", "1", *engine)
        assert idle.ends() == 0
        assert idle.lines[-1].endswith("none of ranks [1] should serve: [0] do")

        store.change_membership("both", [0, 1], asked="both", members=[0], reason="both", by="test")
        other = host.start("eplb", "launch", "--host", "1", *engine, EPLB_AGENT__VOTE_EVERY="4")
        other.wait_for("the configurations of the hosts differ: settings is")
        other.ends(signal.SIGTERM)
        same = host.start("eplb", "launch", "--host", "1", *engine)
        seen(store, lambda s: [one for one in s.latest_events() if one.kind == REGROUPED])
        same.wait_for("rank 1 serves in run")

        assert first.ends(signal.SIGTERM) == 0, first.lines
        assert same.ends() == 0, same.lines
        lines = [*first.lines, *same.lines]
        ended = [line for line in lines if "ended, 0 of" in line]
        assert len(ended) == 2, lines
