"""A deployment whose HTTP service has TLS: all its commands, on two addresses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from runtime.checkpoints.checkpoint import Checkpoint
from tests.support.certificates import Authority
from tests.support.deployments import (
    TOY_ENGINE,
    TOY_MODEL,
    CommandProcess,
    clean_environ,
    free_ports,
)
from tests.support.repository import ROOT

HOSTS = ("127.0.0.1", "127.0.0.2")
SECRET = "0123456789abcdef0123456789abcdef"
CONFIG = """
[deployment]
name = "tls-{ports[0]}"
store = "{folder}/store.sqlite"
[model]
checkpoint = "{weights}"
{toy_model}
[topology]
nodes = 2
ranks_per_node = 1
hosts = ["127.0.0.1", "127.0.0.2"]
device = "cpu"
[network]
rendezvous_port = {ports[0]}
join_deadline_s = 3600
fill_deadline_s = 3600
[http]
port = 0
tls_certificate_file = "{http.chain}"
tls_key_file = "{http.key}"
[controller]
stage = "all"
"""


class TwoAddresses:
    """Two hosts of a deployment, both of this machine."""

    def __init__(self, stack: ExitStack, folder: Path, weights: Path) -> None:
        self._stack, self.folder = stack, folder
        self.http = Authority(folder / "http")
        shutil.copy(TOY_ENGINE, folder / "engine.py")
        given = {"folder": folder, "ports": free_ports(1), "http": self.http.issue(HOSTS[0])}
        text = CONFIG.format(weights=weights, toy_model=TOY_MODEL, **given)
        (folder / "eplb.toml").write_text(text)

    def start(self, *words: str) -> CommandProcess:
        environ = clean_environ(EPLB_CONFIG="eplb.toml", EPLB_SECRET=SECRET, PYTHONPATH=str(ROOT))
        process = CommandProcess(["eplb", *words], self.folder, environ)
        self._stack.callback(process.kill)
        return process

    def ask(self, url: str) -> dict[str, object]:
        """Ask the HTTP service as a program with its token, which trusts its authority alone."""
        token = (self.folder / ".eplb" / "http-token").read_text().strip()
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        context = ssl.create_default_context(cafile=self.http.file)
        with urllib.request.urlopen(request, context=context) as answer:
            found: dict[str, object] = json.loads(answer.read())
            return found


@pytest.fixture
def two(tmp_path: Path, small_checkpoint: Checkpoint) -> Iterator[TwoAddresses]:
    with ExitStack() as stack:
        yield TwoAddresses(stack, tmp_path, small_checkpoint.path)


@pytest.mark.slow
def test_deployment_of_two_hosts_serves_over_https(two: TwoAddresses) -> None:
    check = two.start("check", "--host", "0")
    assert check.ends() == 0, check.lines
    assert [line for line in check.lines if re.match(r"ok +TLS of HTTP: the cert", line)]
    serve = two.start("serve")
    url = serve.wait_for("eplb serve: https://").split()[-1]
    caches = [two.start("host-cache", "--host", str(host)) for host in (0, 1)]
    for cache in caches:
        cache.wait_for("ready: 16 records")
    engine = ("--", sys.executable, "engine.py")
    launches = [two.start("launch", "--host", str(host), *engine) for host in (0, 1)]

    launches[0].wait_for("engine: generation 1 serves")
    while not two.ask(f"{url}/api/v1/state")["generation"]:  # a rank serves it first
        Event().wait(0.1)
    with pytest.raises((urllib.error.URLError, ConnectionError, TimeoutError)):
        urllib.request.urlopen(url.replace("https:", "http:") + "/livez")
    assert launches[1].ends(signal.SIGTERM) == 0, launches[1].lines
    assert launches[0].ends() == 0, launches[0].lines

    printed = "".join(line for one in launches for line in one.lines)
    assert len(re.findall(r"rank \d ended, 0 of [1-9]\d* wrong", printed)) == 2, printed
    for process in (serve, *caches):
        assert process.ends(signal.SIGTERM) == 0, process.lines
