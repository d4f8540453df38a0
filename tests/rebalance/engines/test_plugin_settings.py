from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from api.config.tree import Settings
from eplb.errors import ConfigError
from rebalance.engines.common.plugin_settings import PluginSettings, settings_of
from rebalance.engines.vllm.entry import load
from tests.support.documents import files_of
from tests.support.packages import packages_without
from tests.support.repository import ROOT


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
            "[deployment]\nname='d'\n[engine]\nphases='x'",
            "'engine.phases' in .*: engine.phase",
        ),
        ("[deployment]\nname='d'\n[engine]\nphase='x'", "phase is 'x' in .*, expected 'auto', "),
        ("[deployment]\nname='d'\n[engine]\nshares='few'", "shares is 'few' in .* true or false"),
        ("[deployment]\nname='d'\n[engine]\nmax_moved=2.0", "max_moved is 2.0 in .* at most 1"),
        ("[deployment]\nname='d'\n[telemetry]\nsample_steps=5", "expected a divisor"),
        ("[deployment]\nname='d'\nstor='x'", "'deployment.stor' in .*: .*deployment.store"),
        (
            "[deployment]\nname='d'\n[telemetry]\nsample_step=4",
            "'telemetry.sample_step' in .*: .*telemetry.sample_steps",
        ),
        ("[deployment]\nname='d'\n[engines]\ntap=true", "'engines.tap' in .*: .*engine.tap"),
        ("deployment = 3", "deployment is 3 in .*, expected a table"),
    ],
)
def test_wrong_file_is_refused_with_a_sentence(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        settings_of(named(text, tmp_path))


def test_settings_of_the_commands_are_no_misspelt_ones(tmp_path: Path) -> None:
    others = [path for path in Settings.known if path not in PluginSettings.known]
    text = "\n".join(f"{path} = 1" for path in others if not path.startswith("engine."))

    assert settings_of(named(f"deployment.name = 'd'\n{text}", tmp_path)) is not None


LOADS = """
import os, sys
from rebalance.engines.vllm.entry import register
register()
"""


def test_log_of_a_plugin_has_a_prefix_in_a_process_that_configures_none(tmp_path: Path) -> None:
    environ = os.environ | named("[deployment]\nname='d'\n[engine]\ntaps=true", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", LOADS], env=environ, cwd=ROOT, capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr
    assert re.match(r"EPLB ERROR .* the EPLB plug-in is not loaded: unknown key", ended.stderr)


@pytest.mark.parametrize(
    ("library", "store"),
    [
        ("scipy", "sqlite:store"),
        ("numba", "sqlite:store"),
        ("zstandard", "sqlite:store"),
        ("redis", "redis://10.0.0.7"),
    ],
)
def test_plugin_without_a_library_is_refused_when_it_is_loaded(
    library: str, store: str, tmp_path: Path
) -> None:
    environ = os.environ | named(f"[deployment]\nname='d'\nstore='{store}'", tmp_path)
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{packages_without(library, tmp_path / 'packages')}"
    ended = subprocess.run(
        [sys.executable, "-S", "-c", LOADS], env=environ, cwd=ROOT, capture_output=True, text=True
    )

    (line,) = [one for one in ended.stderr.splitlines() if one.startswith("EPLB")]
    assert line.endswith(
        f"the EPLB plug-in is not loaded: {library}: not installed here, expected: "
        f"pip install {library}"
    )


def test_process_without_a_deployment_logs_nothing() -> None:
    environ = {name: text for name, text in os.environ.items() if name != "EPLB_CONFIG"}
    ended = subprocess.run(
        [sys.executable, "-c", LOADS], env=environ, cwd=ROOT, capture_output=True, text=True
    )

    assert (ended.returncode, ended.stderr) == (0, "")


def test_file_that_is_missing_leaves_the_engine_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load({"EPLB_CONFIG": str(tmp_path / "none.toml")}) is False
    assert "cannot be read" in caplog.text


def test_file_on_the_page_is_one_that_the_plugin_reads(tmp_path: Path) -> None:
    found = settings_of(named(files_of("docs/engines.md")["eplb.toml"], tmp_path))

    assert found is not None
    assert (found.deployment.name, found.engine.phase) == ("deepseek-decode", "auto")
