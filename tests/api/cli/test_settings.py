"""Settings: where a value comes from, and one sentence for each that cannot be used."""

from contextlib import closing
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
from pydantic import BaseModel

import api.cli.main
import api.config.tree
import api.demo.settings
import api.http.requests
from api.config.loader import load_settings
from api.config.migration import HostCache, Staging
from api.config.sections import Http
from api.config.tree import Settings, known_names
from api.demo.settings import DemoSettings
from api.demo.setup import begin, prepare
from api.demo.state_dir import StateDir
from api.http.requests import ExplainRequest
from eplb.errors import ConfigError
from rebalance.build.rank import agent_settings
from telemetry import open_store
from telemetry.retention.pruning import Retention
from telemetry.stores.redis.connection.address import Limits, parse_address


def toml(folder: Path, text: str) -> Path:
    path = folder / "demo.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(flags: dict[str, Any], config: Path | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, config=config, environ=environ)
    return str(caught.value)


def test_settings_without_input_are_the_defaults() -> None:
    assert load_settings({}, config=None, environ={"HOME": "/"}) == Settings()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = toml(tmp_path, "layers = 1\nhidden = 1\nseed = 1\n")
    environ = {"EPLB_HIDDEN": "2", "EPLB_SEED": "2"}

    flags = {"seed": 3, "top_k": None, "text": []}
    demo = load_settings(flags, config=config, environ=environ).demo

    assert (demo.layers, demo.hidden, demo.seed, demo.top_k) == (1, 2, 3, 6)


def test_slots_not_given_are_a_quarter_more_than_experts_on_equal_ranks() -> None:
    assert DemoSettings().slots == 80
    assert DemoSettings(experts=60).slots == 80  # 75, and then 10 on each of 8 ranks
    assert DemoSettings(nodes=1, ranks=1).slots == 64  # a second replica has no rank to go to


def test_spares_are_further_slots_and_none_unless_asked_for() -> None:
    assert DemoSettings().spare_slots == 0
    assert DemoSettings(spare_slots=2).slots == 80
    with pytest.raises(ConfigError, match="spare_slots is '-1' in --setting spare_slots, expected"):
        load_settings({}, config=None, environ={}, named={"spare_slots": "-1"})


