"""``eplb check --engine``: what of this process and its store keeps the plug-in from its work."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from api.deploy.check_engine import check_engine
from telemetry import open_store
from telemetry.state.live import Control
from tests.support.redis_servers import free_port

COMMAND = (
    "vllm serve MODEL -dp 32 --enable-expert-parallel --enable-eplb "
    '--eplb-config \'{"communicator": "torch_gloo"}\''
)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.sqlite'}"


def findings(
    store: str, folder: Path, command: str = COMMAND, plan: bool = True, **environ: str
) -> dict[str, str]:
    """What was found, and what was expected, by component."""
    file, engine = folder / "eplb.toml", f"[engine]\nplan = {str(plan).lower()}\n"
    deployment = f"[deployment]\nname = 'prod'\nstore = '{store}'\n"
    file.write_text(deployment + engine, encoding="utf-8")
    found = check_engine(command, None, {"EPLB_CONFIG": str(file)} | environ)
    return {one.component: f"{one.found}; {one.expected}" for one in found}


def test_store_that_answers_is_shown_with_its_switches(store: str, tmp_path: Path) -> None:
    with closing(open_store(store, "prod")) as opened:
        opened.set_control(Control(), reason="a test")
        moves = findings(store, tmp_path)["store"]
        opened.set_control(Control(movement=False), reason="a test")

    assert moves == "answers; plans move experts; "
    assert (
        findings(store, tmp_path)["store"] == "answers; nothing moves: movement is switched off; "
    )


def test_switches_are_not_promised_where_the_engine_plans_itself(
    store: str, tmp_path: Path
) -> None:
    with closing(open_store(store, "prod")) as opened:
        opened.set_control(Control(movement=False), reason="a test")

    found = findings(store, tmp_path, plan=False)["store"]

    assert found == (
        "answers; engine.plan is off: the engine's own balancer moves experts, and obeys no "
        "switch; "
    )


def test_store_that_the_start_makes_is_not_made_by_the_check(store: str, tmp_path: Path) -> None:
    assert "is not there yet, the engine's start makes it" in findings(store, tmp_path)["store"]
    assert not (tmp_path / "store.sqlite").exists()


def test_store_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    found = findings(f"redis://user:word@127.0.0.1:{free_port()}", tmp_path)

    assert "a store that answers: else the map of the start stays" in found["store"]
    assert "word" not in "".join(found.values())


def test_command_is_refused_where_vllm_cannot_read_it(store: str, tmp_path: Path) -> None:
    found = findings(store, tmp_path, "vllm serve MODEL --enable-ebpl")["vllm"]

    assert "its command and its release are not checked; the environment of the engine" in found


def test_libraries_that_are_installed_are_not_named(store: str, tmp_path: Path) -> None:
    assert "libraries" not in findings(store, tmp_path)
