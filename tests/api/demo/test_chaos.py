"""``eplb demo --chaos``: links that are cut, how faults are told, and a whole run."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from api.demo.chaos import Fault, summary_of
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
CUT = """
import socket, sys
from api.demo.chaos import cut_links
ends = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
cut_links(int(sys.argv[1]))
ends[0].sendall(b"kept")
"""


def test_cut_shuts_every_tcp_connection_down_but_those_to_the_store() -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [str(one.getsockname()[1]) for one in listeners]

        done = subprocess.run([sys.executable, "-c", CUT, *ports], check=False, cwd=ROOT)

        received = [stack.enter_context(one.accept()[0]).recv(16) for one in listeners]
    assert done.returncode == 0
    assert received == [b"kept", b"", b""]


def test_fault_that_was_not_survived_is_counted() -> None:
    faults = [Fault("rank 1 was killed", 1.0, 0.25, "the others serve on"), Fault("rank 2", 2.0)]

    assert [one.text for one in faults] == [
        "rank 1 was killed: the others serve on after 0.25 s",
        "rank 2: not survived",
    ]
    assert summary_of(faults)["faults_survived"] == 1


@pytest.mark.slow
def test_demo_survives_four_faults_and_all_answers_are_right(
    tmp_path: Path, start_demo: Callable[..., Any]
) -> None:
    demo = start_demo(tmp_path, "--chaos", *TEXT, seconds=12, slots_per_rank=6, lease_ttl_s=NEVER_S)

    summary = demo.ends_right()

    assert (summary["faults_survived"], len(summary["faults"])) == (4, 4)
    kept = [one["what"] for one in summary["faults"] if "others" in one["outcome"]]
    assert len(kept) == 2, summary["faults"]
