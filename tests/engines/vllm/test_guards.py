"""A plug-in that is refused, or that cannot be installed, leaves vLLM as it was."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from vllm.distributed.eplb import eplb_state, policy, rebalance_execute

from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.vllm import entry
from rebalance.engines.vllm.hooks import install
from rebalance.engines.vllm.process import PluginProcess
from tests.support.engines.gauge import value_of

WRAPPED = (
    (rebalance_execute, "move_to_buffer"),
    (eplb_state, "_commit_eplb_maps"),
    (eplb_state, "_commit_eplb_maps_for_layer"),
    (eplb_state.EplbState, "add_model"),
    (eplb_state.EplbState, "step"),
)
Check = Callable[[], str]


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Check:
    """Load the plug-in, check that nothing of vLLM was changed, and return what was logged."""
    file = tmp_path / "eplb.toml"
    file.write_text("[deployment]\nname = 'prod'\n", encoding="utf-8")
    monkeypatch.setattr(entry, "_loaded", [])

    def check() -> str:
        before = [getattr(owner, name, None) for owner, name in WRAPPED]
        policies = dict(policy.EPLB_POLICIES)
        assert not entry.load({"EPLB_CONFIG": str(file)})
        assert [getattr(owner, name, None) for owner, name in WRAPPED] == before
        assert policies == policy.EPLB_POLICIES
        assert value_of("vllm", "plugin") == 0.0
        (record,) = [one for one in caplog.records if "not loaded" in one.getMessage()]
        return record.getMessage()

    return check


def test_failed_installation_puts_back_what_it_has_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(eplb_state.EplbState, "step")  # the last one to be wrapped
    before = [getattr(owner, name, None) for owner, name in WRAPPED]
    policies = dict(policy.EPLB_POLICIES)

    with pytest.raises(AttributeError, match="step"):
        install(PluginProcess(PluginSettings()))

    assert [getattr(owner, name, None) for owner, name in WRAPPED] == before
    assert policies == policy.EPLB_POLICIES


@pytest.mark.parametrize("fails_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("own_fails", [False, True], ids=["own", "own raises"])
def test_failure_of_the_plugin_in_a_wrapper_leaves_vllms_own_call(
    fails_before: bool, own_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def step(state: object, *given: object, **named: object) -> str:
        calls.append((given, named))
        if own_fails:
            raise KeyError("vLLM's")
        return "vLLM's"

    process = PluginProcess(PluginSettings())
    monkeypatch.setattr(eplb_state.EplbState, "step", step)
    monkeypatch.delattr(PluginProcess, "before_step" if fails_before else "after_step")
    put_back = install(process)
    state = eplb_state.EplbState.__new__(eplb_state.EplbState)
    try:
        if own_fails:
            with pytest.raises(KeyError, match="vLLM's"):
                state.step(True)
        else:
            assert state.step(True) == "vLLM's"
    finally:
        put_back()

    assert len(calls) == 1, "once, whatever failed"


def test_second_policy_of_vllm_is_refused(refusal: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy.EPLB_POLICIES, "other", policy.EPLB_POLICIES["default"])

    assert "vLLM's policies are ['default', 'other'], expected 'default' alone" in refusal()


def test_second_table_of_policies_is_refused(
    refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eplb_state, "EPLB_POLICIES", dict(policy.EPLB_POLICIES))

    assert "another table of policies" in refusal()


def test_other_release_is_refused(refusal: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.2")

    assert "vllm is 0.30.2, expected 0.31 or newer: 0.31 to 0.33 were tested" in refusal()


def test_function_that_another_package_has_replaced_is_refused(
    refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Any, is_dummy: bool, is_profile: bool, log_stats: bool) -> None:
        """As vLLM's, of another package."""

    monkeypatch.setattr(eplb_state.EplbState, "step", step)

    assert f"EplbState.step is that of {__file__}, expected vllm's own" in refusal()
