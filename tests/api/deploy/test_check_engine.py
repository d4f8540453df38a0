"""``eplb check --engine``: what of this process and its store keeps the plug-in from its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from api.deploy.check_engine import check_engine
from eplb.errors import ConfigError
from telemetry import open_store
from telemetry.state.live import Control
from tests.support.packages import packages_without
from tests.support.redis_servers import free_port
from tests.support.repository import ROOT

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


@pytest.mark.parametrize("library", ["scipy", "numba", "zstandard"])
def test_missing_library_is_named_by_the_command(library: str, store: str, tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text(f"[deployment]\nname = 'prod'\nstore = '{store}'\n", encoding="utf-8")
    packages = packages_without(library, tmp_path / "packages")
    environ = os.environ | {"EPLB_CONFIG": str(file), "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    command = [sys.executable, "-S", "-m", "api.cli.main", "check", "--engine", COMMAND]

    ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)

    assert ended.returncode == 2, ended.stderr
    assert f"expected: pip install {library}\n" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_libraries_that_are_installed_are_not_named(store: str, tmp_path: Path) -> None:
    assert "libraries" not in findings(store, tmp_path)


SGLANG = (
    "python -m sglang.launch_server --model-path MODEL --tp 32 --nnodes 4 --moe-a2a-backend deepep "
    "--enable-eplb --ep-num-redundant-experts 32"
)


def refused(
    store: str, folder: Path, command: str, model: dict[str, int] | None = None
) -> dict[str, str]:
    """What was found and expected of all that is not as it should be, by component."""
    path = None
    if model is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(model), encoding="utf-8")
    file = folder / "eplb.toml"
    file.write_text(f"[deployment]\nname = 'prod'\nstore = '{store}'\n", encoding="utf-8")
    found = check_engine(command, path, {"EPLB_CONFIG": str(file)})
    return {one.component: f"{one.found}; {one.expected}" for one in found if not one.is_ok}


def test_command_of_sglang_that_fits_is_not_refused(store: str, tmp_path: Path) -> None:
    for command in (SGLANG, SGLANG.replace("python -m sglang.launch_server", "A=1 sglang serve")):
        assert refused(store, tmp_path, command, {"n_routed_experts": 256}) == {}


@pytest.mark.parametrize(
    ("old", "new", "component", "sentence"),
    [
        ("--enable-eplb", "", "enable-eplb", "SGLang balances nothing"),
        ("--tp 32", "--tp 1", "ep-size", "1 expert-parallel rank: SGLang refuses --enable-eplb"),
        ("deepep", "none", "ep-size", "1 expert-parallel rank"),
        ("deepep", "none --ep 16", "options", "32 ranks and an expert-parallel size of 16"),
        ("deepep", "none --ep 32 --ep-dispatch-algorithm static", "options", "dynamic"),
        ("--nnodes 4", "--nnodes 5", "options", "32 ranks on 5 nodes"),
        ("--nnodes 4", "--nnodes=4 --pp-size 2", "options", "--pp-size 2; 1: the engine's updater"),
        (
            "--nnodes 4",
            "--expert-distribution-recorder-mode per_pass",
            "options",
            "mode per_pass; stat",
        ),
        ("experts 32", "experts 30", "slots", "--ep-num-redundant-experts 32"),
    ],
)
def test_option_of_sglang_that_does_not_fit_is_refused(
    old: str, new: str, component: str, sentence: str, store: str, tmp_path: Path
) -> None:
    assert old in SGLANG

    found = refused(store, tmp_path, SGLANG.replace(old, new), {"n_routed_experts": 256})

    assert sentence in found[component]


def test_sglang_that_is_not_installed_is_said_and_its_variable_is_read(
    store: str, tmp_path: Path
) -> None:
    found = findings(store, tmp_path, SGLANG)

    assert found["sglang"] == "not installed here: no other option and no release was checked; "
    assert (
        "SGLANG_PLUGINS is 'x'" in findings(store, tmp_path, SGLANG, SGLANG_PLUGINS="x")["plug-in"]
    )


def test_command_of_trtllm_that_its_balancer_ignores_is_refused(store: str, tmp_path: Path) -> None:
    found = refused(store, tmp_path, "mpirun -n 8 trtllm-serve MODEL --tp_size 8")

    assert set(found) == {"ep_size", "enable_attention_dp", "moe_config.load_balancer"}
    assert "TensorRT-LLM ignores its load balancer in silence; --ep_size 2" in found["ep_size"]


def test_command_of_trtllm_whose_file_has_a_balancer_is_not_refused(
    store: str, tmp_path: Path
) -> None:
    balancer, options = tmp_path / "balancer.yaml", tmp_path / "options.yaml"
    balancer.write_text("num_slots: 288", encoding="utf-8")
    text = f"enable_attention_dp: true\nmoe_config: {{backend: CUTLASS, load_balancer: {balancer}}}"
    options.write_text(text, encoding="utf-8")
    command = f"trtllm-serve serve MODEL --ep_size 8 --config {options}"

    assert refused(store, tmp_path, command) == {}
    options.write_text(text.replace("CUTLASS", "TRITON"), encoding="utf-8")
    assert (
        "TRITON: it has no load balancer" in refused(store, tmp_path, command)["moe_config.backend"]
    )
    balancer.unlink()
    assert "does not exist" in refused(store, tmp_path, command)["moe_config.load_balancer"]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("llama-server -m m", "expected 'vllm serve MODEL ...', 'python -m sglang.launch_server"),
        ("vllm serve 'm", "cannot be read: No closing quotation"),
        ("python -m sglang.launch_server --tp two", "SGLang refuses the command: argument --tp"),
    ],
)
def test_command_that_cannot_be_read_is_one_sentence(
    command: str, sentence: str, store: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        findings(store, tmp_path, command)

    assert sentence in str(caught.value)
