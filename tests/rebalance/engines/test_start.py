"""The agreement of all ranks at the start, by a key-value store and no collective."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from eplb.errors import ConfigError, RankError
from rebalance.engines.common import start
from rebalance.engines.common.start import PREFIX, EngineGroup, Joined, group_of, join
from tests.support.limits import NEVER_S


def joined(facts: list[str], refusals: dict[int, str] | None = None) -> list[object]:
    """What each rank gets."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=NEVER_S))

    def run(rank: int) -> object:
        try:
            return join(
                "vllm",
                store,
                "ep",
                rank,
                len(facts),
                group=EngineGroup("pp1"),
                facts=facts[rank],
                deadline_s=NEVER_S,
                refusal=(refusals or {}).get(rank, ""),
            )
        except RankError as exc:
            return str(exc)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(run, range(len(facts))))


def test_ranks_with_the_same_facts_share_one_run() -> None:
    first, *others = joined(["v1", "v1", "v1"])

    assert others == [first, first]
    assert isinstance(first, Joined)
    assert first.run.startswith("vllm-pp1-")


def test_missing_rank_is_named_on_all_others() -> None:
    store = dist.HashStore()
    store.set(f"{PREFIX}/ep/2", "v1")  # rank 2 is there already

    for rank in (0, 2):
        with pytest.raises(RankError, match=rf"^rank {rank}: ranks \[1\] of 3"):
            join("vllm", store, "ep", rank, 3, group=EngineGroup(), facts="v1", deadline_s=0.001)


def test_rank_that_waits_says_for_whom_and_goes_on_once_they_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "PATIENCE_S", 0.01)
    store = dist.HashStore()
    store.set(f"{PREFIX}/ep/2", "v1")

    def run(rank: int) -> Joined:
        group, facts = EngineGroup(), "v1"
        return join("vllm", store, "ep", rank, 3, group=group, facts=facts, deadline_s=NEVER_S)

    with ThreadPoolExecutor(2) as pool, caplog.at_level("WARNING"):
        first = pool.submit(run, 0)
        while not caplog.messages:
            time.sleep(0.01)
        second = pool.submit(run, 1)

        assert first.result() == second.result()
    waits = "rank 0 of 3 has loaded its weights and waits for rank 1, at most"
    assert [waits in text for text in caplog.messages] == [True]


def test_rank_with_other_facts_is_named_on_all() -> None:
    found = joined(["v1", "v1", "v2"])

    assert all(
        "rank 2 has group 'pp1', v2, rank 0 has group 'pp1', v1" in str(one) for one in found
    )


def test_rank_that_refuses_is_named_on_all() -> None:
    found = joined(["v1", "v1", "v1"], {1: "no expert weights"})

    assert all("rank 1 refuses: no expert weights" in str(one) for one in found)


def test_only_group_of_an_engine_has_no_name() -> None:
    assert group_of({}, dp=(0, 1), pp=(0, 1)) == EngineGroup()


def test_group_is_named_by_engine_replica_and_stage() -> None:
    found = group_of({"EPLB_GROUP": "a"}, dp=(1, 2), pp=(0, 2))

    assert found == EngineGroup(
        "a-dp1-pp0", "a", ("a-dp0-pp0", "a-dp0-pp1", "a-dp1-pp0", "a-dp1-pp1")
    )
    assert group_of({}, pp=(1, 2)) == EngineGroup("pp1", "", ("pp0", "pp1"))
    assert group_of({"EPLB_GROUP": "a"}) == EngineGroup("a", "a", ("a",))


def test_group_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="EPLB_GROUP is 'a/b', expected a name"):
        group_of({"EPLB_GROUP": "a/b"})
