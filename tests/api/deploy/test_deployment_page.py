"""The pages of deployments, as printed: one host and two, Redis, the commands, the outputs.

Hosts are network namespaces, so that addresses and ports are those of the page.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.deployments import EPLB, CommandProcess, clean_environ
from tests.support.documents import blocks, files_of
from tests.support.redis_servers import find_redis_server
from tests.support.repository import ROOT
from tests.support.two_hosts import ADDRESSES, INTERFACES, TwoHosts

PAGE, HOSTS_PAGE = "docs/deployment.md", "docs/deployment-hosts.md"
ELSEWHERE_TRIED = "Prefill and decode"  # section, by test_profiles.py
MOST_ENGINE_LINES = 70
ACTIVATE = next(block.code for block in blocks(PAGE) if block.code.startswith(". venv"))
ON_ONE_MACHINE = "Two hosts on one machine"  # section
HOST_LINES = next(b.code for b in blocks(HOSTS_PAGE) if b.code.startswith("ip netns add"))
CUT, MEND = next(b.code for b in blocks(HOSTS_PAGE) if " down\n" in b.code).splitlines()
SERVE_ON = next(
    b.code for b in blocks(HOSTS_PAGE) if b.section == ON_ONE_MACHINE and b.language == "toml"
)
# The second begins every command here; test_deploy_files.py has the others.
ELSEWHERE = ("pip install", ". venv", "torchrun", "docker", "kubectl", "systemctl", "ip ")


def commands_of(page: str) -> list[str]:
    """The commands of a page that these tests run, in order."""
    return [
        line
        for block in blocks(page)
        if block.language == "sh" and block.section != ELSEWHERE_TRIED
        if not any(words in block.code for words in ELSEWHERE)
        for line in block.code.splitlines()
    ]


def outputs_of(page: str) -> dict[str, list[str]]:
    """The lines that a page prints after a command, by the last line of its block."""
    found = {}
    for before, after in itertools.pairwise(blocks(page)):
        if after.language == "output" and after.section != ELSEWHERE_TRIED:
            found[before.code.splitlines()[-1]] = after.code.splitlines()
    return found


def is_as_printed(found: str, printed: str) -> bool:
    return re.fullmatch(re.escape(printed).replace(r"\.\.\.", ".*"), found) is not None


def assert_as_printed(found: list[str], printed: list[str]) -> None:
    assert len(found) == len(printed), found
    for one, line in zip(found, printed, strict=True):
        assert is_as_printed(one, line), f"{one!r} is not {line!r}"


def wait_for_printed(process: CommandProcess, printed: list[str]) -> None:
    for line in printed:
        process.wait_for(line.partition("...")[0])
    found = [one for one in process.lines if one.startswith(("eplb ", "engine:"))]
    for line in printed:
        assert any(is_as_printed(one, line) for one in found), f"{line!r} is not in {found}"


class HostsOfThePage(TwoHosts):
    """Made by the commands of the page, in namespaces that end with the test."""

    script = f"""
