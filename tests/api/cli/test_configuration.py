"""The tree of settings: its names, its reference page, and the components that it fills."""

import re
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.access.audit import Audit, local_actor
from api.cli.main import app
from api.config.live import static_layer
from api.config.reference import reference_page
from api.config.tree import Settings
from api.config.tree import load as load_tree
from api.deploy.deployment import Deployment
from api.deploy.first_placement import ensure_first_placement
from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from eplb.errors import ConfigError
from rebalance.assembly.config import RankConfig
from rebalance.controller.loop import ControllerSettings
from rebalance.engines.common.plugin_settings import EngineSettings, settings_of
from rebalance.stage.stage_settings import StageBudgets, StageSettings
from telemetry import open_store
from telemetry.load.pruning import Retention
from telemetry.load.reporter import Tempo
from telemetry.state.live import SWITCHES, Control
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.deployments import deployment_in
from tests.support.repository import ROOT

OF_DEMO = ["--config", ".eplb/settings.toml"]
PAGE = ROOT / "docs" / "configuration.md"
# Names without a section that people have written into files.
OLD_NAMES = """
    device precision nodes layers experts top_k spare_slots
    host_cache_records record_file hidden intermediate
    policy observe movement host port
    state_dir store spool_dir spool_mb store_interval window_seconds keep_samples_s
    keep_minutes_s keep_hours_s keep_events lease_ttl_s pay_back_s plan_windows
    restart_after_death process_restarts restart_delay_s hung_after_s
    scrub_every_steps plan_deadline_s vote_deadline_s metrics_level
"""


def load(named: dict[str, Any] | None = None, **environ: str) -> Settings:
    return load_tree({}, config=None, environ=environ, named=named)


def test_settings_of_a_demo_s_folder_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPLB_CONFIG", raising=False)
    before = CliRunner().invoke(app, ["config"])
    file = tmp_path / ".eplb" / "settings.toml"
    file.parent.mkdir(mode=0o700)
    file.write_text("[topology]\nranks_per_node = 4\n")
    told, named = (CliRunner().invoke(app, ["config", *words]) for words in ([], OF_DEMO))

    assert (before.exit_code, before.stderr) == (0, "")
    assert told.stderr == (
        "note: a demo ran in this folder by other settings: eplb config --config "
        ".eplb/settings.toml\n"
    )
    assert (named.exit_code, named.stderr) == (0, "")
    assert "ranks_per_node = 4" in named.stdout


def refusal(named: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(named, **environ)
    return str(caught.value)


def deployment_of(tmp_path: Path, named: dict[str, Any]) -> Deployment:
    return deployment_in(tmp_path, **{name.replace(".", "__"): one for name, one in named.items()})


def test_reference_page_is_what_the_code_writes() -> None:
    assert reference_page() == PAGE.read_text(encoding="utf-8"), (
        "write it again: eplb config --reference > docs/configuration.md"
    )


def test_example_of_the_reference_page_loads(tmp_path: Path) -> None:
    example = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "eplb.toml"
    file.write_text(example)

    settings = load_tree({}, config=file, environ={})

    assert (settings.model.layers, settings.controller.policy) == (4, "greedy")
    assert (settings.host_cache.records, settings[EngineSettings].records) == (64, "auto")


def test_every_setting_has_a_meaning_and_the_store_is_the_only_secret() -> None:
    known = Settings.known.values()

    assert all(one.about.text for one in known)
    assert [one.path for one in known if one.about.secret] == ["deployment.store"]


def test_live_settings_have_names_of_their_own_and_values_a_store_holds() -> None:
    live = [one.name for one in Settings.known.values() if one.about.live]

    assert len(set(live)) == len(live)
    assert {*SWITCHES, "stage", "pay_back_s"} <= set(live)
    assert all(isinstance(one, bool | int | float | str) for one in static_layer(load()).values())


@pytest.mark.parametrize("name", OLD_NAMES.split())
def test_name_without_section_stands_for_one_setting(name: str) -> None:
    assert Settings.names[name].short == name


def test_full_name_works_in_file_environment_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("[host_cache]\nrecords = 3\n[log]\nlevel = 'info'\n")
    environ = {"EPLB_STAGING__LOCAL_BYTES_PER_SECOND": "1e9", "EPLB_LOG_FORMAT": "json"}

    settings = load_tree({}, config=file, environ=environ, named={"planner.max_moves": "7"})

    assert settings.host_cache.records == 3
    assert (settings.log.level, settings.log.format) == ("info", "json")
    assert settings.staging.local_bytes_per_second == 1e9
    assert settings[Budget].max_moves == 7


def test_name_of_several_settings_is_refused_with_their_full_names() -> None:
    by_flag, by_variable = refusal({"records": "1"}), refusal(EPLB_RECORDS="1")

    assert by_flag.endswith(": host_cache.records, engine.records")
    assert by_variable.endswith(": EPLB_HOST_CACHE__RECORDS, EPLB_ENGINE__RECORDS")


def test_setting_without_short_name_is_reported_by_its_full_name() -> None:
    found = refusal(EPLB_ENGINE__RECORDS="no")

    assert found.startswith("engine.records is 'no' in ")
    assert "variable EPLB_ENGINE__RECORDS" in found


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("host_cache.other_hosts", "a host brings an expert from a GPU of its own"),
        ("transport.silence_s", "experts do not travel between hosts, expected none"),
        ("network.tls_ca_file", "http.tls_certificate_file"),
        ("host_cache.mode", "expected host_cache.records alone"),
    ],
)
def test_setting_that_left_is_refused_with_what_to_use_instead(
    tmp_path: Path, name: str, instead: str
) -> None:
    section, _, key = name.partition(".")
    file = tmp_path / "eplb.toml"
    file.write_text(f"[deployment]\nname = 'west'\n[{section}]\n{key} = 'x'\n")
    variable = f"EPLB_{section}__{key}".upper()

    for found in (refusal({name: "x"}), refusal(**{variable: "x"})):
        assert "is no setting any more" in found
        assert instead in found
    with pytest.raises(ConfigError, match=rf"'{name}' in {file} is no setting any more"):
        load_tree({}, config=file, environ={})
    with pytest.raises(ConfigError, match=rf"'{name}' in {file} is no setting any more"):
        settings_of({"EPLB_CONFIG": str(file)})  # of a plug-in


