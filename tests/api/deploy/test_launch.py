"""``eplb launch``: the environment of ranks, restarts, signals, and what is refused at once."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.deploy.launch import ExcludedRanks, Launch, Rejoins, check_start, run_ranks
from api.deploy.local_ranks import LocalRanks
from api.deploy.waits import Reread
from api.interrupts import StopSignals
from api.processes.supervision import SupervisionSettings
from eplb.errors import ABSENT, ConfigError, RankError
from eplb.migration.recovery import Recovery
from eplb.migration.serialisation import topology_to_dict
from rebalance.assembly import places
from rebalance.assembly.description import DeploymentDescription
from rebalance.assembly.places import claim_place
from telemetry.state.events import STOPPED, WAITING
from telemetry.state.runs import RunInfo
from tests.support.deployments import (
    EPLB,
    SMALL,
    CommandProcess,
    clean_environ,
    deployment_in,
    free_ports,
)
from tests.support.limits import NEVER_S
from tests.support.rank_reports import rank_report
from tests.support.redis_servers import RedisProcess

SECRET = "0123456789abcdef0123456789abcdef"
PRINT_ENVIRON = (
    "import json, os, pathlib; pathlib.Path(f\"rank-{os.environ['RANK']}.json\")"
    ".write_text(json.dumps(dict(os.environ)))"
)


# The product's own reports, in a program that imports nothing else of it.
REPORTS = (
    "import logging, os, signal\nfrom collections.abc import Mapping\n"
    "HALT_FILE_VARIABLE, WORDS, log = 'EPLB_HALT_FILE', 1000, logging.getLogger()\n"
    + "".join(
        map(
            inspect.getsource,
            (places.report_halt, places.report_run, places.report_ready, places._report),
        )
    )
)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


REFUSES_AS_RANK_1 = "sys.exit(2) if os.environ['RANK'] == '1' else signal.pause()"


def launch_of(folder: Path, code: str, host: int = 0, **changes: Any) -> Launch:
    deployment = deployment_in(folder, **changes)
    command = [sys.executable, "-c", f"import os; os.chdir({str(folder)!r})\n{code}"]
    return Launch(deployment, host, command, dict(os.environ))


def run(launch: Launch, ends: Callable[[str], bool] = lambda line: False) -> tuple[int, list[str]]:
    """Run the ranks; a line that ends them gives the launcher a SIGTERM."""
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if ends(line):
            os.kill(os.getpid(), signal.SIGTERM)

    return run_ranks(launch, SupervisionSettings(restart_after_death=1), say), said


def test_ranks_get_the_environment_that_torchrun_sets(tmp_path: Path) -> None:
    hosts = {"topology__nodes": 2, "topology__hosts": ["127.0.0.1", "127.0.0.2"]}

    status, _ = run(launch_of(tmp_path, PRINT_ENVIRON, host=1, **hosts))

    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")}
    assert status == 0
    assert sorted(found) == ["rank-2.json", "rank-3.json"]
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
    }
    assert {name: found["rank-3.json"][name] for name in expected} == expected


def test_secret_is_in_no_environment_and_in_no_word_of_a_rank(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; r = os.environ['RANK']\n"
        "pathlib.Path(f'rank-{r}.txt').write_bytes(pathlib.Path('/proc/self/environ').read_bytes()"
        " + pathlib.Path('/proc/self/cmdline').read_bytes())\n"
        "file = pathlib.Path(os.environ['EPLB_RANK_FILE'])\n"
        "pathlib.Path(f'file-{r}.json').write_text(file.read_text())\n"
        "pathlib.Path(f'mode-{r}').write_text(oct(file.stat().st_mode & 0o777))"
    )
    deployment = deployment_in(
        tmp_path, {"EPLB_SECRET": SECRET}, deployment__store=str(tmp_path / "s.sqlite")
    )
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}"]
    given = dict(os.environ) | {"EPLB_SECRET": SECRET, "EPLB_STORE": "redis://:hidden@x"}

    status, _ = run(Launch(deployment, 0, command, given))

    shown = (tmp_path / "rank-0.txt").read_bytes()
    assert status == 0
    assert SECRET.encode() not in shown
    assert b"hidden" not in shown
    assert (tmp_path / "mode-0").read_text() == "0o600"
    description = DeploymentDescription.read(tmp_path / "file-0.json")
    assert description.config.deployment == "demo"
    assert SECRET.encode().hex() not in (tmp_path / "file-0.json").read_text()
    assert description.join_key == deployment.secret.derived("join of ranks")


def test_ranks_are_started_again_after_each_death_and_later_beyond_the_budget(
    tmp_path: Path,
) -> None:
    code = (
        "import pathlib; r = os.environ['RANK']\n"
        "with open(f'starts-{r}', 'a') as file: file.write('x')\n"
        "os.kill(os.getpid(), 9) if r == '1' else None"
    )

    status, said = run(launch_of(tmp_path, code), ends=lambda line: "used up" in line)

    assert status == 128 + signal.SIGTERM
    assert (tmp_path / "starts-0").read_text() == "xx"
    death = "rank 1 was killed by SIGKILL; starting the ranks of this host again in"
    assert said[1:] == [f"{death} 0.1 s", f"{death} 60.0 s: 1 restarts within 3600 s used up"]


def test_starts_that_wait_for_what_is_absent_count_as_no_deaths(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal; r = os.environ['RANK']\n"
        "with open(f'starts-{r}', 'a') as file: file.write('x')\n"
        "starts = pathlib.Path(f'starts-{r}').read_text()\n"
        f"os.kill({os.getpid()}, signal.SIGTERM) if starts == 'xxxx' else None\n"
        f"os._exit({ABSENT})"
    )

    status, said = run(launch_of(tmp_path, code))

    assert status == 128 + signal.SIGTERM
    assert "xxxx" in {path.read_text() for path in tmp_path.glob("starts-*")}
    assert not [line for line in said if "used up" in line], "the budget is of one restart"


def test_death_in_a_start_ends_the_other_ranks_that_wait_there(tmp_path: Path) -> None:
    """Nothing was served that they could agree on."""
    code = (
        "import sys, threading\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else threading.Event().wait()"
    )
    words = launch_of(tmp_path, code).command
    ranks = LocalRanks(words, {rank: dict(os.environ) | {"RANK": str(rank)} for rank in (0, 1)})

    assert ranks.wait(StopSignals()) == "rank 1 exited with status 7"
    assert not ranks.has_waited


def test_rank_that_others_have_excluded_is_killed_though_no_rank_has_ended(
    tmp_path: Path,
) -> None:
    code = REPORTS + "report_run(0, 'r1', os.environ)\nos.kill(os.getpid(), signal.SIGSTOP)"
    launch = launch_of(tmp_path, code)
    ranks = LocalRanks(launch.command, {0: dict(os.environ)})
    asked: list[str] = []

    def excluded(run: str) -> set[int] | None:
        asked.append(run)
        return {0} if len(asked) > 1 else None

    found = ranks.wait(StopSignals(), excluded=excluded)

    assert (found, asked[:2]) == ("rank 0 was killed by SIGKILL", ["r1", "r1"])


def test_death_is_no_failure_once_the_survivors_have_begun_another_run(tmp_path: Path) -> None:
    # Rank 1 dies; rank 0 sees that, begins another run as a survivor does, and ends well.
    code = REPORTS + (
        "import threading\nfrom pathlib import Path\n"
        f"rank, file = int(os.environ['RANK']), Path({str(tmp_path / 'pid')!r})\n"
        "report_run(rank, 'r1', os.environ)\n"
        "report_ready(rank, os.environ)\n"
        "if rank:\n"
        "    file.with_suffix('.new').write_text(str(os.getpid()))\n"
        "    file.with_suffix('.new').rename(file)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not file.exists() or Path('/proc', file.read_text()).exists():\n"
        "    threading.Event().wait(0.01)\n"
        "report_run(rank, 'r1-member1', os.environ)\n"
    )
    words = launch_of(tmp_path, code).command
    ranks = LocalRanks(words, {rank: dict(os.environ) | {"RANK": str(rank)} for rank in (0, 1)})

    assert ranks.wait(StopSignals()) == ""


def test_start_that_the_others_missed_is_known_and_its_end_is_no_failure(tmp_path: Path) -> None:
    hosts = {"topology__nodes": 2, "topology__hosts": ["127.0.0.1", "127.0.0.2"]}
    launch = launch_of(tmp_path, "", host=1, agent__serve_on=True, **hosts)
    ranks = LocalRanks(["sleep", str(NEVER_S)], {rank: dict(os.environ) for rank in (2, 3)})
    rejoins, looks = Rejoins(launch, SupervisionSettings()), list[bool]()
    topology = launch.deployment.topology

    def serve(run: str, alive: list[bool]) -> None:
        of_run = topology_to_dict(replace(topology, alive=np.array(alive)))
        store.begin_run(RunInfo(run, 0.0, {}, of_run, 1))
        store.report(rank_report(run, 0, time=store.backend.now()))

    def look() -> None:
        looks.append(rejoins.is_missed(ranks))
        if looks == [False]:
            serve("r1-member1", [True, True, False, False])
        elif looks[-1]:
            ranks.end_start()

    with closing(launch.deployment.opened_store()) as store:
        serve("r1", [True] * 4)
        assert ranks.wait(StopSignals(), look) == ""

    assert ranks.has_missed


@pytest.mark.parametrize(
    ("end", "starts_at_once"),
    [("report_halt(1, os.environ)", [[1]] * 4), ("os.abort()", [[1], []])],
    ids=["left as planned", "died"],
)
def test_only_deaths_of_a_rank_that_joins_use_its_budget_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, starts_at_once: list[list[int]]
) -> None:
    monkeypatch.setattr("api.deploy.launch.LOOK_S", 0.0)
    environ, launch = dict(os.environ), launch_of(tmp_path, "")
    code = f"{end} if os.environ['RANK'] == '1' else signal.pause()"
    words = [sys.executable, "-c", f"{REPORTS}\n{code}"]
    ranks = LocalRanks(words, {0: environ | {"RANK": "0"}}, joins=True)
    # Beyond a budget of none each restart waits for a minute.
    rejoins = Rejoins(launch, SupervisionSettings(restart_after_death=0))
    stop, found = StopSignals(), list[list[int]]()

    def look() -> None:
        is_absent, due = 1 in ranks.absent(launch.ranks), rejoins.due(ranks)
        if not is_absent or stop.received:
            return
        found.append(due)
        if len(found) == len(starts_at_once):
            os.kill(os.getpid(), signal.SIGTERM)
        elif found[-1]:
            ranks.join(1, environ | {"RANK": "1"})

    with closing(launch.deployment.opened_store()) as store:
        topology = topology_to_dict(launch.deployment.topology)
        store.begin_run(RunInfo("r1", 0.0, {}, topology, 1))
        ranks.wait(stop, look)

    assert found == starts_at_once


def test_store_names_the_ranks_of_this_host_that_a_run_excluded(tmp_path: Path) -> None:
    hosts = {"topology__nodes": 2, "topology__hosts": ["127.0.0.1", "127.0.0.2"]}
    launch = launch_of(tmp_path, "", host=1, **hosts)
    record = Recovery(1, "r1", (0, 3), 0, 0, 0, "rank 1 died, rank 2 sent no report in time", 1.0)
    with closing(launch.deployment.opened_store()) as store:
        store.recover(record, expected_membership=0)

    with closing(ExcludedRanks(launch)) as excluded:
        assert excluded.look("r1") == {2}
        assert excluded.look("r2") is None


def test_store_that_is_absent_at_the_start_is_waited_for(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        server.kill()
        deployment = deployment_in(tmp_path, {"EPLB_SECRET": SECRET}, deployment__store=server.url)

        def starts_the_store(line: str) -> bool:
            if line.endswith("waiting for the store"):
                server.start()
            return False

        launch = Launch(deployment, 0, [sys.executable, "-c", ""], dict(os.environ))
        status, said = run(launch, ends=starts_the_store)

    assert status == 0
    assert said[1].startswith("wrote the first placement, ")
    assert said[2:] == ["the ranks of host 0 have ended well, without a signal"]


def test_signal_reaches_every_rank_and_ends_the_launcher(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, threading\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "pathlib.Path(f\"ready-{os.environ['RANK']}\").touch()\n"
        "while not told: threading.Event().wait(0.05)\n"
        "pathlib.Path(f\"ended-{os.environ['RANK']}\").touch()"
    )
    launch = launch_of(tmp_path, code)

    def signal_once_ready() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_once_ready)
    thread.start()
    status, said = run(launch)
    thread.join()

    assert (status, len(said)) == (0, 2), said
    assert said[1] == "the ranks of host 0 have ended well, stopped on purpose by SIGTERM"
    with closing(launch.deployment.opened_store()) as store:
        (stopped,) = store.events_backwards({STOPPED})
    assert stopped.detail == {"host": 0, "message": said[1]}
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-0", "ended-1"]


HALTS = (
    "import pathlib, signal, sys, threading\n"
    "told, rank = [], os.environ['RANK']\n"  # no Event: its lock may be held when a signal comes
    "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
    "report_halt(int(rank), os.environ)\n"
    "pathlib.Path(f'ready-{rank}').touch()\n"
    "while not told: threading.Event().wait(0.05)\n"
)


@pytest.mark.parametrize(
    ("code", "deadlines", "how"),
    [
        (HALTS, {"halt_deadline_s": 0.0, "exit_deadline_s": NEVER_S}, ""),
        (HALTS + "threading.Event().wait()", {"exit_deadline_s": 0.5}, ""),
        (
            HALTS + "sys.exit(7)",
            {"halt_deadline_s": 0.0, "exit_deadline_s": NEVER_S},
            "rank 0 exited with status 7",
        ),
        (
            HALTS.replace("report_halt(int(rank), os.environ)", "") + "threading.Event().wait()",
            {"halt_deadline_s": 0.5},
            "rank 0 was killed by SIGKILL",
        ),
    ],
    ids=["exits late", "never exits", "fails after it", "never leaves its loop"],
)
def test_rank_that_left_its_loop_has_its_own_deadline_to_exit(
    tmp_path: Path, code: str, deadlines: dict[str, float], how: str
) -> None:
    launch = launch_of(tmp_path, REPORTS + code)
    ranks = LocalRanks(launch.command, {0: dict(os.environ) | {"RANK": "0"}}, **deadlines)
    stop = StopSignals()

    def signal_once_ready() -> None:
        while not (tmp_path / "ready-0").exists():
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_once_ready)
    thread.start()
    found = ranks.wait(stop)
    thread.join()

    assert found == how


def test_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    launch = Launch(deployment_in(tmp_path), 0, ["no-such-program"], dict(os.environ))

    with pytest.raises(ConfigError, match="no-such-program"):
        run(launch)
    with pytest.raises(ConfigError, match="no-such-program"):
        check_start(launch)


def test_place_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    named = {"deployment__name": f"west-{os.getpid()}", "network__rendezvous_port": port}
    launch = launch_of(tmp_path, "", **named)

    words = f"rank 1 of .* is run by process {os.getpid()} of this host, expected none"
    with closing(claim_place(launch.deployment.name, 1)), pytest.raises(RankError, match=words):
        check_start(launch)
    check_start(launch)


def test_rendezvous_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        launch = launch_of(tmp_path, "", network__rendezvous_port=port)

        with pytest.raises(ConfigError) as caught:
            check_start(launch)

    assert f"{port} of 127.0.0.1 (network.rendezvous_port)" in str(caught.value)


def test_rank_that_refused_to_start_is_not_started_again(tmp_path: Path) -> None:
    code = "import sys; open(f\"starts-{os.environ['RANK']}\", 'a').write('x'); sys.exit(2)"

    status, said = run(launch_of(tmp_path, code))

    assert status == 2
    assert (tmp_path / "starts-0").read_text() == "x"
    assert said[1].endswith("exited with status 2: it refused to start, and is not started again")


def test_ranks_that_refuse_after_they_served_start_once_the_refused_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.deploy.waits.LOOK_S", 0.05)
    monkeypatch.setattr("api.deploy.waits.TELL_AFTER_S", 0.0)
    weights = tmp_path / "weights"
    weights.write_text("whole")
    code = (
        REPORTS + "\nimport pathlib, sys; r = os.environ['RANK']\n"
        "with open(f'starts-{r}', 'a') as file: file.write('x')\n"
        "starts, found = len(open(f'starts-{r}').read()), open('weights').read()\n"
        "if starts == 1:\n"
        "    report_run(int(r), 'r1', os.environ); report_ready(int(r), os.environ)\n"
        "    open('weights', 'w').write('half'); sys.exit(1)\n"
        "sys.exit(0 if found == 'whole' else 2)"
    )
    launch = launch_of(tmp_path, code)
    launch = replace(launch, reread=Reread(weights, lambda: launch.deployment))
    told: list[str] = []

    def mend(line: str) -> bool:
        told.append(line)
        if "waits for a change of" in line:
            weights.write_text("whole")
        return False

    status, _ = run(launch, ends=mend)

    assert status == 0, told
    (tried,) = [line for line in told if "trying again once" in line]
    assert tried.endswith(f"trying again once {weights} changes")
    assert "exited with status 2: it refused to start: " in tried
    with closing(launch.deployment.opened_store()) as store:
        waits = [one.detail["message"] for one in store.latest_events() if one.kind == WAITING]
    assert (
        f"launcher of host 0 waits for a change of {weights}, after a refusal: rank " in waits[-1]
    )


def test_rank_that_refuses_to_join_is_started_again_only_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.deploy.launch.LOOK_S", 0.0)
    monkeypatch.setattr("api.deploy.waits.LOOK_S", 0.0)
    config, environ = tmp_path / "eplb.toml", dict(os.environ)
    config.write_text("a = 1")
    launch = launch_of(tmp_path, "")
    launch = replace(launch, reread=Reread(config, lambda: launch.deployment))
    words = [sys.executable, "-c", "import os, signal, sys\n" + REFUSES_AS_RANK_1]
    ranks = LocalRanks(words, {0: environ | {"RANK": "0"}}, joins=True)
    rejoins, stop = Rejoins(launch, SupervisionSettings()), StopSignals()
    looks, starts = 0, list[int]()

    def look() -> None:
        nonlocal looks
        due = rejoins.due(ranks)
        starts.extend(due)
        if due and len(starts) < 3:
            ranks.join(1, environ | {"RANK": "1"})
        looks += ranks.has_rank_refused(1)
        if looks == 6:
            config.write_text("b = 22")
        if len(starts) == 2 and looks >= 14:
            os.kill(os.getpid(), signal.SIGTERM)

    with closing(launch.deployment.opened_store()) as store:
        topology = topology_to_dict(launch.deployment.topology)
        store.begin_run(RunInfo("r1", 0.0, {}, topology, 1))
        ranks.wait(stop, look)

    assert starts == [1, 1]
    assert not ranks.has_refused  # of a rank that was to join, while another serves


@pytest.mark.system
def test_command_refuses_a_host_that_is_another_machine_s(tmp_path: Path) -> None:
    words = [str(EPLB), "launch"]
    named = SMALL | {"deployment.state_dir": tmp_path, "topology.nodes": 2}
    named |= {"deployment.store": "redis://198.51.100.9"}
    words += [word for item in named.items() for word in ("--setting", "{}={}".format(*item))]
    environ = clean_environ(EPLB_TOPOLOGY__HOSTS="198.51.100.1,198.51.100.2", EPLB_SECRET=SECRET)

    process = CommandProcess([*words, "--host", "1", "--", "true"], tmp_path, environ)
    status = process.ends()

    assert status == 2
    (line,) = process.lines
    assert "host 1 has address 198.51.100.2" in line


FORKED = """
import os, pathlib, sys

def main():
    pathlib.Path(sys.argv[1], f"rank-{os.environ['RANK']}").write_text(str(os.getppid()))
    if os.environ["RANK"] == "1":
        sys.exit("no more tokens")
"""


def test_ranks_of_a_module_are_forked_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forked_engine.py").write_text(FORKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    deployment = deployment_in(tmp_path)

    status, said = run(
        Launch(deployment, 0, [str(tmp_path)], dict(os.environ), module="forked_engine"),
        ends=lambda line: "rank 1" in line,
    )

    assert status == 128 + signal.SIGTERM
    assert said[1].startswith("rank 1 exited with status 1; starting the ranks")
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == [str(os.getpid())] * 2
    assert "no more tokens\n" in capfd.readouterr().err


def test_module_without_main_is_refused(tmp_path: Path) -> None:
    for module in ("no_such_module", "json"):
        launch = Launch(deployment_in(tmp_path), 0, [], dict(os.environ), module=module)
        with pytest.raises(ConfigError, match=f"--module {module} cannot be used: "):
            run(launch)