set -e
mount -t tmpfs none /run  # has the names of networks
{HOST_LINES.partition("mkdir")[0]}
echo $$ $$
cat
"""

    def on(self, host: int, words: list[str]) -> list[str]:
        """Give the words that run a command on a host."""
        return self.outside(["ip", "netns", "exec", f"host{host}", *words])

    def outside(self, words: list[str]) -> list[str]:
        """Give the words that run a command of root beside the hosts."""
        enter = ["nsenter", "--target", self._pids[0], "--user", "--net", "--mount", "--wd=."]
        return [*enter, "--preserve-credentials", "--", *words]


class Hosts:
    """The hosts of the pages, each with a folder that has its files."""

    def __init__(self, stack: ExitStack, root: Path, config: str) -> None:
        self._stack, self._root, self.folders, self.ran = stack, root, [root], set[str]()
        self._prepared, self._has_names = ACTIVATE.replace("eplb.toml", config), False
        try:
            self.spaces = stack.enter_context(HostsOfThePage())
        except OSError as exc:
            pytest.skip(str(exc))
        self._environ = clean_environ(PYTHONPATH=str(ROOT))
        for name, code in {**files_of(PAGE), **files_of(HOSTS_PAGE)}.items():
            (root / name).write_text(code)
        # In place of the installation: this environment, and the server that tests have.
        activate = root / "venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'PATH="{EPLB.parent}:{find_redis_server().parent}:$PATH"\n')

    def make_folders(self) -> None:
        """Give each host its folder, as the page does."""
        _, word, rest = HOST_LINES.partition("mkdir")
        subprocess.run(["bash", "-euc", word + rest], cwd=self._root, check=True)
        self.folders = [self._root / "host0", self._root / "host1"]
        self._prepared = self._prepared.replace(". venv", ". ../venv")

    def outside(self, line: str) -> None:
        """Run a command of root beside the hosts."""
        subprocess.run(self.spaces.outside(line.split()), check=True)

    def name(self, *names: str) -> None:
        """Have each host know the hosts by names, in an /etc/hosts of its own."""
        known = [f"{address} {name}" for address, name in zip(ADDRESSES, names, strict=True)]
        for folder in self.folders:
            (folder / "names").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self._has_names = True

    def start(self, host: int, line: str, *, is_of_page: bool = True) -> CommandProcess:
        """Start a command in a shell that the page has prepared."""
        if is_of_page:
            self.ran.add(line)
        has_more = ">" in line or "|" in line
        # The folder by its name: as inherited it is of the mounts outside of the host.
        script = f'cd "$PWD"\n{self._prepared}' + (line if has_more else f"exec {line}")
        shell = ["bash", "-euc", script]
        if self._has_names:
            shell[-1] = f"mount --bind names /etc/hosts\n{script}"
            shell = ["unshare", "--mount", *shell]
        entered = self.spaces.on(host, shell)
        process = CommandProcess(entered, self.folders[host], self._environ)
        self._stack.callback(process.kill)
        return process

    def run(self, host: int, line: str, *, is_of_page: bool = True) -> tuple[int, list[str]]:
        process = self.start(host, line, is_of_page=is_of_page)
        return process.ends(), process.lines

    def succeed(self, host: int, line: str, *, is_of_page: bool = True) -> list[str]:
        status, lines = self.run(host, line, is_of_page=is_of_page)
        assert status == 0, "\n".join(lines)
        return lines


@pytest.fixture
def one_host(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        made = Hosts(stack, tmp_path, "eplb.toml")
        made.succeed(0, "python make_model.py")
        yield made


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        made = Hosts(stack, tmp_path, "hosts.toml")
        made.succeed(0, "python make_model.py", is_of_page=False)
        for line in commands_of(HOSTS_PAGE)[:2]:  # the secret
            made.succeed(0, line)
        made.make_folders()
        redis_line = next(line for line in commands_of(HOSTS_PAGE) if "redis-server" in line)
        made.start(0, redis_line).wait_for("Ready to accept connections")
        yield made


def wrong_of(launches: list[CommandProcess], num_ranks: int, num_compared: int = 0) -> int:
    """Comparisons that differed, of ranks that have all ended; the first have compared, or all."""
    printed = "".join(line for one in launches for line in one.lines)  # two may share a line
    ended = re.findall(r"rank (\d) ended, (\d+) of (\d+) wrong", printed)
    assert sorted(rank for rank, *_ in ended) == [str(rank) for rank in range(num_ranks)], printed
    compared = [
        int(checked) for rank, _, checked in ended if int(rank) < (num_compared or num_ranks)
    ]
    assert all(compared), ended
    return sum(int(wrong) for _, wrong, _ in ended)


def test_engine_of_the_page_is_short() -> None:
    assert len(files_of(PAGE)["engine.py"].splitlines()) <= MOST_ENGINE_LINES


def test_every_output_of_the_page_follows_a_command_that_is_run() -> None:
    for page in (PAGE, HOSTS_PAGE):
        assert set(outputs_of(page)) <= set(commands_of(page))


@pytest.mark.slow  # a minute: two ranks that import the library
def test_page_of_one_host_runs_as_printed(one_host: Hosts) -> None:
    redis_line = next(line for line in commands_of(PAGE) if "redis-server" in line)
    launch_line = "eplb launch -- python engine.py"
    outputs = outputs_of(PAGE)
    one_host.start(0, redis_line).wait_for("Ready to accept connections")
    assert_as_printed(one_host.succeed(0, "eplb check"), outputs["eplb check"])

    started = [one_host.start(0, line) for line in ("eplb serve", "eplb host-cache")]
    for process, line in zip(started, ("eplb serve", "eplb host-cache"), strict=True):
        wait_for_printed(process, outputs[line])
    launch = one_host.start(0, launch_line)
    wait_for_printed(launch, outputs[launch_line])

    assert_as_printed(
        one_host.succeed(0, "eplb status --verbose"), outputs["eplb status --verbose"]
    )
    curl = next(line for line in commands_of(PAGE) if line.startswith("curl"))
    assert '"decision"' in one_host.succeed(0, curl)[0]
    shown = "curl -s http://127.0.0.1:8765/api/v1/imbalance"  # what the page draws
    drawn = json.loads(one_host.succeed(0, shown, is_of_page=False)[0])
    assert [one["generation"] for one in drawn["rebalances"]][:1] == [1]

    assert launch.ends(signal.SIGINT) == 0, launch.lines
    # A router may choose the other one of two experts that are within a rounding of each other.
    assert wrong_of([launch], 2) <= 1, launch.lines
    for process in started:
        assert process.ends(signal.SIGTERM) == 0, process.lines
    assert one_host.ran == set(commands_of(PAGE))


@pytest.mark.slow  # a minute of two hosts
def test_page_of_several_hosts_runs_as_printed_on_two_hosts(hosts: Hosts) -> None:
    outputs, launch_line = outputs_of(HOSTS_PAGE), "eplb launch -- python engine.py"
    for host in range(2):
        first = hosts.succeed(host, "eplb check")[0]
        assert first.endswith(f"4 ranks on 2 hosts, this is host {host}, {ADDRESSES[host]}")

    serve = hosts.start(0, "eplb serve")
    wait_for_printed(serve, outputs["eplb serve"])
    caches = [hosts.start(host, "eplb host-cache") for host in range(2)]
    for cache in caches:
        cache.wait_for("ready: 32 records")
    launches = [hosts.start(host, launch_line) for host in range(2)]
    launches[0].wait_for("engine: generation 1 serves")

    lines = hosts.succeed(1, "eplb status --verbose", is_of_page=False)
    header = next(number for number, line in enumerate(lines) if line.startswith("rank  node"))
    assert [line.split()[:2] for line in lines[header + 1 : header + 5]] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "1"],
        ["3", "1"],
    ]
    curl = next(line for line in commands_of(HOSTS_PAGE) if line.startswith("curl"))
    assert '"decision"' in hosts.succeed(0, curl)[0]
    unknown = f"curl -s http://{ADDRESSES[0]}:8765/api/v1/plan"
    assert '"status":401' in hosts.succeed(1, unknown, is_of_page=False)[0]
    reach = f"exec 3<>/dev/tcp/{ADDRESSES[0]}/29400"  # ranks have met: no stranger comes in
    assert hosts.run(1, f"timeout 2 bash -c '{reach}'", is_of_page=False)[0] == 124
    assert_no_secret_is_shown(hosts, [serve, *caches, *launches])

    assert launches[1].ends(signal.SIGTERM) == 0, launches[1].lines
    assert launches[0].ends() == 0, launches[0].lines
    assert wrong_of(launches, 4) <= 1, launches[0].lines
    for process in (serve, *caches):
        assert process.ends(signal.SIGTERM) == 0, process.lines
    assert hosts.ran == set(commands_of(HOSTS_PAGE))


@pytest.mark.slow  # a minute of two hosts
def test_hosts_of_the_page_serve_on_while_its_cable_is_cut(hosts: Hosts) -> None:
    for folder in hosts.folders:
        with (folder / "hosts.toml").open("a") as file:
            file.write(SERVE_ON)
    launch_line = "eplb launch -- python engine.py"
    for host in range(2):
        hosts.start(host, "eplb host-cache").wait_for("ready: 32 records")
    launches = [hosts.start(host, launch_line) for host in range(2)]
    launches[0].wait_for("engine: generation 0 serves")

    hosts.outside(CUT)
    launches[0].wait_for("rank 0 serves in run")  # without ranks 2 and 3
    hosts.outside(MEND)
    launches[1].wait_for("rank 3 serves in run")  # they have joined

    assert launches[1].ends(signal.SIGTERM) == 0, launches[1].lines
    assert launches[0].ends() == 0, launches[0].lines
    # Ranks 2 and 3 may have joined just now, with no pass that is compared.
    assert wrong_of(launches, 4, num_compared=2) <= 1, launches[0].lines


def ranks_of(launch: CommandProcess) -> list[int]:
    """Process ids of the ranks that a launcher has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if os.getsid(int(path.name)) == launch.process.pid and words[1:2] == [b"engine.py"]:
                found.append(int(path.name))
    return found


