"""DeepEP's modes and NCCL's all-to-all against what each rank works out by itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from eplb.core.load import Phase
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.dispatch.deepep import DeepEPByPhase, DeepEPLowLatency, DeepEPNormal, DeepEPShape
from runtime.dispatch.table import Trial, check_dispatcher, choose_dispatcher
from tests.gpu.parts import needs_deep_ep, needs_two_gpus
from tests.support.launch import launch
from tests.support.limits import NEVER_S

pytestmark = [
    pytest.mark.gpu,
    needs_two_gpus,
]
HIDDEN, TOP_K, MAX_TOKENS = 2048, 8, 128
NUM_RANKS = min(4, torch.cuda.device_count())


def trial_of(num_ranks: int, rank: int, num_tokens: int) -> Trial:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=num_ranks, slots_per_rank=18)
    device = torch.device("cuda", rank)
    return Trial(topology, HIDDEN, TOP_K, num_tokens, device, torch.bfloat16, seed=3)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_one(rank: int, num_ranks: int, name: str, num_tokens: int) -> str:
    trial = trial_of(num_ranks, rank, num_tokens)
    counter = SlotCounter(1, 18, f"cuda:{rank}")
    made, why = choose_dispatcher(name, trial, counter, group(), max_tokens=MAX_TOKENS)
    assert name in why
    return check_dispatcher(made, counter, trial, group())


@pytest.mark.parametrize("num_tokens", [MAX_TOKENS, 5])
@pytest.mark.parametrize(
    "name",
    [
        "all_to_all",
        pytest.param("deepep_normal", marks=needs_deep_ep),
        pytest.param("deepep_low_latency", marks=needs_deep_ep),
        pytest.param("deepep_by_phase", marks=needs_deep_ep),
    ],
)
def test_dispatcher_gives_right_sums_and_right_counts(name: str, num_tokens: int) -> None:
    assert launch(run_one, NUM_RANKS, name, num_tokens, deadline_s=NEVER_S) == [""] * NUM_RANKS


def run_prefill(rank: int, num_ranks: int) -> str:
    trial = trial_of(num_ranks, rank, 1024)
    counter = SlotCounter(1, 18, f"cuda:{rank}")
    shape = DeepEPShape(trial.topology, HIDDEN, TOP_K, MAX_TOKENS)
    return check_dispatcher(DeepEPNormal(shape, group(), counter), counter, trial, group())


@needs_deep_ep
def test_normal_mode_takes_prefill_sized_batches() -> None:
    assert launch(run_prefill, NUM_RANKS, deadline_s=NEVER_S) == [""] * NUM_RANKS


class OfPhase:
    """One phase of a dispatcher that serves both, for a trial of that phase alone."""

    def __init__(self, both: DeepEPByPhase, phase: Phase) -> None:
        both.begin_pass(phase)
        self.dispatch, self.combine = both.dispatch, both.combine
        self.begin_combine = both.begin_combine


def run_alternating(rank: int, num_ranks: int, use_fp8: bool) -> list[str]:
    prefill, decode = trial_of(num_ranks, rank, 512), trial_of(num_ranks, rank, 64)
    counter = SlotCounter(1, 18, f"cuda:{rank}")
    shape = DeepEPShape(prefill.topology, HIDDEN, TOP_K, MAX_TOKENS)
    both = DeepEPByPhase(shape, group(), counter, use_fp8=use_fp8)
    found = []
    for _ in range(3):
        found.append(check_dispatcher(OfPhase(both, "prefill"), counter, prefill, group()))
        found.append(check_dispatcher(OfPhase(both, "decode"), counter, decode, group()))
    return found


@needs_deep_ep
@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
def test_prefill_and_decode_alternate_behind_one_dispatcher(use_fp8: bool) -> None:
    found = launch(run_alternating, NUM_RANKS, use_fp8, deadline_s=NEVER_S)

    assert found == [[""] * 6] * NUM_RANKS


def run_two_at_once(rank: int, num_ranks: int) -> tuple[str, str]:
    trial = trial_of(num_ranks, rank, 64)
    counter = SlotCounter(1, 18, f"cuda:{rank}")
    made = DeepEPLowLatency(
        DeepEPShape(trial.topology, HIDDEN, TOP_K, MAX_TOKENS), group(), counter
    )
    tokens = torch.ones((4, HIDDEN), dtype=torch.bfloat16, device=trial.device)
    slots = torch.arange(TOP_K, device=trial.device).expand(4, TOP_K).contiguous()
    received = made.dispatch(0, tokens, slots, slots.float())
    under_way = made.begin_combine(0, received.rows, received)
    told = refusal_of(lambda: made.dispatch(1, tokens, slots, slots.float()))
    under_way.finish()
    return told, check_dispatcher(made, counter, trial, group())


@needs_deep_ep
def test_low_latency_transfer_before_the_last_was_finished_is_refused() -> None:
    for told, wrong in launch(run_two_at_once, NUM_RANKS, deadline_s=NEVER_S):
        assert told.startswith("the dispatch of layer 1 begins while the combine of layer 0 is")
        assert wrong == ""


def refusal_of(make: Callable[[], object]) -> str:
    try:
        make()
    except ConfigError as exc:
        return str(exc)
    return "not refused"


def run_disagreeing(rank: int, num_ranks: int) -> str:
    topology = trial_of(num_ranks, rank, 8).topology
    shape = DeepEPShape(topology, HIDDEN if rank else 2 * HIDDEN, TOP_K, MAX_TOKENS)
    return refusal_of(lambda: DeepEPNormal(shape, group(), SlotCounter(1, 18, f"cuda:{rank}")))


@needs_deep_ep
def test_disagreement_on_a_shape_is_reported_on_every_rank() -> None:
    for told in launch(run_disagreeing, NUM_RANKS, deadline_s=NEVER_S):
        assert told.startswith("ranks disagree on (slots, hidden, top_k, max_tokens)")
        assert f"[{18 * NUM_RANKS}, {2 * HIDDEN}, {TOP_K}, {MAX_TOKENS}]" in told


def run_overfull(rank: int, num_ranks: int) -> tuple[str, str]:
    trial = trial_of(num_ranks, rank, MAX_TOKENS)
    counter = SlotCounter(1, 18, f"cuda:{rank}")
    shape = DeepEPShape(trial.topology, HIDDEN, TOP_K, MAX_TOKENS)
    made = DeepEPLowLatency(shape, group(), counter)
    tokens = torch.zeros((MAX_TOKENS + 1, HIDDEN), dtype=torch.bfloat16, device=trial.device)
    slots = torch.zeros((MAX_TOKENS + 1, TOP_K), dtype=torch.int64, device=trial.device)
    told = refusal_of(lambda: made.dispatch(0, tokens, slots, slots.float()))
    return told, check_dispatcher(made, counter, trial, group())


@needs_deep_ep
def test_tokens_beyond_the_buffers_are_refused_and_the_next_step_is_right() -> None:
    for told, wrong in launch(run_overfull, NUM_RANKS, deadline_s=NEVER_S):
        assert told.startswith("layer 0: 129 tokens in one step, expected at most 128")
        assert wrong == ""


def run_without_nvshmem(rank: int, num_ranks: int) -> tuple[str, str]:
    trial = trial_of(num_ranks, rank, 64)
    counter = SlotCounter(1, 18, f"cuda:{rank}")
    shape = DeepEPShape(trial.topology, HIDDEN, TOP_K, MAX_TOKENS)
    told = refusal_of(lambda: DeepEPLowLatency(shape, group(), counter))
    _, why = choose_dispatcher("auto", trial, counter, group(), max_tokens=MAX_TOKENS)
    return told, why


@pytest.mark.skipif(
    not os.environ.get("EPLB_TEST_DEEPEP_WITHOUT_NVSHMEM"),
    reason="needs a deep_ep built without NVSHMEM; EPLB_TEST_DEEPEP_WITHOUT_NVSHMEM=1 says so",
)
def test_deep_ep_without_nvshmem_serves_only_normal_mode() -> None:
    for told, why in launch(run_without_nvshmem, NUM_RANKS, deadline_s=NEVER_S):
        assert told.startswith("deep_ep cannot serve low-latency mode here")
        assert "a build with NVSHMEM" in told
        assert why.startswith("deepep_normal gives right results")


def run_uneven(rank: int, num_ranks: int) -> str:
    slots = torch.tensor([4 + (r % 2) for r in range(num_ranks)]).numpy()
    topology = Topology(node_of_rank=slots * 0, slots_of_rank=slots)
    trial = Trial(topology, 64, 2, 32, torch.device("cuda", rank), torch.bfloat16)
    counter = SlotCounter(1, int(slots[rank]), f"cuda:{rank}")
    plain = AllToAllDispatcher(topology, group(), rank, counter)
    wrong = check_dispatcher(plain, counter, trial, group())
    _, why = choose_dispatcher("auto", trial, counter, group(), max_tokens=32)
    return wrong or why


@needs_deep_ep
def test_uneven_ranks_use_all_to_all_with_a_reason() -> None:
    for why in launch(run_uneven, NUM_RANKS, deadline_s=NEVER_S):
        assert why.startswith("all_to_all gives right results")
        assert "ranks have [4, 5] slots, DeepEP expects the same number" in why