def test_agent_settings_have_the_deadlines_and_the_scrub_interval(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    given = {"scrub_every_steps": "7", "plan_deadline_s": "2.5", "vote_deadline_s": "3.5"}
    small = {"layers": 1, "experts": 8, "top_k": 2, "hidden": 8, "intermediate": 8, "text": [text]}
    settings = load_settings(small, config=None, environ={}, named=given)

    with closing(StateDir(tmp_path / "state")) as state:
        plan = prepare(settings, state)
    told = agent_settings(plan.rank_config, plan.run, plan.topology, "cpu", membership=4)

    assert (told.scrub_every_steps, told.plan_deadline_s, told.vote_deadline_s) == (7, 2.5, 3.5)
    assert told.membership == 4


def test_controller_settings_have_retention_and_lease_time(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog " * 200)
    small = {"layers": 1, "experts": 8, "top_k": 2, "hidden": 8, "intermediate": 8, "text": [text]}
    environ = {"EPLB_KEEP_SAMPLES_S": "60", "EPLB_KEEP_MINUTES_S": "120", "EPLB_KEEP_EVENTS": "9"}
    environ |= {"EPLB_KEEP_HOURS_S": "240", "EPLB_LEASE_TTL_S": "3", "EPLB_SAMPLE_VERSION": "1"}
    settings = load_settings(small | {"window_seconds": 0.5}, config=None, environ=environ)

    with closing(StateDir(tmp_path / "state")) as state:
        plan = prepare(settings, state)
        with closing(open_store(state.store, "demo")) as store:
            begin(settings, plan, store)
            run = store.current_run()

    assert plan.controller.retention == Retention(60.0, 120.0, 240.0, events=9)
    assert (plan.controller.lease_ttl_s, plan.reporting.sample_version) == (3.0, 1)
    assert run is not None
    assert run.window_seconds == 0.5


def test_unknown_sample_version_is_refused() -> None:
    words = "sample_version is 3 in flag --sample-version, expected at least 1 and at most 2"
    assert refusal({"sample_version": 3}) == words


@pytest.mark.parametrize("name", ["plan_deadline_s", "vote_deadline_s", "lease_ttl_s"])
def test_deadline_is_more_than_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '0' in --setting {name}, expected more than"):
        load_settings({}, config=None, environ={}, named={name: "0"})


def test_paths_in_the_environment_are_separated_as_the_system_does() -> None:
    settings = load_settings({}, config=None, environ={"EPLB_TEXT": "a.txt:b"})

    assert settings.demo.text == [Path("a.txt"), Path("b")]


def test_environment_variable_of_trace_folder_is_not_a_setting() -> None:
    assert load_settings({}, config=None, environ={"EPLB_DATA": "/data"}) == Settings()


def test_unknown_key_in_the_file_is_refused_with_the_closest_known(tmp_path: Path) -> None:
    config = toml(tmp_path, "layer = 3\n")

    expected = f"unknown key 'layer' in {config}, closest known: layers"
    assert refusal({}, config).startswith(expected)


def test_unknown_environment_variable_is_refused_with_the_closest_known() -> None:
    expected = "unknown key 'EPLB_RANK' in the environment, closest known: EPLB_RANKS"
    assert refusal({}, EPLB_RANK="8").startswith(expected)


def test_key_close_to_none_lists_them_all() -> None:
    assert "nodes, ranks, layers" in refusal({"zzzz": 1})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"slots": 48}, "slots is 48 in flag --slots, expected at least 64, the number of experts"),
        (
            {"slots": 81},
            "slots is 81 in flag --slots, expected a multiple of 8, the number of ranks",
        ),
        (
            {"experts": 2, "top_k": 1, "slots": 24},
            "slots is 24 in flag --slots, expected at most 16",
        ),
        ({"ranks": 7}, "ranks is 7 in flag --ranks, expected a multiple of 2, the number of nodes"),
        ({"nodes": 3}, "ranks is 8 in the defaults, expected a multiple of 3, the number of nodes"),
        ({"top_k": 65}, "top_k is 65 in flag --top-k, expected at most 64, the number of experts"),
        ({"ranks": 0}, "ranks is 0 in flag --ranks, expected at least 1"),
        ({"window_tokens": 0}, "window_tokens is 0 in flag --window-tokens, expected at least 1"),
        ({"seconds": 0.0}, "seconds is 0.0 in flag --seconds, expected more than 0"),
        (
            {"seconds": float("inf")},
            "seconds is inf in flag --seconds, expected more than 0 and at most",
        ),
        (
            {"pay_back_s": -1.0},
            "pay_back_s is -1.0 in flag --pay-back-s, expected at least 0 and at most 1000000000",
        ),
        ({"port": 65536}, "port is 65536 in flag --port, expected at least 0 and at most 65535"),
        (
            {"shared_experts": 2},
            "shared_experts is 2 in flag --shared-experts, expected at least 0 and at most 1",
        ),
        (
            {"store": "memory:"},
            "store is 'memory:' in flag --store, expected a store that several processes can share",
        ),
        (
            {"keep_events": 10**23},
            "keep_events is 100000000000000000000000 in flag --keep-events, "
            "expected at least 0 and at most 10000000",
        ),
        ({"spool_mb": 0}, "spool_mb is 0 in flag --spool-mb, expected at least 1"),
        ({"store_interval": -1.0}, "store_interval is -1.0 in flag --store-interval, expected at"),
        ({"policy": ""}, "policy is '' in flag --policy, expected at least 1 character"),
        (
            {"view": "big"},
            "view is 'big' in flag --view, expected 'auto', 'live', 'plain' or 'off'",
        ),
        (
            {"text": ["a"], "trace": "t.npz"},
            "trace is 't.npz' in flag --trace, expected either a trace or text, not both",
        ),
    ],
)
def test_value_out_of_range_is_refused_in_one_sentence(
    flags: dict[str, Any], sentence: str
) -> None:
    assert refusal(flags).startswith(sentence)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('ranks = "many"', "expected a whole number"),
        ("ranks = true", "expected a number"),
        ("ranks = 2.5", "expected a whole number"),
        ('seconds = "soon"', "expected a number"),
        ("observe = 7", "expected true or false"),
        ("text = 7", "expected a list of paths"),
        ("state_dir = 7", "expected a path"),
        ("policy = 7", "expected text"),
    ],
)
def test_value_of_the_wrong_type_is_refused_with_its_place(
    tmp_path: Path, line: str, expected: str
) -> None:
    config = toml(tmp_path, line)

    key, value = line.split(" = ")
    shown = value.replace('"', "'").replace("true", "True")
    assert refusal({}, config) == f"{key} is {shown} in {config}, {expected}"


def test_environment_is_named_by_its_variable() -> None:
    expected = "ranks is 'x' in environment variable EPLB_RANKS, expected a whole number"
    assert refusal({}, EPLB_RANKS="x") == expected