@pytest.mark.slow
def test_ranks_of_both_hosts_serve_again_after_one_was_killed(hosts: Hosts) -> None:
    caches = [hosts.start(host, "eplb host-cache") for host in range(2)]
    for cache in caches:
        cache.wait_for("ready: 32 records")
    launch = f"eplb launch -- {sys.executable} engine.py"
    first, second = (hosts.start(host, launch, is_of_page=False) for host in range(2))
    first.wait_for("engine: generation 0 serves")

    os.kill(ranks_of(second)[0], signal.SIGKILL)
    for process in (first, second):
        process.wait_for("; starting the ranks of this host again")
    first.wait_for("engine: generation 0 serves", times=2)

    assert first.ends(signal.SIGTERM) == 0, first.lines
    assert second.ends() == 0, second.lines
    assert wrong_of([first, second], 4) <= 1, first.lines


@pytest.mark.slow
def test_hosts_that_the_configuration_names_serve_and_move(hosts: Hosts) -> None:
    hosts.name("node-a", "node-b")
    for folder in hosts.folders:
        text = (folder / "hosts.toml").read_text()
        named = text.replace('"10.0.0.1", "10.0.0.2"', '"node-a", "node-b"')
        (folder / "hosts.toml").write_text(named.replace("redis://10.0.0.1", "redis://node-a"))
        assert named != text
    for host in range(2):
        first = hosts.succeed(host, "eplb check")[0]
        assert first.endswith(f"4 ranks on 2 hosts, this is host {host}, {ADDRESSES[host]}")

    serve = hosts.start(0, "eplb serve")
    caches = [hosts.start(host, "eplb host-cache") for host in range(2)]
    for cache in caches:
        cache.wait_for("ready: 32 records")
    launches = [hosts.start(host, "eplb launch -- python engine.py") for host in range(2)]
    launches[0].wait_for("engine: generation 1 serves")

    assert launches[1].ends(signal.SIGTERM) == 0, launches[1].lines
    assert launches[0].ends() == 0, launches[0].lines
    assert wrong_of(launches, 4) <= 1, launches[0].lines
    for process in (serve, *caches):
        assert process.ends(signal.SIGTERM) == 0, process.lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ports", "line", "expected"),
    [
        ("6379", "eplb check", "refused  store: "),
        ("29400", "eplb launch -- python engine.py", "waits for rank 0, at 10.0.0.1:29400"),
        (
            "32768:60999",
            "eplb launch -- python engine.py",
            "waits for its connections to all ranks, ports 32768-60999 of their hosts",
        ),
    ],
)
def test_port_that_a_firewall_closes_is_named(
    hosts: Hosts, ports: str, line: str, expected: str
) -> None:
    is_launch = "launch" in line
    if is_launch:
        for host in range(2):
            hosts.start(host, "eplb host-cache").wait_for("ready: 32 records")
    hosts.spaces.cut("drop what opens a connection", ports)
    if is_launch:
        hosts.start(0, line)

    hosts.start(1, line).wait_for(expected)


