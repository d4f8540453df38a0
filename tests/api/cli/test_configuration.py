"""The tree of settings: its names, its reference page, and the components that it fills."""

import re
import tomllib
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.access.audit import Audit
from api.access.local import local_actor
from api.cli.main import app
from api.config.fields import about
from api.config.live import static_layer
from api.config.loader import load_settings
from api.config.migration import HostLink, Staging, Transport
from api.config.reference import reference_page
from api.config.tree import Settings, known_names, known_settings
from api.demo.setup import begin, prepare
from api.demo.state_dir import StateDir
from api.demo.workers.plan import WorkerPlan
from api.http.limits import HttpLimits
from api.processes.supervision import SupervisionSettings
from eplb.decision.gate import CostModel
from eplb.errors import ConfigError
from rebalance.build.rank import agent_settings
from rebalance.controller.loop import ControllerSettings
from rebalance.rank.parts import AgentSettings
from rebalance.stage.stage_settings import StageSettings
from rebalance.weights.link.host_link_settings import HostLinkSettings
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from telemetry import open_store
from telemetry.load.pruning import Retention
from telemetry.load.reporter import Tempo
from telemetry.state.live import Control, LiveSettings
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "configuration.md"
SMALL = {
    "layers": 1,
    "experts": 8,
    "top_k": 2,
    "hidden": 8,
    "intermediate": 8,
    "other_hosts": "off",
}

# Every name that `eplb demo` has ever had as a setting. None of them may stop working.
OLD_NAMES = """
    device precision dispatcher nodes ranks layers experts top_k slots spare_slots host_cache_mode
    host_cache_records other_hosts record_file hidden intermediate shared_experts tokens_per_rank
    window_tokens seconds text trace seed policy observe movement join serve host port json_path
    state_dir store spool_dir spool_mb store_interval window_seconds keep_samples_s
    keep_minutes_s keep_hours_s keep_events lease_ttl_s pay_back_s plan_windows resume
    restart_after_death process_restarts restart_window_s restart_delay_s hung_after_s
    scrub_every_steps plan_deadline_s vote_deadline_s check_every metrics_level view
"""


def load(named: dict[str, Any] | None = None, **environ: str) -> Settings:
    return load_settings({}, config=None, environ=environ, named=named)


