"""Profiles: prefill and decode deployments of one model, in one file and one store."""

from __future__ import annotations

import json
import re
import shlex
import signal
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from api.config.tree import Settings, load, profile_names
from api.deploy.deployment import resolve
from api.deploy.first_placement import ensure_first_placement
from eplb.errors import ConfigError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.engines.common.plugin_settings import PluginSettings, settings_of
from telemetry import open_store
from telemetry.state.runs import RunInfo
from tests.support.deployments import EPLB, TOY_MODEL, CommandProcess, clean_environ, free_ports
from tests.support.documents import blocks
from tests.support.redis_servers import RedisProcess

PAGE, SECTION = "docs/deployment.md", "Prefill and decode"
BLOCKS = [block for block in blocks(PAGE) if block.section == SECTION]
PRINTED_FILE = next(block.code for block in BLOCKS if block.code.startswith("# profiles.toml"))
PRINTED = next(block.code.splitlines() for block in BLOCKS if block.language == "output")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    if block.language == "sh"
    for line in block.code.splitlines()
]
SERVICES = [words for words in COMMANDS if words[:2] == ["eplb", "serve"]]


FILE = """
[deployment]
name = "r1"
state_dir = "{folder}/state"
{store}
[model]
{toy_model}
[topology]
device = "cpu"
[telemetry]
window_steps = 32
[http]
port = 0

[profiles.prefill.topology]
ranks_per_node = 2
slots_per_rank = 5
[profiles.prefill.network]
rendezvous_port = {prefill_port}
[profiles.prefill.controller]
stage = "all"
[profiles.prefill.engine]
phase = "prefill"

[profiles.decode.topology]
ranks_per_node = 4
slots_per_rank = 3
[profiles.decode.telemetry]
window_steps = 256
[profiles.decode.network]
rendezvous_port = {decode_port}
[profiles.decode.planner]
policy = "greedy"
[profiles.decode.engine]
phase = "decode"
"""


@pytest.fixture(params=["sqlite", "redis"])
def store_line(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return ""
    server: RedisProcess = request.getfixturevalue("redis_server")
    return f'store = "{server.url}?prefix={tmp_path.name}"'


def written(folder: Path, more: str = "", store: str = "") -> Path:
    file = folder / "eplb.toml"
    prefill, decode = free_ports(2)
    text = FILE.format(
        folder=folder, store=store, toy_model=TOY_MODEL, prefill_port=prefill, decode_port=decode
    )
    file.write_text(text + more)
    return file


def settings(file: Path, profile: str | None, **environ: str) -> Settings:
    return load({}, config=file, environ=environ, profile=profile)


def refusal(file: Path, profile: str | None = "prefill") -> str:
    with pytest.raises(ConfigError) as caught:
        settings(file, profile)
    return str(caught.value).replace(str(file), "FILE")


def run(*words: str | Path, **environ: str) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), env=environ)


def test_profiles_share_model_and_store_and_have_the_rest_of_their_own(tmp_path: Path) -> None:
    file = written(tmp_path)

    prefill, decode = (settings(file, one) for one in ("prefill", "decode"))

    assert prefill.model == decode.model
    assert prefill.deployment.store == decode.deployment.store == f"{tmp_path}/state/store.sqlite"
    assert (prefill.deployment.name, decode.deployment.name) == ("r1-prefill", "r1-decode")
    folders = prefill.deployment.state_dir, decode.deployment.state_dir
    assert folders == (tmp_path / "state" / "prefill", tmp_path / "state" / "decode")
    assert (prefill.topology.ranks_per_node, decode.topology.ranks_per_node) == (2, 4)
    assert (prefill.telemetry.window_steps, decode.telemetry.window_steps) == (32, 256)
    assert (prefill.controller.stage, decode.controller.stage) == ("all", "observe")
    assert (prefill.controller.policy, decode.controller.policy) == ("auto", "greedy")
    assert profile_names(file, {}) == ["prefill", "decode"]


def test_environment_names_the_profile_and_stands_above_its_tables(tmp_path: Path) -> None:
    file = written(tmp_path)
    variables = {"EPLB_PROFILE": "decode", "EPLB_STAGE": "layers", "EPLB_STORE": "redis://10.0.0.7"}

    found = settings(file, None, **variables)

    assert found.deployment.name == "r1-decode"
    assert found.deployment.store == "redis://10.0.0.7"
    assert (found.controller.stage, found.topology.slots_per_rank) == ("layers", 3)


def test_place_of_a_value_names_the_profile(tmp_path: Path) -> None:
    file = written(tmp_path)

    loaded = load({}, config=file, environ={}, profile="decode")

    assert loaded.places["planner.policy"] == f"{file}, profile decode"
    assert loaded.places["deployment.name"] == f"{file}, profile decode"
    assert loaded.places["model.layers"] == str(file)


