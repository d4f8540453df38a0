"""Time of the experts' kernels for the rows that runs have recorded, one rank after another.

    python -m benchmarks.engines.served.experts_time OUT RUN ...

Ranks that share a GPU slow each other down while they serve. So vLLM's own kernel is called
afterwards, alone on the GPU, with as many rows for each slot of a rank as the rank had in a step.
The time of a step is the busiest rank's, summed over its layers. Writes ``OUT/experts_time.json``.

Shapes:  N steps, L layers, P slots, C slots of a rank, H hidden, I intermediate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines.served.judge import steps_of
from benchmarks.engines.served.model import SIZES

SAMPLED = 60  # steps of a run
REPEATS = 5
COVER_CYCLES = 4_000_000  # that the GPU waits for, until all launches of a call are queued


class Experts:
    """The experts of one rank, whose weights are random: their values take no time."""

    def __init__(self, num_slots: int, hidden: int, inner: int) -> None:
        kind, device = torch.bfloat16, "cuda"
        self.w1 = torch.randn(num_slots, 2 * inner, hidden, dtype=kind, device=device) * 0.02
        self.w2 = torch.randn(num_slots, hidden, inner, dtype=kind, device=device) * 0.02

    def milliseconds(self, rows: np.ndarray) -> list[float]:
        """Times of a call with these rows [C] for the slots."""
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        slots = torch.arange(len(rows), device="cuda", dtype=torch.int32)
        ids = torch.repeat_interleave(slots, torch.from_numpy(rows).to("cuda"))[:, None]
        ids = ids[torch.randperm(len(ids), device="cuda")].contiguous()
        if not len(ids):
            return [0.0] * REPEATS
        tokens = torch.randn(len(ids), self.w2.shape[1], dtype=torch.bfloat16, device="cuda")
        shares = torch.ones(len(ids), 1, dtype=torch.float32, device="cuda")
        times = []
        for number in range(REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(COVER_CYCLES)
            begin.record()
            fused_experts(tokens, self.w1, self.w2, shares, ids)
            end.record()
            end.synchronize()
            if number:  # the first call may compile
                times.append(begin.elapsed_time(end))
        return times


def time_run(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Times of a run's sampled steps."""
    from benchmarks.engines.served.load import Load
    from benchmarks.engines.served.run import Run

    run = Run(**{**job, "load": Load(**job["load"])})
    size = SIZES[run.size]
    num_slots = size.experts + (run.redundant if run.mode != "none" else 0)
    rows = steps_of(run, out)["rows"][..., :num_slots]
    busy = np.flatnonzero(rows.sum(axis=(1, 2)) > rows.sum(axis=(1, 2)).max() / 4)
    sampled = busy[np.linspace(0, len(busy) - 1, min(SAMPLED, len(busy))).astype(int)]
    each = num_slots // run.ranks
    experts = Experts(each, size.hidden, size.intermediate)
    by_repeat = np.zeros((len(sampled), REPEATS))
    mean = np.zeros(len(sampled))
    for place, step in enumerate(sampled):
        for layer in range(rows.shape[1]):
            ranks = rows[step, layer].reshape(run.ranks, each)
            times = np.array([experts.milliseconds(own) for own in ranks])  # [ranks, REPEATS]
            by_repeat[place] += times.max(axis=0)
            mean[place] += times.mean()
    totals = by_repeat.sum(axis=0)
    return {
        "steps": len(sampled),
        "tokens": int(rows[sampled].sum() // size.top_k // rows.shape[1]),
        "busiest_ms": float(np.median(totals)),
        "busiest_ms_least": float(totals.min()),
        "busiest_ms_most": float(totals.max()),
        "mean_rank_ms": float(mean.sum()),
    }


def main() -> None:
    """Time the runs that are named."""
    out, times = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        job = json.loads((out / name / "job.0.json").read_text())
        fields = {key: job[key] for key in job if key not in NOT_OF_RUN}
        times[name] = time_run(fields, out)
        print(name, times[name], flush=True)
    (out / "experts_time.json").write_text(json.dumps(times, indent=1))


# What a rank's job has beside its run.
NOT_OF_RUN = ("rank", "model", "out", "go", "board_port", "forced", "options")

if __name__ == "__main__":
    main()
