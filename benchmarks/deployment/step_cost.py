"""What an agent costs a step: steps with and without it, in alternating pairs of one run.

    python3 -m benchmarks.deployment.step_cost --device cuda        # 2 GPUs, below a minute
    python -m benchmarks.deployment.step_cost --ranks 1,4           # CPU ranks

*With*: a whole agent, ``step`` before every pass, its threads, votes, samples into a store. Nothing
migrates. *Without*: no agent and none of its threads; the host waits for the device alike. Every
block *with* builds a new agent over the same experts, table and counters, so that both kinds of
blocks run the same passes. A pair is one block of each, in turns of order. Prints one table.
Seeded.

On GPUs a pass is a CUDA graph of DeepSeek-V3's layers over ``deep_ep``; where that is not
installed, an eager pass over NCCL (``--dispatcher all-to-all``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.migration.big_rank import DEPLOYMENT, BigRank, Shapes, begin_store, build, v3
from benchmarks.migration.decode import TOKENS, VOCABULARY, decode_step, dense_weights
from benchmarks.result_table import Row, keep, show
from eplb.core.model import ModelShape
from eplb.errors import RankError
from rebalance.agent import RankAgent
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import wire_agent
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.rank.parts import AgentSettings, Links
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.model.compute import Experts, GroupedExperts, LoopExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.streams import Completion
from telemetry import open_store
from telemetry.load.reporter import Reporter
from tests.support.launch import launch

PACKED_BY = "zstandard" if find_spec("zstandard") is not None else "zlib"
_SIZE_BYTES = 8


class _Compressor:
    def __init__(self, level: int) -> None:
        self._level = level

    def compress(self, data: bytes) -> bytes:
        """Its size, and the data."""
        return len(data).to_bytes(_SIZE_BYTES, "little") + zlib.compress(data, self._level)


class _Decompressor:
    def decompress(self, frame: bytes, *, allow_extra_data: bool) -> bytes:
        """The data again."""
        return zlib.decompress(frame[_SIZE_BYTES:])


def _size(frame: bytes) -> int:
    return int.from_bytes(frame[:_SIZE_BYTES], "little")


if PACKED_BY == "zlib":
    stand_in = ModuleType("zstandard")
    vars(stand_in).update(
        ZstdCompressor=_Compressor,
        ZstdDecompressor=_Decompressor,
        ZstdError=zlib.error,
        frame_content_size=_size,
    )
    sys.modules["zstandard"] = stand_in


SETTLE_STEPS = 20  # first steps of each block, which are not counted
SAMPLE_STEPS = 16
IDLE_STEP_S = 0.005
MIN_PAIRS, MAX_PAIRS = 4, 60
CPU_TOKENS = 32
FLUSH_S = 5.0
AGENT_THREADS = ("eplb-", "reporter-")


@dataclass(frozen=True)
class Run:
    """What every rank is given alike."""

    shapes: Shapes
    dispatcher: str  # deepep or all-to-all
    layer_runs: int  # of the resident layers in a pass
    block_steps: int
    seconds: float  # of all pairs
    store: Path
    load: str  # full; idle: a pause in place of a pass; none: step after step


@dataclass
class Block:
    """Steps of one block."""

    step_us: list[float]
    call_us: list[float] = field(default_factory=list)  # processor time of each call of ``step``
    threads_us: float = 0.0  # processor time of the agent's threads, a step


@dataclass
class Sides:
    """Blocks of one rank in the order of their pairs."""

    without: list[Block] = field(default_factory=list)
    with_agent: list[Block] = field(default_factory=list)
    store: str = f"SQLite, packed by {PACKED_BY}"


class Clockwork:
    """Makes the agents and runs the blocks of one rank."""

    def __init__(self, rank: int, num_ranks: int, run: Run) -> None:
        self._run = run
        self._big = build(rank, num_ranks, run.shapes)
        self._big.votes.close()  # each agent has its own, and a block without has none
        self._is_cuda = self._big.device.type == "cuda"
        control = dist.new_group(backend="gloo")
        assert isinstance(control, dist.ProcessGroup), "every rank is a member"
        self._control = control
        self.sides = Sides()
        agent = self._first_agent()
        self._slots, self._counter = agent.parts.slots, agent.counter
        self._agent: RankAgent | None = agent  # the first block's
        self._forward = _forward(self._big, agent, run)

    def _links(self) -> Links:
        self._store = open_store(self._run.store, DEPLOYMENT)
        self._reporter = Reporter(self._store)
        votes = GlooVotes(self._control)
        return Links(votes, self._big.sources(), self._store, self._reporter)

    def _first_agent(self) -> RankAgent:
        big = self._big
        return wire_agent(
            self._settings(),
            self._links(),
            rank=big.rank,
            bank=big.bank,
            digests=big.digests,
            placement=big.placement,
        )

    def _settings(self) -> AgentSettings:
        return AgentSettings(RankConfig(DEPLOYMENT, SAMPLE_STEPS, 1), "bench", self._big.topology)

    def _new_agent(self) -> RankAgent:
        """One over the same experts, table and counters: a captured graph holds their addresses."""
        if (first := self._agent) is not None:
            self._agent = None
            return first
        start = self._big.placement
        return RankAgent(self._settings(), self._slots, self._counter, self._links(), start)

    def agreed(self, value: float) -> float:
        """The largest value of any rank; also has all ranks meet."""
        vector = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._control)
        return float(vector)

    def without(self) -> Block:
        """Run a block without an agent."""
        self.agreed(0.0)
        return Block(self._steps(lambda _: None, Completion.wait)[SETTLE_STEPS:])

    def with_agent(self) -> Block:
        """Run a block with a new agent, and end it after the block."""
        self._counter.drain()
        agent, calls = self._new_agent(), list[float]()
        agent.start()
        self.agreed(0.0)
        cpu = [0.0, 0.0]  # of the agent's threads, at the first counted step and at the last

        def step(number: int) -> None:
            if number in (SETTLE_STEPS, SETTLE_STEPS + self._run.block_steps - 1):
                cpu[number != SETTLE_STEPS] = threads_cpu_s()
            begun = time.thread_time()
            assert agent.step(number, "decode"), "nobody asked for an end"
            calls.append((time.thread_time() - begun) * 1e6)

        step_us = self._steps(step, agent.wait)
        self._end(agent)
        per_step = (cpu[1] - cpu[0]) * 1e6 / max(self._run.block_steps - 1, 1)
        return Block(step_us[SETTLE_STEPS:], calls[SETTLE_STEPS:], per_step)

    def _steps(
        self, before: Callable[[int], None], wait: Callable[[Completion], None]
    ) -> list[float]:
        """Times of all steps of a block, the settling ones too."""
        marks: list[Any] = []
        in_flight = Completion(is_cuda=self._is_cuda)
        for number in range(SETTLE_STEPS + self._run.block_steps + 1):
            marks.append(self._mark())
            if number == SETTLE_STEPS + self._run.block_steps:
                break
            before(number)
            self._forward(number)
            wait(in_flight)
            in_flight = Completion(is_cuda=self._is_cuda)
        if self._is_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
        return [(b - a) * 1e6 for a, b in itertools.pairwise(marks)]

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _end(self, agent: RankAgent) -> None:
        agent.request_halt()
        number = SETTLE_STEPS + self._run.block_steps
        while agent.step(number, "decode"):
            self._forward(number)
            number += 1
        agent.close()
        self._reporter.close(FLUSH_S)
        for thread in agent_threads():  # the next block is to be without them
            thread.join(FLUSH_S)
            if thread.is_alive():
                raise RankError(f"thread {thread.name} has not ended within {FLUSH_S:.0f} s")
        self._store.close()


def agent_threads() -> list[threading.Thread]:
    """Threads of an agent and of its reporter that run now."""
    return [one for one in threading.enumerate() if one.name.startswith(AGENT_THREADS)]


def threads_cpu_s() -> float:
    """Processor time of the agent's threads so far."""
    files = [Path(f"/proc/self/task/{one.native_id}/schedstat") for one in agent_threads()]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def _forward(big: BigRank, agent: RankAgent, run: Run) -> Callable[[int], None]:
    """A pass of the resident layers; the same in blocks of both kinds."""
    if run.load != "full":
        pause_s = IDLE_STEP_S if run.load == "idle" else 0.0
        return lambda _: time.sleep(pause_s)
    if run.dispatcher == "deepep":
        return decode_step(big, agent)
    model, device = run.shapes.model, big.device
    group, is_cuda = dist.group.WORLD, device.type == "cuda"
    assert group is not None, "launch joins one"
    dispatcher = AllToAllDispatcher(big.topology, group, big.rank, agent.counter)
    tokens = TOKENS if is_cuda else CPU_TOKENS
    usual = 2 * tokens * big.topology.num_ranks * model.top_k // big.topology.num_slots
    experts: Experts = LoopExperts(big.bank)
    if is_cuda:
        experts = GroupedExperts(big.bank, usual_rows=usual)
    layers = [
        MoELayer(layer, model.top_k, experts, agent.table, dispatcher)
        for layer in range(model.num_layers)
    ]
    dense = dense_weights(model, device)
    if not is_cuda:
        dense = {name: tensor.float() for name, tensor in dense.items()}
    stack = MoEStack(model, dense, layers)
    random = torch.Generator().manual_seed(big.rank)
    ids = torch.randint(VOCABULARY, (16, 2, tokens // 2), generator=random).to(device)

    def forward(step: int) -> None:
        for number in range(run.layer_runs):
            stack.forward(ids[(step + number) % 16], salt=run.layer_runs * step + number)

    return forward


def measure_pairs(rank: int, num_ranks: int, run: Run) -> Sides:
    """Run pairs until the time is over; a first pair warms everything up and does not count."""
    clockwork = Clockwork(rank, num_ranks, run)
    clockwork.without()
    begun = time.perf_counter()
    clockwork.with_agent()
    clockwork.without()
    pair_s = clockwork.agreed(time.perf_counter() - begun)
    sides = clockwork.sides
    for number in range(min(MAX_PAIRS, max(MIN_PAIRS, int(run.seconds / pair_s)))):
        first, second = clockwork.without, clockwork.with_agent
        if number % 2:  # without, with, with, without: drift adds to both alike
            second_block = second()
            sides.without.append(first())
        else:
            sides.without.append(first())
            second_block = second()
        sides.with_agent.append(second_block)
    return sides


# -- Rows of the pairs that ``step_cost`` measured.

TARGET = "<= 0.5 % at p50"


def rows_of(ranks: Sequence[Sides], what: str, *, is_cuda: bool) -> list[Row]:
    """Ratios of whole steps, pair by pair, and the processor time of the agent's parts.

    A step ends when the slowest rank has ended: of the ranks' times of one step the largest counts.
    """
    without = [slowest(blocks) for blocks in zip(*(r.without for r in ranks), strict=True)]
    with_agent = [slowest(blocks) for blocks in zip(*(r.with_agent for r in ranks), strict=True)]
    rows: list[Row] = [
        (
            f"{what}: step without, p50 / p99",
            "{:.1f} / {:.1f} us, {} pairs of 2 x {} steps, store in {}".format(
                *_p50_p99(without), len(without), len(without[0]), ranks[0].store
            ),
            "-",
        ),
        ("  step with, p50 / p99", "{:.1f} / {:.1f} us".format(*_p50_p99(with_agent)), "-"),
    ]
    for percent in (50, 99):
        target = (TARGET if percent == 50 else "reported") if is_cuda else "-"
        pairs = zip(without, with_agent, strict=True)
        found = ratios(((a, b) for a, b in pairs), percent)
        rows.append((f"  with / without, p{percent} of each pair", _spread(found), target))
    neighbours = ratios(itertools.pairwise(without), 50)
    rows.append(("  noise: without / without, p50 of neighbours", _spread(neighbours), "-"))
    calls = np.concatenate([block.call_us for r in ranks for block in r.with_agent])
    threads = [block.threads_us for r in ranks for block in r.with_agent]
    p50, p99 = np.percentile(calls, (50, 99))
    rows += [
        (
            "  step(), processor time of a call: p50 / p99 / mean",
            f"{p50:.1f} / {p99:.1f} / {calls.mean():.1f} us",
            "-",
        ),
        (
            "  the agent's threads, processor time of a step, a rank",
            f"{np.median(threads):.1f} us ({min(threads):.1f} to {max(threads):.1f})",
            "-",
        ),
    ]
    return rows


def slowest(blocks: Iterable[Block]) -> NDArray[np.float64]:
    """Times [steps] of one block: of all ranks the largest."""
    times: NDArray[np.float64] = np.array([block.step_us for block in blocks]).max(axis=0)
    return times


def ratios(
    pairs: Iterable[tuple[NDArray[np.float64], NDArray[np.float64]]], percent: int
) -> NDArray[np.float64]:
    """Second over first at a percentile, less 1."""
    return np.array([np.percentile(b, percent) / np.percentile(a, percent) - 1 for a, b in pairs])


def _spread(found: NDArray[np.float64]) -> str:
    low, middle, high = np.percentile(found, (25, 50, 75))
    return f"{middle:+.2%} median of pairs (quartiles {low:+.2%}, {high:+.2%})"


def _p50_p99(blocks: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.concatenate(blocks), (50, 99))
    return float(p50), float(p99)


SMALL = ModelShape(tuple(range(4)), 16, 4, hidden=128, intermediate=64)
DEADLINE_S = 150.0  # of the ranks; a run ends long before
WIDTH = 66


def run_of(given: argparse.Namespace, num_ranks: int, dispatcher: str, path: Path) -> Run:
    """What the ranks of one run are given."""
    if given.device == "cpu":
        slots = SMALL.num_experts // num_ranks + (2 if num_ranks > 1 else 0)
        shapes = Shapes(SMALL, slots, precision="float32")
        return Run(shapes, "all-to-all", 1, given.block or 60, given.seconds, path, given.load)
    shapes = v3(4, 16 * num_ranks, slots_per_rank=18, precision=given.precision)
    layer_runs = 14 if dispatcher == "deepep" else 4
    return Run(shapes, dispatcher, layer_runs, given.block or 100, given.seconds, path, given.load)


def measure(given: argparse.Namespace, num_ranks: int, dispatcher: str) -> list[Sides]:
    """Run the ranks over a store of their own."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(given, num_ranks, dispatcher, Path(folder) / "bench.sqlite")
        begin_store(run.store, run.shapes, num_ranks)
        found: list[Sides] = launch(measure_pairs, num_ranks, run, deadline_s=DEADLINE_S)
        return found


def measure_with_any(given: argparse.Namespace, num_ranks: int) -> tuple[str, list[Sides]]:
    """Measure with ``deep_ep`` if it is there and works, else with NCCL's all-to-all."""
    wanted = given.dispatcher or ("deepep" if find_spec("deep_ep") else "all-to-all")
    if given.device == "cpu":
        wanted = "all-to-all"
    try:
        return wanted, measure(given, num_ranks, wanted)
    except RankError as exc:
        if wanted == "all-to-all" or given.dispatcher:
            raise
        print(f"deep_ep cannot be used here, all-to-all is: {str(exc)[-600:]}", file=sys.stderr)
        return "all-to-all", measure(given, num_ranks, "all-to-all")


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", default="", help="numbers of ranks; 2 on cuda, 1,4 on the cpu")
    parser.add_argument("--load", choices=("full", "idle", "none"), default="full")
    parser.add_argument("--dispatcher", choices=("deepep", "all-to-all"))
    parser.add_argument("--precision", choices=("fp8", "bfloat16"), default="fp8", help="on cuda")
    parser.add_argument("--block", type=int, default=0, help="steps that are measured in a block")
    parser.add_argument("--seconds", type=float, default=20.0, help="of all pairs of one run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_cuda = given.device == "cuda"
    numbers = [int(text) for text in (given.ranks or ("2" if is_cuda else "1,4")).split(",")]
    if is_cuda and torch.cuda.device_count() < max(numbers):
        raise SystemExit(f"found {torch.cuda.device_count()} GPUs, expected {max(numbers)}")
    rows: list[Row] = []
    for num_ranks in numbers:
        dispatcher, found = measure_with_any(given, num_ranks)
        part = rows_of(found, f"{num_ranks} {given.device} ranks, {dispatcher}", is_cuda=is_cuda)
        show(part, WIDTH)
        rows += part
    keep(rows, given.json)


if __name__ == "__main__":
    main()
