"""Time of a whole MoE layer on one GPU, measured, beside what the simulator predicts.

    PYTHONPATH=. python -m benchmarks.simulator.layer_time --out FILE [--only qwen3-30b-fp8]
    PYTHONPATH=. python -m benchmarks.simulator.layer_time --predict FILE

One rank is the whole group: it holds all experts of the layer. A layer is ``MoELayer`` as serving
has it: router, choice of replicas, rows gathered by slot (``LocalDispatcher``; FP8 rows are
quantised before, as DeepEP does), experts, weighted sum. It is replayed as a CUDA graph. A bias on
the router makes the load uneven: three skews x five batch sizes.

What is predicted from is measured apart, on other counts: experts with the *same* rows in every
slot, and the layer without experts at five batches between the predicted ones. ``--predict`` needs
no GPU; ``layer_prediction`` has the rules. Measuring needs torch, triton and numpy only.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.expert_curve import (
    BF16,
    ROWS,
    SKEWS,
    Shape,
    Weights,
    even,
    layer,
    least_launches,
    measured,
    tiling_for,
    tilings_of,
)
from benchmarks.experts_uneven import PROCESSES, compiled
from benchmarks.simulator.local_dispatch import LocalDispatcher, NoExperts
from eplb.core.placement import Placement
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import Experts, GroupedExperts
from runtime.model.moe import MoELayer, normalise, route
from runtime.routing import RoutingTable

FORMAT, VERSION = "eplb-layer-time", 1
MEAN_ROWS = (8, 64, 256, 1024, 4096)  # of a slot, predicted
AROUND_ROWS = (4, 32, 128, 512, 2048)  # of a slot, to fit what is around the experts
EVEN_ROWS = (*ROWS, 4096, 8192)
LOGIT_SPREAD = 1.28  # of a Gumbel variable, whose choices follow the bias exactly
SEED, SECONDS = 5, 0.06


@dataclass(frozen=True)
class Case:
    """A layer to measure."""

    shape: Shape
    num_experts: int
    top_k: int


CASES = (
    Case(Shape("qwen3-30b", 2048, 768, "fp8"), 128, 8),
    Case(Shape("deepseek-v3", 7168, 2048, "fp8"), 32, 8),
    Case(Shape("qwen3-30b", 2048, 768, "bf16"), 128, 8),
    Case(Shape("deepseek-v3", 7168, 2048, "bf16"), 32, 8),
)


class Layer:
    """The layer of a case on the device, with a router of its own."""

    def __init__(self, case: Case, device: torch.device) -> None:
        shape, num = case.shape, case.num_experts
        self.case = case
        is_fp8 = shape.dtype == "fp8"
        schema = (
            ExpertSchema.swiglu_fp8(shape.hidden, shape.intermediate)
            if is_fp8
            else ExpertSchema.swiglu(shape.hidden, shape.intermediate, BF16)
        )
        arena = PlainArena(bank_bytes(schema, 1, num, 0), device)
        self.bank = ExpertBank(schema, 1, num, num_staging=0, arena=arena)
        for name, tensor in self.bank.weights(0).items():
            for slot in tensor:  # one by one: the values before rounding take four times the room
                plain = torch.rand(slot.shape, device=device)
                slot.copy_(plain + 0.5 if name.endswith("scale") else (plain - 0.5) * 0.2)
        in_order = Placement(np.arange(num)[None, :], num)
        self.table = RoutingTable(in_order, max_replicas=1, device=device)
        self.dispatcher = LocalDispatcher(num, SlotCounter(1, num, device), use_fp8=is_fp8)
        self.gate = torch.randn((num, shape.hidden), device=device)
        self.gate *= LOGIT_SPREAD * shape.hidden**-0.5
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)

    def tokens(self, mean_rows: int) -> torch.Tensor:
        """Random tokens of a batch with so many rows of a slot in the mean."""
        count = mean_rows * self.case.num_experts // self.case.top_k
        return normalise(torch.randn((count, self.case.shape.hidden), device=self.gate.device)).to(
            BF16
        )

    def routed(self, tokens: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts [T, K] and weights."""
        return route(tokens.float() @ self.gate.T + bias, self.case.top_k)

    def counts(self, tokens: torch.Tensor, bias: torch.Tensor) -> list[int]:
        """Rows of each slot."""
        chosen, _ = self.routed(tokens, bias)
        found: list[int] = torch.bincount(
            chosen.flatten(), minlength=self.case.num_experts
        ).tolist()
        return found

    def run(
        self, tokens: torch.Tensor, bias: torch.Tensor, experts: Experts
    ) -> Callable[[int], None]:
        """One pass of the layer, routing included."""
        moe = MoELayer(0, self.case.top_k, experts, self.table, self.dispatcher)

        def once(number: int) -> None:
            chosen, weights = self.routed(tokens, bias)
            moe.forward(tokens, chosen, weights, salt=self.seed)

        return once

    def before(self, tokens: torch.Tensor, bias: torch.Tensor) -> Callable[[int], None]:
        """One pass up to the experts."""

        def once(number: int) -> None:
            chosen, weights = self.routed(tokens, bias)
            slots = self.table.draw(0, chosen, self.seed)
            self.dispatcher.dispatch(0, tokens, slots, weights)

        return once

    def around(self, tokens: torch.Tensor, bias: torch.Tensor) -> Callable[[int], None]:
        """One pass without the experts."""
        rows = len(tokens) * self.case.top_k
        results = torch.ones((rows, tokens.shape[1]), dtype=BF16, device=tokens.device)
        return self.run(tokens, bias, NoExperts(results))