# (what is added to the file, the profile that is asked for, what the refusal names)
REFUSED: list[tuple[str, str | None, list[str]]] = [
    ("", None, ["decode, prefill", "--profile", "EPLB_PROFILE"]),
    ("", "prefil", ["'prefil'", "decode, prefill"]),
    ("[profiles.other]\nmodel = {experts = 16}", "prefill", ["'other'", "model.experts"]),
    ("[profiles.other]\ncheckpoint = 'weights'", "prefill", ["'other'", "model.checkpoint"]),
    (
        "[profiles.other]\ndeployment = {store = 'redis://10.0.0.9'}",
        "prefill",
        ["'other'", "deployment.store"],
    ),
    ("[profiles.a.deployment]\nname = 'r1-prefill'", "prefill", ["another for each"]),
    (
        "[profiles.a.deployment]\nstate_dir = 'one'\n[profiles.b.deployment]\nstate_dir = 'one'",
        "prefill",
        ["another for each"],
    ),
    (
        "[profiles.other.topology]\nrank_per_node = 2",
        "prefill",
        ["'topology.rank_per_node'", "profile other"],
    ),
]


@pytest.mark.parametrize(("more", "profile", "named"), REFUSED)
def test_file_whose_profiles_cannot_be_used_is_refused(
    tmp_path: Path, more: str, profile: str | None, named: list[str]
) -> None:
    sentence = refusal(written(tmp_path, more), profile)

    assert [one for one in named if one not in sentence] == [], sentence


def test_profile_without_a_file_that_has_it_is_refused(tmp_path: Path) -> None:
    (plain := tmp_path / "plain.toml").write_text("")

    with pytest.raises(ConfigError, match="'prefill'"):
        settings(plain, "prefill")
    with pytest.raises(ConfigError, match="'prefill'"):
        load({}, config=None, environ={"EPLB_PROFILE": "prefill"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("profiles = 1", "profiles is 1 in FILE"),
        ("[profiles]\nprefill = 1", "profiles.prefill is 1 in FILE"),
        ('[profiles."Pre fill"]', "'Pre fill'"),
    ],
)
def test_profiles_that_are_no_tables_are_refused(tmp_path: Path, text: str, named: str) -> None:
    (file := tmp_path / "eplb.toml").write_text(text)

    assert named in refusal(file)


@pytest.mark.parametrize("profile", ["prefill", "decode"])
def test_plugin_of_an_engine_reads_the_same_profile(tmp_path: Path, profile: str) -> None:
    file = written(tmp_path)
    loaded = settings(file, profile)

    found = settings_of({"EPLB_CONFIG": str(file), "EPLB_PROFILE": profile})

    assert found is not None
    assert found.deployment == loaded.deployment
    assert (found.engine.phase, found.telemetry) == (profile, loaded.telemetry)


def test_plugin_refuses_what_the_commands_refuse(tmp_path: Path) -> None:
    def plugin(more: str, **environ: str) -> PluginSettings | None:
        return settings_of({"EPLB_CONFIG": str(written(tmp_path, more)), **environ})

    with pytest.raises(ConfigError, match="decode, prefill"):
        plugin("")
    with pytest.raises(ConfigError, match=r"'other' .*model\.experts"):
        plugin("[profiles.other.model]\nexperts = 9\n", EPLB_PROFILE="other")


def begin(file: Path, profile: str, experts: int | None = None) -> None:
    """Write what the first processes of a profile's deployment write."""
    deployment = resolve(settings(file, profile), {})
    with closing(deployment.opened_store()) as store:
        ensure_first_placement(store, deployment, "a test")
        model = model_to_dict(deployment.model) | ({"num_experts": experts} if experts else {})
        model |= {"expert_cost": [1.0] * experts} if experts else {}
        topology = topology_to_dict(deployment.topology)
        store.begin_run(RunInfo(f"run-{profile}", 1.0, model, topology, 32))


def test_store_lists_the_deployments_that_ran(tmp_path: Path, store_line: str) -> None:
    file = written(tmp_path, store=store_line)
    begin(file, "prefill")
    begin(file, "decode")
    open_store(settings(file, "prefill").deployment.store, "misspelt").close()  # it never ran

    shown = run("store", "list", "--json", EPLB_CONFIG=str(file))
    table = run("store", "list", EPLB_CONFIG=str(file))

    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.output)
    found = [(row["deployment"], row["ranks"], row["generation"], row["stage"]) for row in rows]
    assert found == [("r1-decode", 4, 0, "observe"), ("r1-prefill", 2, 0, "all")]
    assert [line.split()[0] for line in table.output.splitlines()] == [
        "deployment",
        "r1-decode",
        "r1-prefill",
    ]


def test_status_and_live_settings_are_of_one_profile(tmp_path: Path) -> None:
    file = written(tmp_path)
    begin(file, "prefill")
    begin(file, "decode")
    live = "config", "--live", "--config", file, "--profile"

    changed = run(*live, "decode", "--set", "plan_windows=8", "--reason", "a test")
    other = run(*live, "prefill")
    status = run("status", "--config", file, "--profile", "decode", "--json")

    assert "plan_windows = 8" in changed.output
    assert "plan_windows = 16" in other.output
    assert json.loads(status.output)["deployment"] == "r1-decode"
    audited, none = (
        run("audit", "--config", file, "--profile", one, "--json").output
        for one in ("decode", "prefill")
    )
    assert ("plan_windows" in audited, "plan_windows" in none) == (True, False)