def test_missing_file_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert (
        refusal({}, missing) == f"settings file {missing} cannot be read: No such file or directory"
    )

    broken = toml(tmp_path, "ranks =")
    assert refusal({}, broken).startswith(f"settings file {broken} is not TOML: Invalid value")


def test_host_cache_s_room_goes_with_its_mode() -> None:
    assert HostCache(mode="ring", records=8).records == 8
    for mode, records in (("full", 8), ("hot", 0), ("ring", 0)):
        with pytest.raises(ValueError, match="expected a number of records with hot or ring"):
            HostCache(mode=mode, records=records)


def test_environment_sets_paths_of_store_and_spools() -> None:
    environ = {"EPLB_STORE": "redis://store:6379", "EPLB_SPOOL_DIR": "/var/spool/eplb"}

    settings = load_settings({}, config=None, environ=environ)

    assert (settings.deployment.store, settings.telemetry.spool_dir) == (
        "redis://store:6379",
        Path("/var/spool/eplb"),
    )


def numbers_without_bound(kind: type[BaseModel]) -> list[str]:
    return [
        name
        for name, field in kind.model_fields.items()
        if field.annotation in (int, float, int | None, float | None)
        and not any(hasattr(bound, "le") or hasattr(bound, "lt") for bound in field.metadata)
    ]


def models_in(*modules: ModuleType) -> list[type[BaseModel]]:
    found = [value for module in modules for value in vars(module).values()]
    return [one for one in found if isinstance(one, type) and issubclass(one, BaseModel)]


def test_every_number_that_a_user_can_set_has_an_upper_bound() -> None:
    kinds = models_in(api.config.tree, api.demo.settings, api.http.requests)

    assert {DemoSettings, Staging, Http, ExplainRequest} <= set(kinds)
    assert [(kind, name) for kind in kinds for name in numbers_without_bound(kind)] == []


def flags_without_bound(commands: typer.Typer) -> list[str]:
    """Number flags of all commands; the demo's are checked by its settings."""
    found = []
    for command in commands.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            is_number = kind in (int, float, int | None, float | None)
            if is_number and not any(getattr(one, "max", None) is not None for one in more):
                found.append(f"{command.callback.__name__} {name}")
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        found += flags_without_bound(group.typer_instance)
    return found


def test_every_number_flag_of_a_command_has_an_upper_bound() -> None:
    of_settings = {f"demo {name}" for name in known_names()}

    found = flags_without_bound(api.cli.main.app)

    assert "demo ranks" in found
    assert set(found) - of_settings == set()


@pytest.mark.parametrize("option", [known.name for known in fields(Limits)])
def test_every_number_of_a_redis_url_has_an_upper_bound(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}.* expected"):
        parse_address(f"redis://localhost?{option}=100000000000000000000000")


DEPLOYMENT = """
[deployment]
name = "west"
[model]
layers = 2
experts = 8
[topology]
nodes = 2
hosts = ["10.0.0.1", "10.0.0.2"]
"""


def test_file_named_by_the_environment_is_read_where_no_flag_names_one(tmp_path: Path) -> None:
    file, other = toml(tmp_path, DEPLOYMENT), tmp_path / "other.toml"
    other.write_text("layers = 3\n")

    named = load_settings({}, config=None, environ={"EPLB_CONFIG": str(file)})
    flagged = load_settings({}, config=other, environ={"EPLB_CONFIG": str(file)})

    assert (named.deployment.name, named.topology.hosts) == ("west", ["10.0.0.1", "10.0.0.2"])
    assert (named.model.layers, named.demo.layers) == (2, DemoSettings().layers)
    assert (flagged.deployment.name, flagged.demo.layers) == ("demo", 3)


def test_addresses_in_the_environment_are_separated_by_commas() -> None:
    environ = {"EPLB_TOPOLOGY__NODES": "2", "EPLB_TOPOLOGY__HOSTS": "10.0.0.1,fd00::2"}

    assert load_settings({}, config=None, environ=environ).topology.hosts == ["10.0.0.1", "fd00::2"]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ('["10.0.0.1"]', "expected 2 addresses, one for each of topology.nodes"),
        ('["10.0.0.1", "10.0.0.1"]', "expected another address for each host"),
        ('["10.0.0.1", "gpu7"]', "expected numeric addresses, found 'gpu7'"),
        ('"10.0.0.1"', "expected a list of addresses"),
    ],
)
def test_hosts_that_do_not_fit_the_nodes_are_refused(
    tmp_path: Path, hosts: str, expected: str
) -> None:
    file = toml(tmp_path, f"[topology]\nnodes = 2\nhosts = {hosts}\n")

    words = refusal({}, file)

    assert words.startswith("hosts is ")
    assert words.endswith(expected)