def refusal(named: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(named, **environ)
    return str(caught.value)


def plan_of(tmp_path: Path, named: dict[str, Any]) -> WorkerPlan:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    with closing(StateDir(tmp_path / "state")) as state:
        return prepare(load(SMALL | {"text": [text]} | named), state)


def test_reference_page_is_what_the_code_writes() -> None:
    assert reference_page() == PAGE.read_text(encoding="utf-8"), (
        "write it again: eplb config --reference > docs/configuration.md"
    )


def test_example_of_the_reference_page_loads(tmp_path: Path) -> None:
    example = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "eplb.toml"
    file.write_text(example)

    settings = load_settings({}, config=file, environ={})

    found = settings.demo.ranks, settings.planner.policy, settings.host_link.deadline_s
    assert found == (4, "greedy", 5.0)
    assert settings.transport.deadline_s == RankLinkSettings.deadline_s


def plain(annotation: Any) -> Any:
    """The type that a store keeps; a choice is text to it."""
    return str if get_origin(annotation) is Literal else annotation


def test_every_setting_has_a_meaning_and_live_ones_are_in_the_store() -> None:
    known = known_settings().values()

    assert all(one.field.description for one in known)
    assert {one.name: plain(one.field.annotation) for one in known if one.is_live} == {
        name: get_args(hint)[0] for name, hint in get_type_hints(LiveSettings).items()
    }
    assert [one.path for one in known if about(one.field, "secret")] == ["deployment.store"]


@pytest.mark.parametrize("name", OLD_NAMES.split())
def test_name_without_section_stands_for_one_setting(name: str) -> None:
    assert known_names()[name].short == name


def test_full_name_works_in_file_environment_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("[host_cache]\nmode = 'ring'\nrecords = 3\n[log]\nlevel = 'info'\n")
    environ = {"EPLB_TRANSPORT__DEADLINE_S": "1.5", "EPLB_LOG_FORMAT": "json"}

    settings = load_settings({}, config=file, environ=environ, named={"planner.max_moves": "7"})

    assert (settings.host_cache.mode, settings.host_cache.records) == ("ring", 3)
    assert (settings.log.level, settings.log.format) == ("info", "json")
    assert (settings.transport.deadline_s, settings.planner.max_moves) == (1.5, 7)


def test_name_of_several_settings_is_refused_with_their_full_names() -> None:
    by_flag, by_variable = refusal({"deadline_s": "1"}), refusal(EPLB_DEADLINE_S="1")

    assert by_flag.endswith(": transport.deadline_s, host_link.deadline_s")
    assert by_variable.endswith(": EPLB_TRANSPORT__DEADLINE_S, EPLB_HOST_LINK__DEADLINE_S")


def test_setting_without_short_name_is_reported_by_its_full_name() -> None:
    found = refusal(EPLB_HOST_LINK__DEADLINE_S="0")

    assert found.startswith("host_link.deadline_s is '0' in ")
    assert "variable EPLB_HOST_LINK__DEADLINE_S" in found


def test_setting_under_both_names_in_one_place_is_refused() -> None:
    assert "'ranks' and as 'demo.ranks'" in refusal({"ranks": "4", "demo.ranks": "2"})


def test_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("planner = 'greedy'\n")

    with pytest.raises(ConfigError) as caught:
        load_settings({}, config=file, environ={})

    assert str(caught.value) == f"planner is 'greedy' in {file}, expected a table [planner]"


def test_store_url_with_a_password_is_refused_without_showing_it() -> None:
    found = refusal({"store": ["redis://u:geheim@h:1"]})

    assert found.endswith("in --setting store, expected text")
    assert "geheim" not in found


def defaults_of(kind: type) -> dict[str, Any]:
    return {one.name: one.default for one in fields(kind) if one.default is not MISSING}


@pytest.mark.parametrize(
    ("section", "kind"), [(Transport, RankLinkSettings), (HostLink, HostLinkSettings)]
)
def test_link_section_has_the_defaults_of_its_dataclass(section: type, kind: type) -> None:
    values = section().model_dump()

    assert values == {name: defaults_of(kind)[name] for name in values}


def test_default_settings_are_the_defaults_of_every_component(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {})

    agent = agent_settings(plan.rank_config, plan.run, plan.topology, plan.device, membership=0)
    known = defaults_of(AgentSettings)
    for name in ("vote_every", "vote_deadline_s", "plan_deadline_s", "scrub_every_steps"):
        assert getattr(agent, name) == known[name], name
    assert plan.staging.applied_to(StageSettings()) == StageSettings()
    serving = StageSettings.while_serving()
    assert plan.staging.applied_to(serving) == serving
    controller = ControllerSettings()
    for one in fields(ControllerSettings):
        if one.name not in ("pace", "seed", "stage"):  # of the model's size, and the demo's
            assert getattr(plan.controller, one.name) == getattr(controller, one.name), one.name
    assert (plan.controller.stage, controller.stage) == ("observe", "all")  # of a new deployment
    assert plan.reporting.tempo == Tempo()
    assert plan.controller.retention == Retention()
    settings = load()
    assert settings.http.limits() == HttpLimits()
    assert settings.supervision.settings() == SupervisionSettings()


def test_settings_reach_the_components(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        {
            "vote_every": "3",
            "vote_deadline_s": "3.5",
            "plan_deadline_s": "2.5",
            "scrub_every_steps": "7",
            "keep_samples_s": "60",
            "keep_minutes_s": "120",
            "keep_hours_s": "240",
            "keep_events": "9",
            "lease_ttl_s": "3",
            "poll_s": "0.5",
            "migration_deadline_s": "7",
            "keep_every_windows": "2",
            "max_moves": "5",
            "target_imbalance": "1.5",
            "state_interval": "0.75",
            "other_hosts": "after_disk",
            "transport.silence_s": "1.25",
            "host_link.max_transfers": "9",
            "num_readers": "2",
            "in_flight": "4",
            "peer_chunk_bytes": "4096",
            "network_bytes_per_second": "1000",
        },
    )

    assert plan.controller_poll_s == 0.5
    agent = agent_settings(plan.rank_config, plan.run, plan.topology, "cpu", membership=4)
    assert (agent.vote_every, agent.scrub_every_steps, agent.membership) == (3, 7, 4)
    assert (agent.plan_deadline_s, agent.vote_deadline_s) == (2.5, 3.5)
    controller = plan.controller
    assert controller.lease_ttl_s == 3.0
    assert controller.retention == Retention(60.0, 120.0, 240.0, events=9)
    assert (controller.migration_deadline_s, controller.keep_every_windows) == (7.0, 2)
    assert (controller.budget.max_moves, controller.budget.target_imbalance) == (5, 1.5)
    assert plan.reporting.tempo == Tempo(0.0, 0.75)
    assert plan.rank_links is not None
    assert plan.host_cache.links is not None
    assert (plan.rank_links.silence_s, plan.host_cache.links.silence_s) == (1.25, 2.0)
    assert (plan.host_cache.links.max_transfers, plan.host_cache.num_readers) == (9, 2)
    stage = plan.staging.applied_to(StageSettings())
    assert (stage.in_flight, stage.peer.chunk_bytes) == (4, 4096)
    assert (stage.network.bytes_per_second, stage.host) == (1000.0, StageSettings().host)
    assert isinstance(plan.staging, Staging)


def test_config_command_prints_values_their_places_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("[demo]\nlayers = 3\n")
    monkeypatch.setenv("EPLB_STORE", "redis://ops:geheim@store:6379/1")

    given = ["config", "--config", str(file), "--setting", "seed=9"]
    result = CliRunner().invoke(app, given)

    assert result.exit_code == 0, result.output
    values = tomllib.loads(result.output)
    assert (values["demo"]["layers"], values["demo"]["seed"]) == (3, 9)
    assert values["deployment"]["store"] == "redis://ops@store:6379/1"
    lines = [line.split() for line in result.output.splitlines()]
    assert ["layers", "=", "3", "#", str(file)] in lines
    assert ["seed", "=", "9", "#", "--setting", "seed"] in lines
    assert ["ranks", "=", "8", "#", "default"] in lines
    assert "geheim" not in result.output
    assert set(values) == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("pair", "found"),
    [
        ("ranks", "--setting is 'ranks'"),
        ("ranks=x", "ranks is 'x' in --setting ranks"),
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
        assert store.live().live == LiveSettings(pay_back_s=300.0, observe=True)
        assert store.live().changes["observe"].reason == "look"

        assert live_config(path, "--unset", "pay_back_s").exit_code == 0
        assert store.live().live == LiveSettings(observe=True)
    audited = [(one.action, one.reason, one.actor) for one in Audit(tmp_path).entries()]
    assert audited == [
        ("config --live pay_back_s=300.0, observe=True", "look", local_actor()),
        ("config --live pay_back_s=None", "changed from the command line", local_actor()),
    ]


def test_live_config_that_cannot_be_audited_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(started(path)) as store:
        (tmp_path / "audit.jsonl").mkdir()

        result = live_config(path, "--set", "observe=true")

        assert (result.exit_code, "cannot be written" in result.output) == (2, True)
        assert store.live().live == LiveSettings()


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
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    settings = load(SMALL | {"text": [text], "window_seconds": 0.5})
    with (
        closing(StateDir(tmp_path / "state")) as state,
        closing(open_store(tmp_path / "store.sqlite", "demo")) as store,
    ):
        begin(settings, prepare(settings, state), store)
        store.change_live({"movement": False, "pay_back_s": 5.0}, reason="incident 7")

        begin(settings, prepare(settings, state), store)

        assert store.control() == Control(movement=False)
        assert store.live().effective.pay_back_s == 5.0
        run = store.current_run()
        assert run is not None
        assert run.window_seconds == 0.5
    words = "live setting: movement is false (revision 2,"
    assert [words in record.message for record in caplog.records] == [True, False]
    assert "incident 7), which wins over the setting true" in caplog.text
