"""No code of ours runs what it reads, or serves a rendezvous by TCP: proven from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.repository import ROOT

PACKAGES = ("eplb", "runtime", "telemetry", "rebalance", "api", "simulations")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
CALLS = {"eval", "exec", "TCPStore", "dist.TCPStore", "torch.load"}
FORBIDDEN = MODULES | OBJECT_COLLECTIVES | CALLS | {"allow_pickle"}
MENTIONS = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b")


def unsafe(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything that unpickles, evaluates, or listens to whoever connects."""
    if not MENTIONS.search(source):
        return  # which spares most files a walk
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            names = [module, *({alias.name for alias in node.names} & OBJECT_COLLECTIVES)]
        elif isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
            names = [node.attr]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            names = [called, called.rpartition(".")[2]] if called in CALLS else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            names = [] if ast.unparse(node.value) == "False" else ["allow_pickle"]
        yield from ((node.lineno, name) for name in names if name in FORBIDDEN)


# Ranks of several hosts meet at a store of torch, as with torchrun. Who reaches its port before all
# have met can keep them from starting; docs/security.md names it among the open ports.
ALLOWED = {"rebalance/assembly/meeting.py": {"TCPStore"}}


@pytest.mark.parametrize("folder", PACKAGES)
def test_package_neither_unpickles_nor_evaluates_nor_serves_a_tcp_store(folder: str) -> None:
    assert strays(folder, FORBIDDEN) == []


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_group_code_outside_packages_uses_no_object_collective(folder: str) -> None:
    assert strays(folder, OBJECT_COLLECTIVES) == []


def strays(folder: str, forbidden: set[str]) -> list[str]:
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources, f"{folder} has no source"
    return [
        f"{source.relative_to(ROOT)}:{line}: {name}"
        for source in sources
        for line, name in unsafe(source.read_text())
        if name in forbidden - ALLOWED.get(str(source.relative_to(ROOT)), set())
    ]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.memory",
        "dist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list as b",
        "np.load(file, allow_pickle=True)",
        "torch.load(file)",
        "eval(text)",
        "store = TCPStore('127.0.0.1', 0, is_master=True)",
    ],
)
def test_scan_finds_what_it_is_to_forbid(line: str) -> None:
    assert list(unsafe(line))
