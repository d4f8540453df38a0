"""What a test lends vLLM's CPU build, so that EPLB runs in it: a general plug-in of vLLM.

    python -m tests.support.engines.served_on_cpu FOLDER sync|async

The CPU build serves, but has no EPLB: its configuration refuses it, its router maps nothing, its
experts ignore which of them are local, its runner adds no model to the balancer. All of the
balancer, its transfer and its commits are vLLM's own. Nothing of this is in the product.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

VARIABLE = "EPLB_SERVED_ON_CPU"  # "1": patch this process
MULTIPLIER, WORD = 2654435769, 2**32  # of the router's hash


class HostEvent:
    """In place of an event of a device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self.at = time.monotonic()

    def wait(self, stream: object = None) -> None:
        """Nothing: the host did what was ordered."""

    def synchronize(self) -> None:
        """Nothing, for the same reason."""

    def elapsed_time(self, other: HostEvent) -> float:
        """Milliseconds to another event."""
        return (other.at - self.at) * 1e3


def register() -> None:
    """Patch this process, where the environment asks for it. Once."""
    if os.environ.get(VARIABLE) != "1" or hasattr(register, "is_done"):
        return
    register.is_done = True  # type: ignore[attr-defined]
    _allow_eplb()
    _map_in_the_router()
    _compute_local_experts()
    _add_models()


class _WithEplb:
    """A platform that EPLB is allowed on."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def is_xpu(self) -> bool:
        """Asked by the check of the configuration alone."""
        return True


def _allow_eplb() -> None:
    from vllm.config import parallel

    parallel.current_platform = _WithEplb(parallel.current_platform)


def map_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """As vLLM's kernel: the replica by a hash of the row, and counts."""
    rows = torch.arange(len(topk_ids)).unsqueeze(1).expand_as(topk_ids)
    experts = topk_ids.long()
    count = logical_replica_count[experts].clamp_min(1)
    physical = logical_to_physical_map[experts, rows * MULTIPLIER % WORD % count]
    if bool(record_enabled):
        ones = torch.ones(physical.numel(), dtype=expert_load_view.dtype)
        expert_load_view.scatter_add_(0, physical.flatten(), ones)
    return physical.to(topk_ids.dtype)


def _map_in_the_router() -> None:
    from vllm.model_executor.layers.fused_moe.router import base_router

    base_router.eplb_map_to_physical_and_record = map_and_record


def _compute_local_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def keep_weights(self: Any, layer: torch.nn.Module) -> None:
        """Leave the weights as they were loaded: the balancer moves rows of them."""

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """SwiGLU of the local experts; the ranks' sums are added by vLLM."""
        expert_map = kwargs["expert_map"]
        output.zero_()
        local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        for expert in local.unique().tolist():
            if expert < 0:
                continue
            rows, places = torch.nonzero(local == expert, as_tuple=True)
            gate, up = (hidden_states[rows] @ w1[expert].T).chunk(2, dim=-1)
            answer = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
            output.index_add_(0, rows, answer * topk_weights[rows, places, None].to(answer))

    for kind in (cpu_moe.CPUUnquantizedExperts, cpu_moe.X86CPUUnquantizedExperts):
        kind.process_weights_after_loading = keep_weights
        kind.apply = apply
        kind.supports_expert_map = lambda self: True


def _add_models() -> None:
    """Add the model to the balancer, as the GPU's runner does."""
    from vllm.v1.worker import cpu_model_runner

    own = cpu_model_runner.CPUModelRunner.load_model

    @functools.wraps(own)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

        own(self, *args, **kwargs)
        _replace_device()  # the runner has placeholders of its own by now
        self._moe_model = get_mixture_of_experts_model(self.model)
        if self.parallel_config.enable_eplb:
            self.eplb_state = EplbState(self.parallel_config, self.device)
            self.eplb_state.add_model(self._moe_model, self.model_config)
            if self.eplb_state.is_async:
                _start_transfers(self.eplb_state)

    cpu_model_runner.CPUModelRunner.load_model = load_model


