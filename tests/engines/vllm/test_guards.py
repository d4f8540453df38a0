"""A plug-in that is refused, or that cannot be installed, leaves vLLM as it was."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

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


def test_second_policy_of_vllm_is_refused(refusal: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy.EPLB_POLICIES, "other", policy.EPLB_POLICIES["default"])

    assert "vLLM's policies are ['default', 'other'], expected 'default' alone" in refusal()


def test_second_table_of_policies_is_refused(
    refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eplb_state, "EPLB_POLICIES", dict(policy.EPLB_POLICIES))

    assert "another table of policies" in refusal()


def test_other_release_is_refused(refusal: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.0")

    assert "vllm is 0.34.0, expected 0.33." in refusal()
