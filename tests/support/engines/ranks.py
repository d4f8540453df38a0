"""What tests of all engines have alike: a deployment's file, small experts, ranks and their steps.

A module of each engine makes its ranks (``vllm_ranks``, ``sglang_ranks``); ``installed`` is the one
of this environment.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rebalance.engines.common.fsck import check
from rebalance.engines.common.plugin_settings import PluginSettings, settings_of
from rebalance.weights.cache.engine_records import EngineRecords
from tests.support.engines.gauge import value_of
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess, run_ranks_in

NUM_RANKS, NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 4, 3, 16, 24  # layers with routed experts
EACH = NUM_SLOTS // NUM_RANKS
INTERVAL, WINDOW = 8, 4  # passes from one rebalance to the next, and of a window
PARTS = ("plugin", "store", "planner", "policy", "mover", "records", "placement")
NAME = f"engines-{os.getpid()}"  # no other test on this machine has a deployment of this name


def config_in(folder: Path, **changes: Any) -> Path:
    """The file of a deployment in a folder: every gain pays, so that plans move experts.

    Args:
        folder: of the store, and of the file.
        changes: further settings, ``engine__records`` for ``engine.records``.
    """
    settings = {
        "deployment.name": NAME,
        "deployment.store": f"sqlite:{folder / 'store.sqlite'}",
        "deployment.state_dir": str(folder),
        "telemetry.sample_steps": WINDOW,
        "telemetry.window_steps": WINDOW,
        "planner.pay_back_s": 1e9,
        "planner.target_imbalance": 1.0,
        "engine.max_moved": 1.0,
        "engine.phase": "decode",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    file = folder / f"eplb-{len(list(folder.iterdir()))}.toml"
    file.write_text("".join(f"{name} = {json.dumps(one)}\n" for name, one in settings.items()))
    return file


def config_with_records(folder: Path, records: str = "on", *, disk: bool = True) -> Path:
    """The same with records of experts, in memory and in a folder."""
    secret = folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    place = {"host_cache__record_folder": str(folder / "records")} if disk else {}
    return config_in(folder, engine__records=records, network__secret_file=str(secret), **place)


def settings_in(config: Path) -> PluginSettings:
    """The settings of a file."""
    settings = settings_of({"EPLB_CONFIG": str(config)})
    assert settings is not None
    return settings


@contextmanager
def host_cache(config: Path) -> Iterator[None]:
    """What ``eplb host-cache`` runs, in a process of its own."""

    def run(pipe: Any) -> None:
        settings = settings_in(config)
        place = settings.place_of_records()
        assert place is not None
        with closing(EngineRecords(place, settings.host_cache)):
            pipe.send("ready")
            pipe.recv()

    process = ForkedProcess(run)
    try:
        assert process.receive() == "ready"
        yield
    finally:
        process.kill()


class Experts(torch.nn.Module):
    """Weights and scales of the experts of one layer on one rank."""

    def __init__(self, layer: int, held: list[int]) -> None:
        super().__init__()
        weight, scale = zip(*(weights_of(layer, expert) for expert in held), strict=True)
        self.weight = torch.nn.Parameter(torch.stack(weight), requires_grad=False)
        self.register_buffer("scale", torch.stack(scale))


def weights_of(layer: int, expert: int) -> list[torch.Tensor]:
    """The tensors of one expert: another one has other bytes in each."""
    salt = layer * 1000 + expert
    return [torch.arange(32) + 100.0 * salt, (torch.arange(6) * 7 + salt).to(torch.uint8)]


def popularity_of(seed: int) -> np.ndarray:
    """[L, E] skewed chances of experts; another seed has other hot ones."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.2, (2 * NUM_LAYERS, NUM_EXPERTS))
    return drawn / drawn.sum(axis=1, keepdims=True)