def _start_transfers(state: Any) -> None:
    """Start vLLM's thread of transfers, without the device that it would select."""
    from vllm.distributed.eplb.async_worker import transfer_run_periodically

    work = threading.Thread(
        target=transfer_run_periodically, args=(state, torch.accelerator.current_stream())
    )
    work.daemon = True
    work.start()
    state.async_worker = work


def _replace_device() -> None:
    from vllm.distributed.eplb import (
        async_worker,
        eplb_communicator,
        eplb_state,
        eplb_utils,
        rebalance_execute,
    )

    class Stream:
        """In place of a stream of a device."""

        def synchronize(self) -> None:
            """Nothing: the host did what was ordered."""

    torch.Event = HostEvent  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = lambda *device: Stream()  # type: ignore[assignment]
    for module in (async_worker, eplb_communicator, rebalance_execute, eplb_utils):
        module.device_stream = contextlib.nullcontext
    eplb_state.PIN_MEMORY = eplb_communicator.PIN_MEMORY = False


class Worker:
    """Calls of the test, by ``collective_rpc``."""

    model_runner: Any

    def eplb_interval(self, steps: int) -> None:
        """Rebalance after so many steps from now on."""
        state = self.model_runner.eplb_state
        state.expert_rearrangement_step_interval = steps
        state.expert_rearrangement_step = 0

    def eplb_maps(self) -> list[list[list[int]]]:
        """The map that serves; a list, which travels."""
        (state,) = self.model_runner.eplb_state.model_states.values()
        maps: list[list[list[int]]] = state.physical_to_logical_map.tolist()
        return maps

    def eplb_break_transfer(self) -> None:
        """Have moves copy nothing from now on."""
        from vllm.distributed.eplb import eplb_state, rebalance_execute

        for module in (eplb_state, rebalance_execute):
            module.move_from_buffer = lambda *args, **kwargs: None


ROUNDS, BROKEN_ROUNDS, TOKENS = 6, 3, 24
REDUNDANT, INTERVAL, NEVER = 2, 8, 10**6  # steps


def main() -> None:
    """Serve a tiny model before, during and after changes of its map; print what came of it."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from benchmarks.engines.served.load import Load
    from benchmarks.engines.served.model import write_model

    folder, way = Path(sys.argv[1]), sys.argv[2]
    write_model(folder / "model", "tiny", "float32", seed=3)
    engine = LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
        enforce_eager=True,
        seed=0,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=32 << 20,
        distributed_executor_backend="mp",
        worker_extension_cls=f"{__spec__.name}.Worker",
        enable_eplb=True,
        eplb_config={
            "num_redundant_experts": REDUNDANT,
            "window_size": INTERVAL,
            "step_interval": NEVER,
            "use_async": way == "async",
            "communicator": "torch_gloo",
        },
    )
    load = Load(16 * ROUNDS, 16, prompt_tokens=8, answer_tokens=1, rounds_of_topic=1, seed=5)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def serve(turn: int) -> list[list[int]]:
        prompts = [
            TokensPrompt(prompt_token_ids=load.tokens_of(number)[0])
            for number in load.numbers_of(turn, 0, 1)
        ]
        answers = engine.generate(prompts, greedy, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def compare(turns: int) -> int:
        """How many answers of the first rounds are those of the start's map; notes the maps."""
        equal = 0
        for turn in range(turns):
            equal += sum(now == then for now, then in zip(serve(turn), before[turn], strict=True))
            maps.append(engine.collective_rpc("eplb_maps")[0])
        return equal

    before = [serve(turn) for turn in range(ROUNDS)]
    maps = [engine.collective_rpc("eplb_maps")[0]]
    engine.collective_rpc("eplb_interval", args=(INTERVAL,))
    equal = compare(ROUNDS)
    num_maps = sum(first != second for first, second in itertools.pairwise(maps))
    engine.collective_rpc("eplb_break_transfer")
    figures = {"answers": 16 * ROUNDS, "equal": equal, "maps": num_maps}
    figures |= {"broken_answers": 16 * BROKEN_ROUNDS, "broken_equal": compare(BROKEN_ROUNDS)}
    (folder / "served.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
