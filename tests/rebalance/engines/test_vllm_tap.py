from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from eplb.errors import RankError
from rebalance.engines.vllm.agreement import PREFIX, join
from rebalance.engines.vllm.process import layer_numbers
from rebalance.engines.vllm.tap import LoadTap, note_phases, phase_of
from tests.support.limits import NEVER_S

HELD = torch.tensor([[0, 1, 0, -1], [1, 1, 0, 0]])
LOAD = torch.tensor([[5, 7, 2, 9], [1, 2, 3, 4]], dtype=torch.int32)


def test_tap_folds_physical_experts_and_drops_empty_ones() -> None:
    tap = LoadTap(2, 2, torch.device("cpu"), sample_steps=2)

    assert tap.add(LOAD, HELD, "decode", 7) == []
    (counted,) = tap.add(LOAD, HELD, "decode", 7)

    assert counted.tokens.tolist() == [[14, 14], [14, 6]]
    assert (counted.first_step, counted.last_step, counted.phase) == (0, 1, "decode")


def test_sample_ends_where_the_phase_changes() -> None:
    tap = LoadTap(2, 2, torch.device("cpu"), sample_steps=4)
    passes = ["decode", "decode", "prefill", None, "prefill"]

    done = [one for phase in passes for one in tap.add(LOAD, HELD, phase, 1)]

    assert [(one.phase, one.first_step, one.last_step) for one in done] == [
        ("decode", 0, 1),
        ("prefill", 2, 3),
    ]
    assert done[1].tokens.tolist() == [[7, 7], [7, 3]], "a dummy pass counts nothing"


@pytest.mark.parametrize(
    ("tokens", "speculative", "phase"),
    [
        ({"a": 1, "b": 1}, 0, "decode"),
        ({"a": 3, "b": 1}, 2, "decode"),
        ({"a": 512}, 0, "prefill"),
        ({"a": 512, "b": 1}, 0, "mixed"),
        ({}, 0, "decode"),
    ],
)
def test_phase_follows_the_tokens_of_each_request(
    tokens: dict[str, int], speculative: int, phase: str
) -> None:
    assert phase_of(tokens, speculative) == phase


def test_phases_are_noted_once_for_each_pass_of_a_runner() -> None:
    class Runner:
        num_spec_tokens = 1

        def execute_model(self, scheduler_output: object, more: int = 0) -> int:
            return more

    noted: list[str] = []
    for _ in range(2):
        note_phases(Runner, noted.append)
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 2})

    assert Runner().execute_model(scheduled, more=3) == 3
    assert Runner().execute_model("no output of a scheduler", 4) == 4
    assert noted == ["decode", "mixed"]


def test_layers_are_numbered_by_their_names() -> None:
    named = [SimpleNamespace(layer_name=f"model.layers.{n}.mlp.experts") for n in (3, 4, 7)]

    assert layer_numbers(named, 3) == (3, 4, 7)
    assert layer_numbers(named[:1] * 3, 3) == (0, 1, 2)
    assert layer_numbers([object()] * 2, 2) == (0, 1)


def joined(facts: list[str]) -> list[object]:
    """What each rank gets."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=NEVER_S))

    def run(rank: int) -> object:
        try:
            return join(store, "ep", rank, len(facts), facts[rank], NEVER_S)
        except RankError as exc:
            return str(exc)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(run, range(len(facts))))


def test_ranks_with_the_same_facts_share_one_run() -> None:
    first, *others = joined(["v1", "v1", "v1"])

    assert others == [first, first]


def test_missing_rank_is_named_on_all_others() -> None:
    store = dist.HashStore()
    store.set(f"{PREFIX}/ep/2", "v1")  # rank 2 is there already

    for rank in (0, 2):
        with pytest.raises(RankError, match=rf"^rank {rank}: ranks \[1\] of 3"):
            join(store, "ep", rank, 3, "v1", 0.001)


def test_rank_with_other_facts_is_named_on_all() -> None:
    found = joined(["v1", "v1", "v2"])

    assert all("rank 2 has v2, rank 0 has v1" in str(one) for one in found)
