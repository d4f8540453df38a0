"""Processor time that the vLLM plug-in adds to a step, at the size of a large model.

    PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.engines.vllm_step [--steps 3000]

One process with vLLM's real ``EplbState`` on a CPU: 58 layers, 256 experts, 288 slots, all slots on
one rank, so that maps and counts have their full size; experts of a few bytes. Steps with the
plug-in and without take turns in blocks. The figure is the time of the thread that makes the steps;
elapsed times are counted too, with how often the kernel took the processor from the thread.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rebalance.engines.vllm.hooks import install
from rebalance.engines.vllm.process import PluginProcess
from tests.support.engines import vllm_cpu
from tests.support.engines.gauge import value_of
from tests.support.engines.ranks import config_in, settings_in, wait_until
from tests.support.engines.vllm_ranks import Layer, eplb_state

LAYERS, EXPERTS, SLOTS, BLOCK, SEED = 58, 256, 288, 250, 20261127
WINDOW, NEVER = 64, 10**9  # steps of vLLM's load, and to a rebalance


def state_with(config: Path | None) -> tuple[Any, PluginProcess | None]:
    """A state with a model, and the plug-in if a file is given; what puts vLLM's functions back."""
    held = eplb_state.EplbState.build_initial_global_physical_to_logical_map(
        EXPERTS, SLOTS - EXPERTS
    )
    process, put_back = None, lambda: None
    if config is not None:
        process = PluginProcess(settings_in(config))
        put_back = install(process)
    state = vllm_cpu.state_of(interval=WINDOW)
    state.parallel_config.eplb_config.step_interval = NEVER
    model = vllm_cpu.model_of([Layer(n, held, False) for n in range(LAYERS)], EXPERTS, SLOTS, 1)
    state.add_model(model, vllm_cpu.configuration("generate"))
    put_back()
    return state, process


def timed(step: Any) -> tuple[float, float, int]:
    """Milliseconds of the processor, milliseconds elapsed, and times that it was taken."""
    before, began = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
    spent = time.thread_time()
    step()
    spent, elapsed = time.thread_time() - spent, time.perf_counter() - began
    taken = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - before.ru_nivcsw
    return 1e3 * spent, 1e3 * elapsed, taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    drawn = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        vllm_cpu.install(*(vllm_cpu.coordinator(0, 1) for _ in range(2)))
        config = config_in(
            folder,
            engine__plan=False,  # it would have one rank
            telemetry__sample_steps=16,
            telemetry__window_steps=64,
        )
        alone, _ = state_with(None)
        state, process = state_with(config)
        assert process is not None, "a file was given"

        def with_it() -> None:
            process.before_step(state, False, False, False)
            state.step()
            process.after_step(state, False, False)

        wait_until(lambda: value_of("vllm", "store") == 1.0)
        found: dict[str, list[tuple[float, float, int]]] = {"without": [], "with": []}
        for _ in range(-(-steps // BLOCK)):
            for case, own, step in (("without", alone, alone.step), ("with", state, with_it)):
                for _ in range(BLOCK):
                    (one,) = own.model_states.values()
                    one.expert_load_pass += torch.from_numpy(
                        drawn.integers(0, 50, (LAYERS, SLOTS), dtype=np.int32)
                    )
                    found[case].append(timed(step))
        recorder = process.recorder
        assert recorder is not None, "the tap is on"
        recorder.close(60.0)
    print("| steps | processor ms: p50 | p99 | largest | over 1 ms elapsed | of these preempted |")
    print("|---|---|---|---|---|---|")
    for case, rows in found.items():
        spent, elapsed, taken = np.array(rows).T
        late = elapsed > np.median(elapsed) + 1.0
        quantiles = " | ".join(f"{np.quantile(spent, part):.3f}" for part in (0.5, 0.99, 1.0))
        print(
            f"| {len(rows)} {case} the plug-in | {quantiles} | {late.sum()} "
            f"| {(late & (taken > 0)).sum()} |"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
