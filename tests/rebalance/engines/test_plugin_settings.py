from __future__ import annotations

from pathlib import Path

import pytest

from eplb.errors import ConfigError
from rebalance.engines.common.plugin_settings import settings_of
from rebalance.engines.vllm.plugin import load
from tests.support.documents import files_of


def named(text: str, folder: Path) -> dict[str, str]:
    file = folder / "eplb.toml"
    file.write_text(text, encoding="utf-8")
    return {"EPLB_CONFIG": str(file)}


def test_settings_of_others_are_left_to_them_and_variables_are_not_read(tmp_path: Path) -> None:
    environ = named("[deployment]\nname='d'\n[http]\nprot=1\n[new]\nx=2", tmp_path)

    found = settings_of(environ | {"EPLB_PHASE": "decode", "EPLB_NO_SETTING": "1"})

    assert found is not None
    assert found.engine.phase == "auto"


def test_plugin_without_a_deployment_is_inert() -> None:
    assert settings_of({}) is None
    assert load({}) is False


def test_settings_come_from_the_file_of_the_deployment(tmp_path: Path) -> None:
    text = """
        [deployment]
        name = "prod"
        store = "redis://10.0.0.7"
        [telemetry]
        sample_steps = 4
        [engine]
        phase = "decode"
        max_moved = 1
    """
    found = settings_of(named(text, tmp_path))

    assert found is not None
    assert (found.deployment.name, found.deployment.store) == ("prod", "redis://10.0.0.7")
    assert found.telemetry.sample_steps == 4
    assert (found.engine.phase, found.engine.max_moved) == ("decode", 1.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no deployment.name, expected the name of a deployment"),
        ("[deployment", "is not TOML"),
        (
            "[deployment]\nname='d'\n[engine]\nrecords_gb=24.0",
            "engine.records_gb in .* was removed: engine.records keeps them",
        ),
        (
            "[deployment]\nname='d'\n[engine]\nrecords_dir='x'",
            "engine.records_dir in .* was removed: it is host_cache.record_folder",
        ),
        (
            "[deployment]\nname='d'\n[engine]\nphases='x'",
            "'engine.phases' in .*: engine.phase",
        ),
        ("[deployment]\nname='d'\n[engine]\nphase='x'", "phase is 'x' in .*, expected 'auto', "),
        ("[deployment]\nname='d'\n[engine]\nshares='few'", "shares is 'few' in .* true or false"),
        ("[deployment]\nname='d'\n[engine]\nmax_moved=2.0", "max_moved is 2.0 in .* at most 1"),
        ("[deployment]\nname='d'\n[telemetry]\nsample_steps=5", "expected a divisor"),
        ("deployment = 3", "deployment is 3 in .*, expected a table"),
    ],
)
def test_wrong_file_is_refused_with_a_sentence(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        settings_of(named(text, tmp_path))


def test_file_that_is_missing_leaves_the_engine_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load({"EPLB_CONFIG": str(tmp_path / "none.toml")}) is False
    assert "cannot be read" in caplog.text


def test_file_on_the_page_is_one_that_the_plugin_reads(tmp_path: Path) -> None:
    found = settings_of(named(files_of("docs/engines-vllm.md")["eplb.toml"], tmp_path))

    assert found is not None
    assert (found.deployment.name, found.engine.phase) == ("deepseek-decode", "auto")