def test_effective_settings_are_of_the_profile(tmp_path: Path) -> None:
    shown = run("config", "--config", written(tmp_path), "--profile", "decode").output

    assert 'name = "r1-decode"' in shown
    assert "window_steps = 256" in shown
    assert "profile decode" in shown


def test_check_compares_the_model_that_the_other_profile_serves(tmp_path: Path) -> None:
    file = written(tmp_path)
    begin(file, "decode")
    right = run("check", "--config", file, "--profile", "prefill").output

    begin_again = written(tmp_path / "second") if (tmp_path / "second").mkdir() is None else file
    begin(begin_again, "decode", experts=16)
    wrong = run("check", "--config", begin_again, "--profile", "prefill")

    served = "profile decode: r1-decode, 4 ranks, run run-decode serves the same model"
    assert f"ok       {served}" in right
    assert wrong.exit_code == 2
    assert "refused  profile decode: deployment 'r1-decode' serves 2 MoE layers of 16 experts" in (
        wrong.output
    )


def test_check_finds_a_port_that_two_profiles_share(tmp_path: Path) -> None:
    file = written(tmp_path)
    port = settings(file, "prefill").network.rendezvous_port
    text = file.read_text()
    decode = settings(file, "decode").network.rendezvous_port
    file.write_text(text.replace(f"rendezvous_port = {decode}", f"rendezvous_port = {port}"))

    checked = run("check", "--config", file, "--profile", "decode")

    assert checked.exit_code == 2
    assert f"{port} of 127.0.0.1 (network.rendezvous_port) is also" in checked.output


@pytest.mark.slow
def test_one_service_shows_both_profiles_of_a_store_and_ends_by_a_signal(
    tmp_path: Path, store_line: str
) -> None:
    file = written(tmp_path, store=store_line)
    decode = resolve(settings(file, "decode"), {})
    with closing(decode.opened_store()) as store:
        ensure_first_placement(store, decode, "a test")
        words = [str(EPLB), "serve", "--config", str(file), "--profile", "prefill"]
        serve = CommandProcess(
            [*words, "--setting", "http.deployments=*"], tmp_path, clean_environ()
        )
        try:
            url = serve.wait_for("eplb serve: http://").split()[-1]
            at = ["--service", url]
            listed = json.loads(run("deployments", "--json", *at).output)["deployments"]
            paused = run("pause", "--wait", "0", "--deployment", "r1-decode", *at)

            assert [(one["name"], one["is_default"]) for one in listed] == [
                ("r1-prefill", True),
                ("r1-decode", False),
            ]
            assert paused.exit_code == 0, paused.output
            assert not store.control().movement
            state = httpx.get(f"{url}/api/v1/state", timeout=None).json()
            assert (state["deployment"], state["movement"]) == ("r1-prefill", True)
            assert serve.ends(signal.SIGTERM) == 0
        finally:
            serve.kill()


# -- the page, as printed


def command(*first: str) -> list[str]:
    """The words after ``eplb`` of the page's command that begins so."""
    return next(words[1:] for words in COMMANDS if words[1 : 1 + len(first)] == list(first))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "eplb.toml").write_text(PRINTED_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_printed(words: list[str]) -> Result:
    # Any free port: those of the page may be taken on this host.
    return run(*words, EPLB_CONFIG="eplb.toml", EPLB_HTTP__PORT="0")


def test_check_of_the_page_prints_its_first_and_last_findings(folder: Path) -> None:
    output = run_printed(command("check")).output

    findings = re.findall(r"^(?:ok|refused) .*$", output, re.MULTILINE)
    assert [findings[0], findings[-1]] == [PRINTED[0], PRINTED[-1]]


def test_settings_of_the_page_are_printed_with_their_places(folder: Path) -> None:
    output = run_printed(command("config", "--profile")).output

    assert re.search(r'^name = "r1-decode" +# eplb\.toml, profile decode$', output, re.MULTILINE)
    assert re.search(r"^experts = 16 +# eplb\.toml$", output, re.MULTILINE)


@pytest.mark.slow
def test_services_of_both_profiles_share_a_store_and_end_apart(folder: Path) -> None:
    environ = clean_environ(EPLB_CONFIG="eplb.toml", EPLB_HTTP__PORT="0")
    started = [CommandProcess([str(EPLB), *one[1:]], folder, environ) for one in SERVICES]
    try:
        for one in started:
            one.wait_for("wrote the first placement, generation 0")

        listed = run_printed(command("store", "list"))
        changed = run_printed(command("config", "--live"))
        status = run_printed(command("status"))
        prefill, decode = started

        assert [line.split()[0] for line in listed.output.splitlines()[1:]] == [
            "r1-decode",
            "r1-prefill",
        ]
        assert re.search(r'^stage = "propose" +# live, ', changed.output, re.MULTILINE)
        assert "deployment r1-decode in .eplb/store.sqlite" in status.output
        assert prefill.ends(signal.SIGTERM) == 0
        assert decode.process.poll() is None
        assert decode.ends(signal.SIGTERM) == 0
    finally:
        for one in started:
            one.kill()
