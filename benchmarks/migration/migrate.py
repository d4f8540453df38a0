"""Moving experts, measured: each phase against the plain copy, and what decode steps feel of it.

    python3 -m benchmarks.migration.migrate --device cuda [--only stage,host_cache,flip,whole,disk]
    python -m benchmarks.migration.migrate    # the same on CPU ranks, small

On GPUs it needs four of one host and deep_ep; decode-copy and decode-host run on one as well, with
``--ranks 1``, where batches are split besides. Shapes are DeepSeek-V3's, made-up weights; a decode
step is four resident MoE layers run fourteen times, 56 layers in all. Seeded; one table.

``--budget`` (bytes a second of a rank's link) and ``--staging`` (experts of its ring) go to every
measurement that moves experts under an agent: whole, and every decode. The others are without a
budget and stage sixteen.

    stage.py      rows stage, host_cache
    flip.py       row flip
    whole.py      row whole
    preload.py    row disk
    decode.py     rows decode-copy, decode-flip, decode-host
    agent.py      the agent and the plans of the last two files
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.migration import preload
from benchmarks.migration.agent import begin_store
from benchmarks.migration.big_rank import Shapes, v3
from benchmarks.migration.decode import measure_decode
from benchmarks.migration.flip import measure_flip
from benchmarks.migration.stage import LAUNCH_DEADLINE_S, measure_stage, stage_from_host_cache
from benchmarks.migration.whole import measure_whole
from benchmarks.result_table import Row, keep, show
from eplb.core.model import ModelShape
from eplb.migration.build import Source
from rebalance.stage.stage_settings import SERVING_BYTES_PER_SECOND
from runtime.group.launch import launch

DECODE_DEADLINE_S = 200.0
STEP_S = 0.03  # of a whole rebalance
RANKS_ON_ONE_GPU = 4  # that one GPU alone emulates
WIDTH = 72
SMALL = ModelShape(tuple(range(4)), 64, 8, hidden=512, intermediate=256)
ONE_SMALL_LAYER = replace(SMALL, layer_ids=(0,))

Measurements = dict[str, Callable[[], Iterator[Row]]]


@dataclass(frozen=True)
class Runs:
    """What every measurement is given."""

    is_on_gpu: bool
    ranks: int
    folder: Path
    budget: float  # bytes a second of a rank's link; inf: as fast as it goes
    staging_experts: int

    def every(self) -> Measurements:
        """Every measurement that can run here, by name."""
        named: Measurements = {
            "stage": self.stage,
            "host_cache": self.host_cache,
            "flip": self.flip,
            "whole": self.whole,
            "disk": self.disk,
        }
        if self.is_on_gpu:
            named |= {
                "decode-copy": lambda: self.decode("copy"),
                "decode-host": lambda: self.decode("host"),
            }
        if self.is_on_gpu and self.ranks > 1:
            named["decode-flip"] = lambda: self.decode("flip")
        return named

    def stage(self) -> Iterator[Row]:
        """Sixteen experts into staging memory, from a peer and from locked host memory."""
        for precision in ("fp8", "bfloat16") if self.is_on_gpu else ("float32",):
            for source in (Source.PEER, Source.HOST):
                what = (measure_stage, self.ranks, self._one_layer(precision), source)
                yield from launch(*what, deadline_s=LAUNCH_DEADLINE_S)[0]

    def host_cache(self) -> Iterator[Row]:
        """The same from a host cache's process that has read a checkpoint."""
        shapes = self._one_layer("fp8" if self.is_on_gpu else "float32")
        yield from stage_from_host_cache(self.ranks, shapes, self.folder)

    def flip(self) -> Iterator[Row]:
        """Prepared tables that serve at once."""
        device = "cuda" if self.is_on_gpu else "cpu"
        yield from launch(measure_flip, 1, device, deadline_s=60)[0]

    def whole(self) -> Iterator[Row]:
        """A rebalance from published to committed."""
        shapes = self._under_an_agent(
            v3(58, 16 * self.ranks, slots_per_rank=20)
            if self.is_on_gpu
            else Shapes(SMALL, 20, precision="float32")
        )
        path = self.folder / "whole.sqlite"
        begin_store(path, shapes, self.ranks)
        yield from launch(
            measure_whole, self.ranks, shapes, path, STEP_S, deadline_s=LAUNCH_DEADLINE_S
        )[0]

    def disk(self) -> Iterator[Row]:
        """Cold records into a host cache."""
        yield from preload.measure(self.folder)

    def decode(self, mode: str) -> Iterator[Row]:
        """Decode steps with and without migrations; ``mode`` is copy, flip or host."""
        spares = 4 if mode == "flip" else 0
        emulated = 1 if self.ranks > 1 else RANKS_ON_ONE_GPU
        slots = 72 // emulated
        shapes = self._under_an_agent(
            v3(
                4,
                64 * self.ranks,
                slots_per_rank=slots,
                spare_slots=spares,
                ranks_per_gpu=emulated,
            )
        )
        path = self.folder / f"{mode}.sqlite"
        begin_store(path, shapes, self.ranks)
        yield from launch(
            measure_decode, self.ranks, shapes, mode, path, deadline_s=DECODE_DEADLINE_S
        )[0]

    def _one_layer(self, precision: str) -> Shapes:
        if self.is_on_gpu:
            return v3(1, 16 * self.ranks, slots_per_rank=16, precision=precision)
        return Shapes(ONE_SMALL_LAYER, 16, precision=precision)

    def _under_an_agent(self, shapes: Shapes) -> Shapes:
        return replace(shapes, bytes_per_second=self.budget, staging_experts=self.staging_experts)


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--budget", type=float, help=f"on cuda {SERVING_BYTES_PER_SECOND:g}, else none"
    )
    parser.add_argument("--staging", type=int, default=16, help="experts of a rank's ring")
    given = parser.parse_args()
    is_on_gpu = given.device == "cuda"
    usual = SERVING_BYTES_PER_SECOND if is_on_gpu else math.inf
    budget = usual if given.budget is None else given.budget
    if not budget > 0:
        parser.error(f"--budget is {budget}, expected more than 0 bytes a second")
    if given.staging < 1:
        parser.error(f"--staging is {given.staging}, expected 1 or more experts")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        every = Runs(is_on_gpu, given.ranks, Path(folder), budget, given.staging).every()
        wanted = given.only.split(",") if given.only else list(every)
        if unknown := [name for name in wanted if name not in every]:
            parser.error(f"--only names {unknown[0]!r}, expected some of: {', '.join(every)}")
        for name in wanted:
            for row in every[name]():
                rows.append(row)
                show([row], WIDTH)
    keep(rows, given.json)


if __name__ == "__main__":
    main()
