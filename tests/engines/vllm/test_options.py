"""``eplb check --engine``: a command as vLLM's own parser reads it, and what the plug-in needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from api.deploy.check_engine import check_engine
from eplb.errors import ConfigError, EplbError
from rebalance.engines.common.command import command_of, model_config_of
from rebalance.engines.vllm.options import options_of, remarks

pytestmark = pytest.mark.slow
GOOD = (
    "vllm serve deepseek-ai/DeepSeek-V3 -dp 32 --enable-expert-parallel --enable-eplb "
    '--eplb-config \'{"num_redundant_experts": 32, "communicator": "torch_gloo"}\''
)
MODEL = {"n_routed_experts": 256}


def read(command: str) -> Any:
    """The options of a command."""
    return options_of(command_of(command)[1])


def refused(command: str, model: dict[str, Any] | None = None) -> dict[str, str]:
    """What was found and expected, by subject, of all that is not as it should be."""
    found = remarks(read(command), MODEL if model is None else model)
    return {one.subject: f"{one.found}; {one.expected}" for one in found if one.expected}


def test_command_that_fits_has_no_refusal() -> None:
    assert refused(GOOD) == {}
    assert refused(f"EPLB_CONFIG=eplb.toml {GOOD}") == {}


@pytest.mark.parametrize(
    ("old", "new", "subject", "sentence"),
    [
        ("--enable-eplb", "", "enable-eplb", "balances nothing"),
        ("--enable-expert-parallel", "", "enable-expert-parallel", "vLLM refuses --enable-eplb"),
        ("-dp 32", "", "ranks", "1 expert-parallel rank: vLLM refuses --enable-eplb with it"),
        ("--enable-eplb", "--no-enable-eplb", "enable-eplb", "balances nothing"),
        ("-dp 32", "-dp=5", "slots", "num_redundant_experts 34"),
        ("-dp 32", "-dp 32 --enable_elastic_ep", "enable-elastic-ep", "the plug-in stays off"),
    ],
)
def test_option_that_vllm_accepts_and_that_does_not_fit_is_refused(
    old: str, new: str, subject: str, sentence: str
) -> None:
    assert old in GOOD

    assert sentence in refused(GOOD.replace(old, new))[subject]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("--enable-expert-parallel", "--enable-expert-paralel", "--enable-expert-parallel"),
        ("--enable-eplb ", "--enable_ebpl ", "expected an option of vLLM: --enable-eplb"),
        ("-dp 32", "-dp 32 --quux 1", "expected an option of vLLM: those of its --help"),
        ("-dp 32", "-dp two", "invalid int value: 'two'"),
        ('": 32,', '": 32, "windows": 1,', "expected one of: window_size, step_interval"),
        ('": 32,', '": 32, "window_size": 0,', "window_size Input should be greater than 0"),
        ("torch_gloo", "pynccl", "incompatible with async EPLB"),
        ("'{", "'", "argument --eplb-config: 1 validation error for EPLBConfig Invalid JSON"),
    ],
)
def test_what_vllm_refuses_is_refused_with_its_words_and_known_names(
    old: str, new: str, sentence: str
) -> None:
    assert old in GOOD

    with pytest.raises(ConfigError) as caught:
        read(GOOD.replace(old, new))

    assert sentence in str(caught.value)


def test_dotted_settings_replace_those_of_the_json_as_vllm_reads_them() -> None:
    options = read(f"{GOOD} --eplb-config.num_redundant_experts 64 --eplb-config.use_async False")

    assert options.eplb_config.num_redundant_experts == 64
    assert options.eplb_config.use_async is False
    assert options.eplb_config.communicator is None, "of the JSON beside them"


def test_number_of_experts_is_read_and_a_dense_model_is_refused() -> None:
    assert "a model with experts" in refused(GOOD, {"hidden_size": 5120})["model"]
    assert refused(GOOD, {"text_config": {"num_experts": 128}}) == {}


def test_config_of_the_model_is_read_from_its_folder_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8}', encoding="utf-8")

    assert model_config_of(read(f"vllm serve {tmp_path}").model, None) == {"num_experts": 8}
    assert model_config_of(read("vllm serve m").model, tmp_path) == {"num_experts": 8}
    assert model_config_of(read("vllm serve org/model").model, None) is None
    with pytest.raises(EplbError, match=r"gone\.json does not exist"):
        model_config_of(read("vllm serve m").model, tmp_path / "gone.json")


@pytest.mark.parametrize(
    "option", ["--distributed-executor-backend ray", "--data-parallel-backend=ray"]
)
def test_processes_of_ray_need_the_name_of_the_file(option: str) -> None:
    copied = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": "PATH,EPLB_CONFIG"}

    def found(command: str, **environ: str) -> dict[str, str]:
        return {one.component: one.expected for one in check_engine(command, None, environ)}

    assert "EPLB_CONFIG among them" in found(f"{GOOD} {option}")["ray"]
    assert "ray" not in found(f"{GOOD} {option}", **copied)
    assert "ray" not in found(GOOD)