def biases(case: Case, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the router, by skew: logarithms of a Gamma draw."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    for skew, concentration in SKEWS.items():
        alpha = torch.full((case.num_experts,), concentration, device="cpu")
        drawn = torch._standard_gamma(alpha, generator=generator) / concentration
        yield skew, drawn.clamp(min=1e-3).log().to(device)


def timed(run: Callable[[int], None], mean_rows: int) -> dict[str, float]:
    """Of a pass."""
    return measured(run, 1, least=least_launches(mean_rows), seconds=SECONDS)


def around_points(built: Layer) -> Iterator[dict[str, Any]]:
    """The layer without experts, and up to them, at even routing."""
    flat = torch.zeros(built.case.num_experts, device=built.gate.device)
    for mean in AROUND_ROWS:
        tokens = built.tokens(mean)
        yield {
            "tokens": len(tokens),
            "before_us": timed(built.before(tokens, flat), mean)["us"],
            "around_us": timed(built.around(tokens, flat), mean)["us"],
        }


def uneven_points(built: Layer) -> Iterator[dict[str, Any]]:
    """The whole layer; its parts beside it tell where a prediction is wrong."""
    case = built.case
    for skew, bias in biases(case, built.gate.device):
        for mean in MEAN_ROWS:
            tokens = built.tokens(mean)
            counts = built.counts(tokens, bias)
            experts = GroupedExperts(built.bank, usual_rows=mean)
            found = timed(built.run(tokens, bias, experts), mean)
            around = timed(built.around(tokens, bias), mean)["us"]
            yield {
                "skew": skew,
                "mean_rows": mean,
                "tokens": len(tokens),
                "counts": counts,
                **found,
                "around_us": around,
                "experts_us": _experts_us(case, counts, mean),
            }
            print(
                f"{case.shape.name:18} {skew:7} {mean:5} rows, busiest {max(counts):6} "
                f"{found['us']:10.1f} us, {around:8.1f} around",
                flush=True,
            )


def _experts_us(case: Case, counts: list[int], mean: int) -> float:
    weights = Weights(case.shape, case.num_experts)
    rows = torch.tensor(counts, dtype=torch.int32)
    return timed(layer(weights, rows, tiling_for(case.shape, mean)), mean)["us"]


def record_of(case: Case, device: torch.device) -> dict[str, Any]:
    """All that is measured of a case."""
    begun = time.perf_counter()
    found = Layer(case, device)
    uneven = list(uneven_points(found))
    around = list(around_points(found))
    del found
    torch.cuda.empty_cache()
    points = even(case.shape, EVEN_ROWS, (case.num_experts,), seconds=SECONDS)
    torch.cuda.empty_cache()
    print(f"{case.shape.name}: {time.perf_counter() - begun:.0f} s", flush=True)
    return {
        **asdict(case.shape),
        "num_experts": case.num_experts,
        "top_k": case.top_k,
        "tilings": tilings_of(case.shape),
        "even": points,
        "around": around,
        "uneven": uneven,
    }


def measure(out: Path, cases: tuple[Case, ...]) -> None:
    """Measure, and write the file anew after each case."""
    tasks = [
        (case.shape, case.num_experts, tiling_for(case.shape, rows))
        for case in cases
        for rows in ((1,) if case.shape.dtype == "fp8" else (1, MEAN_ROWS[-1]))
    ]
    with ProcessPoolExecutor(min(PROCESSES, len(tasks)), get_context("spawn")) as pool:
        list(pool.map(compiled, tasks))
    torch.manual_seed(SEED)
    torch.set_default_device("cuda")
    import triton

    whole: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "device": torch.cuda.get_device_name(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "software": f"torch {torch.__version__}, triton {triton.__version__}, "
        f"python {platform.python_version()}",
        "layers": [],
    }
    for case in cases:
        with torch.inference_mode():
            whole["layers"].append(record_of(case, torch.device("cuda")))
        out.write_text(json.dumps(whole) + "\n")


def main() -> None:
    """Measure, or predict what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="measure, into this file")
    parser.add_argument("--only", default="", help="layers whose name has this text")
    parser.add_argument("--predict", type=Path, help="file that was measured")
    asked = parser.parse_args()
    if asked.out is not None:
        chosen = tuple(case for case in CASES if asked.only in case.shape.name)
        measure(asked.out, chosen)
    if asked.predict is not None:
        from benchmarks.simulator.layer_prediction import show

        show(asked.predict)
    if asked.out is None and asked.predict is None:
        parser.error("expected --out or --predict")


if __name__ == "__main__":
    main()