def test_setting_under_both_names_in_one_place_is_refused() -> None:
    assert "'layers' and as 'model.layers'" in refusal({"layers": "4", "model.layers": "2"})


def test_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("planner = 'greedy'\n")

    with pytest.raises(ConfigError) as caught:
        load_tree({}, config=file, environ={})

    assert str(caught.value) == f"planner is 'greedy' in {file}, expected a table [planner]"


def test_store_url_with_a_password_is_refused_without_showing_it() -> None:
    found = refusal({"store": ["redis://u:geheim@h:1"]})

    assert found.endswith("in --setting store, expected text")
    assert "geheim" not in found


def test_default_settings_are_the_defaults_of_every_component(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, {})
    description = deployment.description()

    config = description.config
    usual = RankConfig("demo", config.sample_steps, config.staging_experts)
    for name in ("vote_every", "vote_deadline_s", "plan_deadline_s", "scrub_every_steps"):
        assert getattr(config, name) == getattr(usual, name), name
    assert config.stage == StageSettings()
    assert StageBudgets().on("cuda") == StageSettings.while_serving()
    controller = deployment.controller
    assert controller == ControllerSettings(pace=controller.pace, stage="observe")


def test_settings_reach_the_components(tmp_path: Path) -> None:
    deployment = deployment_of(
        tmp_path,
        {
            "vote_every": "3",
            "plan_deadline_s": "2.5",
            "keep_hours_s": "240",
            "policy": "greedy",
            "max_moves": "5",
            "interval_s": "60",
            "min_domains": "2",
            "state_interval": "0.75",
            "spool_mb": "3",
            "local_bytes_per_second": "2000",
        },
    )

    config, controller = deployment.description().config, deployment.controller
    assert (config.vote_every, config.plan_deadline_s, config.reporting.spool_mb) == (3, 2.5, 3)
    assert config.reporting.tempo == Tempo(0.0, 0.75)
    assert controller.retention == Retention(keep_hours_s=240.0)
    assert (controller.policy, controller.budget.max_moves) == ("greedy", 5)
    assert (controller.triggers.interval_s, controller.request.min_domains) == (60.0, 2)
    stage, usual = config.stage_on("cpu"), StageSettings()
    assert (stage.peer.bytes_per_second, stage.host.bytes_per_second) == (2000.0, 2000.0)
    assert (stage.peer.chunk_bytes, stage.in_flight) == (usual.peer.chunk_bytes, usual.in_flight)


def test_config_command_prints_values_their_places_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("[model]\nlayers = 3\n")
    monkeypatch.setenv("EPLB_STORE", "redis://ops:geheim@store:6379/1")

    given = ["config", "--config", str(file), "--setting", "experts=9"]
    result = CliRunner().invoke(app, given)

    assert result.exit_code == 0, result.output
    values = tomllib.loads(result.output)
    assert (values["model"]["layers"], values["model"]["experts"]) == (3, 9)
    assert values["deployment"]["store"] == "redis://ops@store:6379/1"
    lines = [line.split() for line in result.output.splitlines()]
    assert ["layers", "=", "3", "#", str(file)] in lines
    assert ["experts", "=", "9", "#", "--setting", "experts"] in lines
    assert ["ranks_per_node", "=", "8", "#", "default"] in lines
    assert "geheim" not in result.output
    assert set(values) == set(Settings.sections)


