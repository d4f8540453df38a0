"""Models of the ``transformers`` library in a deployment: ``model.layout`` of every process."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from api.config.tree import load
from api.deploy.check import check_all
from api.deploy.deployment import Deployment, resolve
from api.deploy.first_placement import ensure_first_placement
from eplb.errors import CheckpointError, ConfigError
from rebalance.assembly.environment import build_rank_from_env
from rebalance.assembly.host_cache import build_host_cache
from runtime.model.transformers import prove_experts
from tests.support.deployments import OneHost
from tests.support.documents import files_of
from tests.support.folders import write_shards
from tests.support.models import library_models
from tests.support.models.library_models import CASES, transformers
from tests.support.redis_servers import RedisProcess

MODELS = ("DeepSeek-V3, R1", "Qwen3-MoE", "gpt-oss")
PAGE = "docs/deployment.md"
MODEL_FOLDER = "tiny-deepseek"  # of the page


def save(name: str, folder: Path) -> Path:
    (case,) = (case for case in CASES if case.name == name)
    return library_models.save(case, library_models.build(case).float(), folder)


def resolved(folder: Path, weights: Path, **model: str) -> Deployment:
    given = {
        "deployment.name": f"library-{os.getpid()}-{folder.name[-20:]}",
        "deployment.state_dir": folder / "state",
        "topology.ranks_per_node": 2,
        "topology.device": "cpu",
        "http.port": 0,
        "model.checkpoint": weights,
    }
    named = given | {f"model.{name}": value for name, value in model.items()}
    return resolve(load({}, config=None, environ={}, named=named), {})


def findings(deployment: Deployment, component: str) -> list[str]:
    return [str(one) for one in check_all(deployment, 0) if one.component == component]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_ranks_are_filled_with_the_library_s_parameters(
    name: str, tmp_path: Path, run_ranks: Callable[[int, Callable[[int], Any]], list[Any]]
) -> None:
    weights = save(name, tmp_path / "model")
    deployment = resolved(tmp_path, weights, layout="transformers")
    with closing(deployment.opened_store()) as store:
        ensure_first_placement(store, deployment, "a test")
    (tmp_path / "rank.json").write_text(deployment.description().to_json())
    model = transformers.AutoModelForCausalLM.from_pretrained(weights)
    cache = deployment.host_cache, deployment.host_cache_address(0)

    def prove(_: int) -> tuple[int, list[str]]:
        rank = build_rank_from_env(environ={"EPLB_RANK_FILE": str(tmp_path / "rank.json")})
        proved = prove_experts(model, rank.bank, rank.held())
        rank.close()
        return proved, [spec.name for spec in rank.deployment.schema.tensors]

    with closing(build_host_cache(*cache, deployment.model, deployment.schema, weights)):
        found = run_ranks(2, prove)

    held = 4 * deployment.model.num_layers  # of the first placement: every expert once
    biases = ["gate_up_proj_bias", "down_proj_bias"] if name == "gpt-oss" else []
    assert [proved for proved, _ in found] == [held, held]
    assert sorted(found[0][1]) == sorted(["gate_up_proj", "down_proj", *biases])
    (line,) = findings(deployment, "checkpoint")
    assert line.endswith("x 8 experts in float32, layout transformers")


@pytest.mark.system
def test_layout_of_another_start_is_refused_until_it_is_accepted(tmp_path: Path) -> None:
    weights = save("Qwen3-MoE", tmp_path / "model")
    first = resolved(tmp_path, weights, precision="float32")
    now = resolved(tmp_path, weights, layout="transformers")
    with closing(first.opened_store()) as store:
        ensure_first_placement(store, first, "eplb serve")

        words = r"layout transformers \(model.layout\) here and eplb there; expected the same"
        with pytest.raises(CheckpointError, match=words):
            ensure_first_placement(store, now, "eplb launch, host 0")
        assert any(
            "layout transformers" in one and "refused" in one for one in findings(now, "checkpoint")
        )


@pytest.mark.system
def test_quantised_checkpoint_has_no_layout_of_the_library(tmp_path: Path) -> None:
    weights = save("gpt-oss", tmp_path / "model")
    tensors = {}
    for file in weights.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    write_shards(
        weights, {re.sub(r"_proj$", "_proj_blocks", name): tensors[name] for name in tensors}
    )

    (line,) = findings(resolved(tmp_path, weights, layout="transformers"), "checkpoint")

    assert line.endswith("gate_proj.weight is missing")


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"layout": "transformers", "precision": "float32"},
            'model.precision is "float32" beside the layout "transformers", expected it not to be',
        ),
        ({"layout": "vllm"}, "model.layout"),
    ],
)
def test_layout_that_cannot_be_used_is_refused(
    tmp_path: Path, model: dict[str, str], expected: str
) -> None:
    weights = save("Qwen3-MoE", tmp_path / "model")

    with pytest.raises(ConfigError, match=re.escape(expected)):
        resolved(tmp_path, weights, **model)


def test_layout_of_the_library_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    named = {"model.layers": 2, "model.experts": 8, "model.layout": "transformers"}

    with pytest.raises(ConfigError, match=r'layout is "transformers" and model.checkpoint is not'):
        resolve(load({}, config=None, environ={}, named=named), {})


@pytest.mark.slow  # a minute for each: two ranks that import the library
@pytest.mark.parametrize("name", MODELS)
def test_model_of_the_library_is_served_by_the_commands(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / MODEL_FOLDER)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(tmp_path / "redis"))
        host = OneHost(stack, tmp_path, tmp_path / MODEL_FOLDER)
        files = files_of(PAGE)
        (tmp_path / "engine.py").write_text(files["engine.py"])
        config = files["eplb.toml"].replace("redis://127.0.0.1:6400", redis.url)
        config += f"[network]\nrendezvous_port = {host.port}\n[http]\nport = 0\n"
        (tmp_path / "eplb.toml").write_text(config.replace('"tiny"', f'"{host.name}"'))

        check = host.start("eplb", "check")
        assert check.ends() == 0, check.lines
        serve = host.start("eplb", "serve")
        cache = host.start("eplb", "host-cache")
        launch = host.start("eplb", "launch", "--", sys.executable, "engine.py")
        launch.wait_for("engine: generation 1 serves, 0 of ")
        assert launch.ends(signal.SIGTERM) == 0, launch.lines
        for process in (serve, cache):
            assert process.ends(signal.SIGTERM) == 0, process.lines

    ended = re.findall(r"rank \d ended, (\d+) of (\d+) wrong", "".join(launch.lines))
    assert len(ended) == 2, launch.lines
    assert all(int(checked) > 0 for _, checked in ended), ended
    # A router may choose the other one of two experts that are within a rounding of each other.
    assert sum(int(wrong) for wrong, _ in ended) <= 1, ended