@pytest.mark.slow
def test_address_that_two_hosts_claim_is_named_by_the_check_and_refuses_the_second(
    hosts: Hosts,
) -> None:
    # A store that both reach: a machine does not leave its own network for its own address.
    for host, address, interface in ((0, "10.0.0.3/24", INTERFACES[0]), (1, "10.0.0.1/32", "lo")):
        words = ["ip", "address", "add", address, "dev", interface]
        subprocess.run(hosts.spaces.on(host, words), check=True)
    redis = "redis-server --bind 10.0.0.3 --port 6379 --save '' --protected-mode no"
    hosts.start(0, redis, is_of_page=False).wait_for("Ready to accept connections")
    for folder in hosts.folders:
        text = (folder / "hosts.toml").read_text().replace("redis://10.0.0.1", "redis://10.0.0.3")
        (folder / "hosts.toml").write_text(text)
    first = hosts.start(0, "eplb launch -- python engine.py")
    first.wait_for("eplb launch: ")
    found = rf"the launcher of host 0 is process {first.process.pid} on host \S+"

    # Of another machine: with a list of processes of its own.
    machine = "unshare --pid --fork --mount-proc"
    _, lines = hosts.run(1, f"{machine} eplb check --host 0", is_of_page=False)
    assert re.search(rf"refused  places: {found}, expected no process", "\n".join(lines)), lines
    launch = f"{machine} eplb launch --host 0 -- python engine.py"
    status, lines = hosts.run(1, launch, is_of_page=False)

    assert status == 2
    assert re.search(rf"{found}, and this is process \d+ on", lines[-1]), lines
    first.ends(signal.SIGTERM)


def assert_no_secret_is_shown(hosts: Hosts, processes: list[CommandProcess]) -> None:
    secret = (hosts.folders[0] / "secret").read_text().strip()
    shown = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
    printed = "\n".join(line for process in processes for line in process.lines)

    assert "engine.py" in shown
    assert secret not in shown + printed
