"""The pages: their code runs, and what they name exists."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tomllib
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app
from api.config.tree import load, profile_names
from rebalance.engines.common.start import GAUGE
from rebalance.engines.vllm.replay import STRATEGY
from telemetry import open_store
from telemetry.formats.engines.vllm import STATS
from tests.support.documents import (
    GENERATED,
    PACKAGES,
    Block,
    all_blocks,
    blocks,
    commands,
    generated_sections,
    pages,
    text_of,
)
from tests.support.pages.document_facts import (
    anchors,
    is_known,
    metric_names,
    run_to_end,
    shell_lines,
)
from tests.support.redis_servers import RedisProcess
from tests.support.repository import ROOT

SERVICE = "127.0.0.1:8765"  # of the pages; the test's own demo takes any free port
CURL_REFUSED = 22  # exit status of ``curl --fail`` for an answer of 400 or more
ADDRESS = re.compile(r"^(http://)?[\d.]+:8765")
OF_DEPLOYMENT = re.compile(r"^/deployments/[^/]+(?=/)")  # before any route
LANGUAGES = {"python", "sh", "conf", "toml", "json", "yaml", "mermaid", "output", "text"}
# Blocks that no test runs, by page. Each has its reason beside it in the page.
NOT_RUN = {
    "README.md": 2,
    "docs/deployment-hosts.md": 12,
    "docs/deployment.md": 16,
    "docs/embedding.md": 1,
    "docs/engines.md": 5,
    "docs/operations.md": 2,
    "docs/rebalancing.md": 1,
    "docs/rest.md": 1,
}
PROGRAMS = {"eplb", "make", "curl", "python", "head", "chmod", "torchrun", "pip", "redis-server"}
PROGRAMS |= {"vllm", "python3", ".", "export", "kill"}  # that make and enter an environment
PROGRAMS |= {"docker", "kubectl", "cp", "systemctl", "journalctl"}  # of docs/deployment-hosts.md
PROGRAMS |= {"ip", "mkdir"}
QUICK_PAGES = {"README.md"}  # those that `make test` runs
ALERTS = ROOT / "api" / "metrics" / "observability" / "alerts.yaml"

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
].keys()

BLOCKS = all_blocks()
SHELL = [block for block in BLOCKS if block.language == "sh"]
LINK = re.compile(r"\](?:\(|: )([^)\s]+)")
PATH = re.compile(
    r"(?<![\w/.-])((?:docs|tests|benchmarks|api|eplb|rebalance|runtime|simulations|telemetry)/[\w./-]*)"
)
MODULE = re.compile(rf"`((?:{'|'.join(PACKAGES)}|benchmarks)(?:\.\w+)+)[`(]")
METRIC = re.compile(r"\beplb_[a-z_]+\b")


def named(block: Block) -> str:
    return block.name


@pytest.mark.parametrize("path", [ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_text_has_no_marks_of_a_merge(path: Path) -> None:
    assert re.findall(r"^(?:<{7}|>{7}|={7})(?: .*)?$", path.read_text(), re.MULTILINE) == []


def test_every_block_has_a_language_that_a_test_knows() -> None:
    unknown = {block.name: block.language for block in BLOCKS if block.language not in LANGUAGES}

    assert unknown == {}


def test_blocks_that_do_not_run_are_counted_and_have_a_reason() -> None:
    reasons = {block.name: block.not_run for block in BLOCKS if block.not_run is not None}
    print("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))
    found = [name.partition(":")[0] for name in reasons]

    assert {page: found.count(page) for page in found} == NOT_RUN
    assert all(len(str(reason)) > 10 for reason in reasons.values())


# -- code

PYTHON_PAGES = sorted({b.page for b in BLOCKS if b.language == "python" and not b.not_run})


# Ranks, or the transformers library: 6 to 30 s each.
SLOW_PAGES = {"docs/api.md", "docs/architecture.md", "docs/embedding.md"}


def tier_of(page: str, *, is_slow: bool) -> list[Any]:
    if page in QUICK_PAGES:
        return []
    return [pytest.mark.slow if is_slow else pytest.mark.system]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=tier_of(page, is_slow=page in SLOW_PAGES)) for page in PYTHON_PAGES],
)
def test_python_of_a_page_runs_and_prints_its_output_block(page: str, tmp_path: Path) -> None:
    fenced = list(blocks(page))
    run = [block for block in fenced if block.language == "python" and not block.not_run]
    said = {
        before.line: after.code
        for before, after in itertools.pairwise(fenced)
        if after.language == "output"
    }

    status, output, errors = run_to_end(
        [sys.executable, str(ROOT / "tests" / "support" / "pages" / "run_blocks.py"), page],
        tmp_path,
        os.environ | {"PYTHONPATH": str(ROOT)},
        json.dumps([[block.line, block.code] for block in run]),
    )

    assert status == 0, errors
    printed = output.split("\x1e\n")
    for block, words in zip(run, printed, strict=False):
        if block.line in said:
            expected = re.escape(said[block.line]).replace(r"\.\.\.", ".*")
            assert re.fullmatch(expected, words, re.DOTALL), f"{block.name} printed:\n{words}"


def parse_command(words: list[str]) -> None:
    """Parse an ``eplb`` command with the parser of the command line itself."""
    name = max((n for n in commands() if words[: len(n.split())] == n.split()), key=len)
    context = commands()[name].make_context(name, words[len(name.split()) :])
    context.close()


@cache
def routes() -> set[str]:
    """Paths of the REST API."""
    return set(create_app(open_store("memory:", "documents")).openapi()["paths"])


@pytest.mark.parametrize("block", SHELL, ids=named)
def test_every_command_of_a_page_exists(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in shell_lines(block.code):
        program = Path(words[0]).name or words[0]
        assert program in PROGRAMS, f"{block.name}: {words[0]}"
        if program == "eplb":
            parse_command([program, *words[1:]])
        elif program == "make":
            assert f"\n{words[1]}:" in makefile, f"{block.name}: make {words[1]}"
        elif program == "curl":
            path = ADDRESS.sub("", words[-1]).partition("?")[0]
            path = OF_DEPLOYMENT.sub("", path)
            assert path in routes() or path == "/api/v1/openapi.json", f"{block.name}: {path}"
        elif program == "pip":
            for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                assert set(extras.split(",")) <= EXTRAS, f"{block.name}: {extras}"
        elif program == "python" and words[1:2] == ["-m"]:
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists() or (
                ROOT / words[2].replace(".", "/") / "__main__.py"
            ).exists(), f"{block.name}: {words[2]}"


SHELL_RUN = [block for block in SHELL if not block.not_run]
SIMULATIONS = [  # of any folder, and of `eplb` alone: without a process they take a second
    block
    for block in SHELL_RUN
    if block.page in QUICK_PAGES and block.code.startswith("eplb simulate")
]


@pytest.mark.parametrize("block", SIMULATIONS, ids=named)
def test_simulation_of_a_page_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for words in shell_lines(block.code):
        done = CliRunner().invoke(app, words[1:])

        assert done.exit_code == 0, done.output


def is_slow(block: Block) -> bool:
    # Replays with many plans; a peer that plans slowly; commands of operators, 5 to 28 s a block.
    slow_pages = ("docs/simulator.md", "docs/engines.md", "docs/operations.md")
    slow_words = ("flashlb", "eplb config --live", "eplb store backup")
    return block.page in slow_pages or any(words in block.code for words in slow_words)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=tier_of("", is_slow=is_slow(block)), id=named(block))
        for block in SHELL_RUN
        if block not in SIMULATIONS
    ],
)
def test_shell_of_a_page_runs(block: Block, watched_demo: Any) -> None:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("EPLB_")}
    code = block.code.replace(SERVICE, watched_demo.url.removeprefix("http://"))

    # A demo may stop being ready on a busy machine, and a block of a page may ask whether it is.
    for _ in range(5 if "/readyz" in code else 1):
        watched_demo.sees("readiness", lambda _: watched_demo.get("/readyz").is_success)
        status, output, errors = run_to_end(
            ["bash", "-euc", code],
            watched_demo.state_dir.parent,
            environ | {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"},
        )
        if status != CURL_REFUSED:
            break

    assert status == 0, output + errors


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("toml", "json")], ids=named)
def test_data_of_a_page_is_accepted(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        json.loads(block.code)
        return
    if "project" in tomllib.loads(block.code):  # of a user's own package
        return
    (file := tmp_path / "settings.toml").write_text(block.code)
    for profile in profile_names(file, {}) or [None]:
        load({}, config=file, environ={}, profile=profile)


def test_store_opens_on_redis_with_the_settings_of_the_page(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "conf"]
    # Redis knows comments as whole lines alone.
    lines = [line.split() for line in block.code.splitlines() if not line.startswith("#")]

    with (
        RedisProcess(tmp_path, dict(lines)) as server,
        closing(open_store(server.url, "documents")) as store,
    ):
        assert getattr(store.backend, "durability", None) == "always"


# -- what pages name


@pytest.mark.parametrize("page", pages())
def test_links_of_a_page_resolve(page: str) -> None:
    broken = []
    for link in LINK.findall(text_of(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if link.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("page", pages())
def test_paths_and_modules_that_a_page_names_exist(page: str) -> None:
    text = text_of(page)
    paths = {found.rstrip(".-") for found in PATH.findall(text)}

    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    assert [name for name in sorted(set(MODULE.findall(text))) if not is_known(name)] == []


def test_metrics_that_pages_name_exist_and_all_are_documented() -> None:
    named_by_pages = {name for page in pages() for name in METRIC.findall(text_of(page))}

    assert named_by_pages - metric_names() - {GAUGE, STRATEGY, STATS} == set()  # of engines
    assert metric_names() - set(METRIC.findall(text_of("docs/rest.md"))) == set()


def test_every_alert_has_a_section_with_its_rule_and_what_to_do() -> None:
    sections = text_of("docs/operations.md").split("\n### ")[1:]
    written = {part.partition("\n")[0]: part for part in sections if part.startswith("Eplb")}
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]

    assert list(written) == [rule["alert"] for rule in rules]
    for rule in rules:
        section = written[rule["alert"]]
        given = f"`{rule['expr']}`" + (f" for {rule['for']}" if "for" in rule else "")
        assert section.splitlines()[1] == given
        for part in ("Meaning", "Check", "Action"):
            assert f"- **{part}.** " in section, f"{rule['alert']} has no {part}"


def test_generated_sections_are_what_the_code_gives() -> None:
    """If this fails: ``python tests/support/documents.py`` writes them again."""
    found = {name: (page, section) for page, name, section in generated_sections()}

    assert found.keys() == GENERATED.keys()
    for name, (page, section) in found.items():
        assert section == GENERATED[name](), f"{page}: run python tests/support/documents.py"