class EngineRank:
    """One rank of an engine. A class of each engine says where the engine has its parts."""

    engine = ""
    rank: int
    each = EACH  # slots of this rank
    plugin: Any  # what has the plug-in's parts; None where it is off
    passes = 0
    stopped = ""  # why the plug-in does nothing any more
    why_off = ""  # why it stayed off
    is_moving = False  # whether a plan is begun and does not serve yet

    @property
    def generation(self) -> int:
        """Of the map that serves on all layers."""
        return int(self.plugin.generation)

    @property
    def recorder(self) -> Any:
        """The rank's end of the process at the store."""
        return self.plugin.recorder

    @property
    def checks(self) -> Any:
        """The placement check."""
        return self.plugin.checks

    @property
    def kept(self) -> Any:
        """Records of experts."""
        return self.plugin.kept

    @property
    def layers(self) -> dict[int, list[torch.Tensor]]:
        """What the engine moves of each layer on this rank, by the engine's numbers."""
        raise NotImplementedError

    @property
    def held(self) -> np.ndarray:
        """[L, S] the map that serves, by the engine's numbers."""
        raise NotImplementedError

    @property
    def lists(self) -> list[Any]:
        """The lists of replicas of layers with routed experts."""
        raise NotImplementedError

    @property
    def weighs_replicas(self) -> bool:
        """Whether a list of the map that serves is as long as weights make it."""
        raise NotImplementedError

    def forward(self, popularity: np.ndarray) -> None:
        """One pass, and what the engine does at its end."""
        raise NotImplementedError

    def steps(self, count: int = 1, *, is_checked: bool = True, added: int = 0) -> None:
        """Passes; the weights match the map after each."""
        for _ in range(count):
            self.forward(popularity_of(self.passes // INTERVAL))
            self.passes += 1
            if is_checked:
                self.check_weights(added)
            assert not self.stopped, self.stopped

    def until_maps(self, times: int, **checked: Any) -> None:
        """Step until so many further maps serve."""
        last = self.generation + times
        while self.generation < last:
            self.steps(**checked)

    def until_experts_move(self, start: np.ndarray, **checked: Any) -> None:
        """Step until a further map serves that differs from one: plans may change shares alone."""
        self.until_maps(1, **checked)
        while (self.held == start).all():
            self.until_maps(1, **checked)

    def until(self, holds: Callable[[], Any]) -> None:
        """Step until rank 0 sees something."""
        while not on_all(self.rank == 0 and bool(holds())):
            self.steps(WINDOW)

    def until_it_may_move(self) -> None:
        """Step until the switches of the deployment are read."""
        self.until(lambda: not self.recorder.why_kept)

    def check_weights(self, added: int = 0) -> None:
        """Every live slot has the bytes of the expert that the map names.

        Args:
            added: to every number since the load.
        """
        for layer, tensors in self.layers.items():
            own = self.held[layer][self.rank * self.each :][: self.each]
            check_slots(layer, tensors, own, added)

    def is_right(self) -> bool:
        """Whether the weights match the map."""
        try:
            self.check_weights()
        except AssertionError:
            return False
        return True

    def lose(self, layer: int) -> None:
        """Overwrite all experts of a layer."""
        for tensor in self.layers[layer]:
            tensor.zero_()

    def visit_all(self) -> None:
        """Have the placement check judge each slot: so many twice, as some may be judged again."""
        enough = self.checks.num_checked + 2 * len(self.layers) * self.each
        while self.checks.num_checked < enough and self.checks._check is not None:
            self.checks.visit(is_idle=True)

    def result(self) -> dict[str, Any]:
        """The map, what the check has found, and where records came from; ends the plug-in."""
        kept, checks = self.kept, self.checks
        library = None if kept is None else kept.server
        server = None if library is None or library.server is None else library.server.stats()
        found = {
            "map": self.held.tolist(),
            "lists": self.lists,
            "passes": self.passes,
            "generation": self.generation,
            "faults": [] if checks is None else list(checks.faults),
            "looked": 0 if checks is None else checks.num_checked,
            "from host": 0 if kept is None else kept.figures.bytes_by_source.get("host", 0),
            "from disk": 0 if server is None else server["record_file"],
            "offered": 0 if server is None else server["offered"],
        } | {part: value_of(self.engine, part) for part in PARTS}
        self.close()
        return found

    def close(self) -> None:
        """End the plug-in once everything is written."""
        if self.recorder is not None:
            assert self.recorder.close(NEVER_S), "the recorder ended"


def check_slots(layer: int, tensors: Any, experts: Any, added: int) -> None:
    """Compare the tensors of a layer's slots with those of their experts."""
    for slot, expert in enumerate(map(int, experts)):
        for tensor, expected in zip(tensors, weights_of(layer, expert), strict=False):
            assert torch.equal(tensor[slot], expected + added), (layer, slot, expert)


def look_in_every_pass() -> None:
    """Have the placement check look at a slot in every pass."""
    check.PART = 1e6


def on_ranks(work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``work(rank, *args)`` in forked ranks of a gloo group; return what each returns."""

    def run(rank: int) -> Any:
        found = work(rank, *args)
        dist.barrier()  # a rank that ends while another one still connects would fail it
        return found

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks_in(Path(folder), NUM_RANKS, run)


def on_all(word: bool) -> bool:
    """The word of rank 0."""
    tensor = torch.tensor([int(word)])
    dist.broadcast(tensor, src=0)
    return bool(tensor.item())


def wait_until(holds: Callable[[], Any]) -> None:
    """Wait for something that happens in another thread or process."""
    while not holds():
        time.sleep(0.01)
