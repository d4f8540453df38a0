"""What tests of a page need: its programs run to their end; commands, anchors, modules, metrics."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from api.config.tree import Settings
from tests.support.repository import ROOT

METRICS = ROOT / "api" / "metrics" / "definitions.py"
ENDING_OF = {"_gauge": "", "_histogram": "", "_counter": "_total"}


def shell_lines(code: str) -> Iterator[list[str]]:
    """The words of each command, comments and all after a pipe left out."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words[: words.index("|")] if "|" in words else words


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_known(dotted: str) -> bool:
    """Whether this is a setting, a module, or something in one."""
    if dotted in Settings.known:
        return True
    module, _, rest = dotted, "", ""
    while module:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
            continue
        for name in filter(None, rest.split(".")):
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def metric_names() -> set[str]:
    """Every name of ``api/metrics/definitions.py``, as it calls its makers."""
    found = set()
    for node in ast.walk(ast.parse(METRICS.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if not node.args or not isinstance(first := node.args[0], ast.Constant):
            continue
        if node.func.id in ENDING_OF:
            found.add(f"eplb_{first.value}{ENDING_OF[node.func.id]}")
        elif node.func.id == "Metric":
            found.add(str(first.value))
    return found


def run_to_end(
    command: list[str], folder: Path, environ: dict[str, str], given: str = ""
) -> tuple[int, str, str]:
    """Status, output and errors of a program. No process that it started outlives it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    program = subprocess.Popen(
        command, cwd=folder, env=environ, text=True, start_new_session=True, **pipes
    )
    try:
        output, errors = program.communicate(given)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    return program.wait(), output, errors
