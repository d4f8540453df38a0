"""Each assumption about vLLM, broken on its own: the plug-in is refused and vLLM left as it was."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import linecache
import pkgutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

import vllm
from vllm.distributed.eplb import eplb_communicator, eplb_state, policy

from rebalance.engines.common.gauge import value_of
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.vllm import guards, plugin
from rebalance.engines.vllm.guards import ASSUMED
from rebalance.engines.vllm.hooks import install
from rebalance.engines.vllm.process import PluginProcess

WRAPPED = (
    (eplb_state, "create_eplb_communicator"),
    (eplb_communicator, "create_eplb_communicator"),
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
    monkeypatch.setattr(plugin, "_loaded", [])

    def check() -> str:
        before = [getattr(owner, name, None) for owner, name in WRAPPED]
        policies = dict(policy.EPLB_POLICIES)
        assert not plugin.load({"EPLB_CONFIG": str(file)})
        assert [getattr(owner, name, None) for owner, name in WRAPPED] == before
        assert policies == policy.EPLB_POLICIES
        assert value_of("vllm", "plugin") == 0.0
        (record,) = [one for one in caplog.records if "not loaded" in one.getMessage()]
        return record.getMessage()

    return check


def owner_of(path: str) -> tuple[Any, str]:
    """The object that has the last part of a path as its attribute."""
    owner, _, last = path.rpartition(".")
    return pkgutil.resolve_name(owner), last


@pytest.mark.parametrize("path", list(ASSUMED.signatures))
def test_changed_signature_is_refused(
    path: str, refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*owner_of(path), lambda another: None)

    assert f"{path} takes (another), expected (" in refusal()


@pytest.mark.parametrize("path", list(ASSUMED.signatures))
def test_missing_function_is_refused(
    path: str, refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(*owner_of(path))

    assert f"{path} does not exist, expected as in vllm 0.33." in refusal()


@pytest.mark.parametrize(
    ("path", "line"), [(path, line) for path, lines in ASSUMED.lines.items() for line in lines]
)
def test_changed_line_is_refused(
    path: str, line: str, refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, last = owner_of(path)
    source = textwrap.dedent(inspect.getsource(getattr(owner, last)))
    changed = source.replace(line, f"{line[:3]}x{line[3:]}")
    assert changed != source
    file = f"<changed {path}>"
    monkeypatch.setitem(
        linecache.cache, file, (len(changed), None, changed.splitlines(keepends=True), file)
    )
    space: dict[str, Any] = dict(vars(inspect.getmodule(getattr(owner, last))))
    exec(compile(changed, file, "exec"), space)
    monkeypatch.setattr(owner, last, space[last])

    assert f"{path} lacks {line!r}" in refusal()


@pytest.mark.parametrize("name", " ".join(ASSUMED.fields.values()).split())
def test_missing_field_is_refused(
    name: str, refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [f.name for f in dataclasses.fields(eplb_state.EplbModelState) if f.name != name]
    monkeypatch.setattr(eplb_state, "EplbModelState", dataclasses.make_dataclass("State", kept))

    assert f"EplbModelState has no field {name}" in refusal()


@pytest.mark.parametrize(
    ("file", "line"), [(file, line) for file, lines in ASSUMED.files.items() for line in lines]
)
def test_changed_file_that_is_not_imported_is_refused(
    file: Path, line: str, refusal: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (Path(vllm.__file__).parent / file).read_text(encoding="utf-8")
    changed = tmp_path / file.name
    changed.write_text(source.replace(line, "another rule"), encoding="utf-8")
    monkeypatch.setattr(guards, "ASSUMED", dataclasses.replace(ASSUMED, files={changed: (line,)}))

    assert f"{file.name} lacks {line!r}" in refusal()


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


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0", "1.0.0"])
def test_other_release_is_refused(
    version: str, refusal: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    assert f"vllm is {version}, expected 0.33." in refusal()
