"""Settings: where a value comes from, and one sentence for each that cannot be used."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from api.config.tree import Settings, load
from api.operations.commands import arguments_of
from api.operations.table import ROUTES
from eplb.declared import without_none
from eplb.errors import ConfigError
from telemetry.state.redis_address import Limits, parse_address
from tests.support.documents import commands


def toml(folder: Path, text: str) -> Path:
    path = folder / "demo.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(
    flags: dict[str, Any],
    config: Path | None = None,
    named: dict[str, str] | None = None,
    **environ: str,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, config=config, environ=environ, named=named)
    return str(caught.value)


def test_settings_without_input_are_the_defaults() -> None:
    assert load({}, config=None, environ={"HOME": "/"}) == Settings()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = toml(tmp_path, "layers = 1\nhidden = 1\nexperts = 1\n")
    environ = {"EPLB_HIDDEN": "2", "EPLB_EXPERTS": "2"}

    flags = {"experts": 3, "top_k": None, "hosts": []}
    model = load(flags, config=config, environ=environ).model

    assert (model.layers, model.hidden, model.experts, model.top_k) == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("variable", "section", "name", "expected"),
    [
        ("EPLB_STORE=redis://store:6379", "deployment", "store", "redis://store:6379"),
        ("EPLB_TLS_KEY_FILE=/etc/key.pem", "http", "tls_key_file", Path("/etc/key.pem")),
    ],
)
def test_variable_of_the_environment_has_the_type_of_its_setting(
    variable: str, section: str, name: str, expected: object
) -> None:
    environ = dict([variable.split("=")])

    settings = load({}, config=None, environ=environ)

    assert getattr(getattr(settings, section), name) == expected


def test_unknown_key_is_refused_with_its_place_and_the_closest_known(tmp_path: Path) -> None:
    config = toml(tmp_path, "layer = 3\n")

    assert refusal({}, config).startswith(f"unknown key 'layer' in {config}, closest known: layers")
    in_environ = refusal({}, EPLB_LAYER="8")
    assert "'EPLB_LAYER' in the environment" in in_environ
    assert "EPLB_LAYERS" in in_environ


def test_key_close_to_none_lists_them_all() -> None:
    assert "layers, experts, top_k" in refusal({"zzzz": 1})


# (flags, the one that is named, what the sentence ends with)
OUT_OF_RANGE: list[tuple[dict[str, Any], str, str]] = [
    ({"ranks_per_node": 0}, "0 in flag --ranks-per-node", "at least 1"),
    ({"window_steps": 0}, "0 in flag --window-steps", "at least 1"),
    ({"hung_after_s": float("inf")}, "inf in flag --hung-after-s", "at least 1 and at most"),
    ({"pay_back_s": -1.0}, "-1.0 in flag --pay-back-s", "at least 0 and at most 1000000000"),
    ({"port": 65536}, "65536 in flag --port", "at least 0 and at most 65535"),
    ({"store": "memory:"}, "'memory:' in flag --store", "several processes"),
    ({"keep_events": 10**23}, "in flag --keep-events", "at least 0 and at most 10000000"),
    ({"spool_mb": 0}, "0 in flag --spool-mb", "at least 1"),
    ({"store_interval": -1.0}, "-1.0 in flag --store-interval", "at least 0"),
    ({"policy": ""}, "'' in flag --policy", "at least 1 character"),
    ({"phase": "big"}, "'big' in flag --phase", "'auto', 'prefill', 'decode' or 'mixed'"),
    ({"plan_deadline_s": 0}, "0 in flag --plan-deadline-s", "more than 0"),
    ({"vote_deadline_s": 0}, "0 in flag --vote-deadline-s", "more than 0"),
    ({"lease_ttl_s": 0}, "0 in flag --lease-ttl-s", "more than 0"),
    ({"spare_slots": -1}, "-1 in flag --spare-slots", "at least 0"),
    ({"host_cache_records": -1}, "-1 in flag --host-cache-records", "at least 0"),
    ({"sample_steps": 5}, "5 in flag --sample-steps", "a divisor of telemetry.window_steps, 64"),
    ({"rearm_imbalance": 1.5}, "1.5 in flag --rearm-imbalance", "at most start_imbalance"),
]


@pytest.mark.parametrize(("flags", "found", "expected"), OUT_OF_RANGE)
def test_value_out_of_range_is_refused_in_one_sentence(
    flags: dict[str, Any], found: str, expected: str
) -> None:
    before, _, after = refusal(flags).partition(", expected ")

    assert found in before
    assert expected in after


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('layers = "many"', "a whole number"),
        ("layers = true", "a number"),
        ("layers = 2.5", "a whole number"),
        ('pay_back_s = "soon"', "a number"),
        ("observe = 7", "true or false"),
        ("hosts = 7", "a list of addresses"),
        ("state_dir = 7", "a path"),
        ("policy = 7", "text"),
    ],
)
def test_value_of_the_wrong_type_is_refused_with_its_place(
    tmp_path: Path, line: str, expected: str
) -> None:
    config = toml(tmp_path, line)

    key, value = line.split(" = ")
    shown = value.replace('"', "'").replace("true", "True")
    assert refusal({}, config) == f"{key} is {shown} in {config}, expected {expected}"


def test_missing_file_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    missing, broken = tmp_path / "none.toml", toml(tmp_path, "layers =")

    assert f"{missing} cannot be read" in refusal({}, missing)
    assert f"{broken} is not TOML" in refusal({}, broken)


def test_every_number_that_a_user_can_set_has_an_upper_bound() -> None:
    numbers = {one.path: one.about for one in Settings.known.values() if one.kind in (int, float)}
    for route in ROUTES:
        for name, argument in arguments_of(route.endpoint).items():
            if without_none(argument.kind)[0] in (int, float):
                numbers[f"{route.name} {name}"] = argument.meaning

    assert {"explanation layer", "planner.pay_back_s", "events limit"} <= numbers.keys()
    assert [name for name, one in numbers.items() if one.at_most is None] == []


def test_every_number_flag_of_a_command_has_both_bounds() -> None:
    numbers = [
        (f"{words.removeprefix('eplb ')} {param.name}", param.min, param.max)
        for words, command in commands().items()
        for param in command.params
        if getattr(param, "type_descriptor", None)
        and param.type_descriptor.annotation in (int, float)
    ]
    of_settings = {f"demo {name}" for name in Settings.names}  # checked by the settings

    assert {("explain layer", least, 2**31 - 1) for least in (None, 0)} & set(numbers)
    open_ended = {name for name, *bounds in numbers if None in bounds}
    assert open_ended - of_settings == set()


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

    named = load({}, config=None, environ={"EPLB_CONFIG": str(file)})
    flagged = load({}, config=other, environ={"EPLB_CONFIG": str(file)})

    assert (named.deployment.name, named.topology.hosts) == ("west", ("10.0.0.1", "10.0.0.2"))
    assert named.model.layers == 2
    assert (flagged.deployment.name, flagged.model.layers) == ("demo", 3)


def test_addresses_in_the_environment_are_separated_by_commas() -> None:
    environ = {"EPLB_TOPOLOGY__NODES": "2", "EPLB_TOPOLOGY__HOSTS": "10.0.0.1,fd00::2"}

    assert load({}, config=None, environ=environ).topology.hosts == ("10.0.0.1", "fd00::2")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ('["10.0.0.1"]', "expected 2 addresses"),
        ('["10.0.0.1", "10.0.0.1"]', "expected another"),
        ('"10.0.0.1"', "a list of addresses"),
    ],
)
def test_hosts_that_do_not_fit_the_nodes_are_refused(
    tmp_path: Path, hosts: str, expected: str
) -> None:
    file = toml(tmp_path, f"[topology]\nnodes = 2\nhosts = {hosts}\n")

    words = refusal({}, file)

    assert words.startswith("hosts is ")
    assert expected in words