@pytest.mark.parametrize(
    ("pair", "found"),
    [
        ("layers", "--setting is 'layers'"),
        ("layers=x", "layers is 'x' in --setting layers"),
        ("log.level=loud", "log_level is 'loud' in --setting log.level"),
    ],
)
def test_config_command_refuses_a_wrong_value_in_one_line(pair: str, found: str) -> None:
    result = CliRunner().invoke(app, ["config", "--setting", pair])

    assert result.exit_code == 2
    assert result.stderr.startswith(f"eplb: {found}")
    assert result.stderr.count("\n") == 1


# -- live settings


def started(path: Path) -> StateStore:
    store = open_store(path, "demo")
    store.begin_run(RunInfo("run-1", 1.0, {}, {}, 4))
    store.set_static(static_layer(load()), reason="start")
    return store


def live_config(path: Path, *given: str) -> Result:
    return CliRunner().invoke(app, ["config", "--live", "--store", str(path), *given])


def test_live_config_prints_value_source_and_revision(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(started(path)) as store:
        store.change_live({"movement": False}, reason="incident 7")

        result = live_config(path)

    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == "# live settings of deployment demo, revision 2"
    values = tomllib.loads(result.output)
    assert values["controller"]["movement"] is False
    assert values["planner"]["pay_back_s"] == CostModel.pay_back_s
    (line,) = [line for line in result.output.splitlines() if line.startswith("movement")]
    assert re.search(r"# live, revision 2, .* UTC: incident 7; static: true$", line)


def test_live_config_changes_a_setting_and_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(started(path)) as store:
        given = ["--set", "planner.pay-back-s=300", "--set", "observe=true", "--reason", "look"]
        assert live_config(path, *given).exit_code == 0
        assert store.live().live == {"pay_back_s": 300.0, "observe": True}
        assert store.live().changes["observe"].reason == "look"

        assert live_config(path, "--unset", "pay_back_s").exit_code == 0
        assert store.live().live == {"observe": True}
    entries = list(Audit(tmp_path).entries())
    assert [one.outcome for one in entries] == ["asked", "done"] * 2
    assert [(one.action, one.reason, one.actor) for one in entries[::2]] == [
        (
            "config --live pay_back_s 240.0 -> 300.0, observe false -> true",
            "look",
            local_actor(),
        ),
        ("config --live pay_back_s 300.0 -> 240.0", "changed from the command line", local_actor()),
    ]


def test_live_config_that_cannot_be_audited_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(started(path)) as store:
        (tmp_path / "audit.jsonl").mkdir()

        result = live_config(path, "--set", "observe=true")

        assert (result.exit_code, "cannot be written" in result.output) == (2, True)
        assert store.live().live == {}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--live", "--set", "pay_back_s"], "--set is 'pay_back_s'"),
        (["--live", "--set", "pay_back_s=-1"], "pay_back_s is '-1' in --set pay_back_s"),
        (["--live", "--set", "policy=best"], "unknown policy 'best'"),
        (["--live", "--set", "port=1"], "--set port is no live setting"),
        (["--live", "--unset", "nosuch"], "--set nosuch is no live setting"),
        (["--set", "observe=true"], "--set and --unset"),
    ],
)
def test_live_config_refuses_a_wrong_change_in_one_line(
    tmp_path: Path, given: list[str], found: str
) -> None:
    path = tmp_path / "store.sqlite"
    with closing(started(path)) as store:
        result = CliRunner().invoke(app, ["config", "--store", str(path), *given])

        assert (result.exit_code, store.live().revision) == (2, 1)
    assert result.stderr.startswith(f"eplb: {found}")
    assert result.stderr.count("\n") == 1


def test_start_of_a_paused_deployment_stays_paused_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store(tmp_path / "store.sqlite", "demo")) as store:
        ensure_first_placement(store, deployment_of(tmp_path, {}), "a test")
        store.change_live({"movement": False, "pay_back_s": 5.0}, reason="incident 7")

        ensure_first_placement(store, deployment_of(tmp_path, {"max_moves": 7}), "a test")

        assert store.control() == Control(movement=False)
        assert store.live().effective["pay_back_s"] == 5.0
    words = "live setting: movement is false (revision 2,"
    assert [words in record.message for record in caplog.records] == [True, False]
    assert "incident 7), which wins over the setting true" in caplog.text
