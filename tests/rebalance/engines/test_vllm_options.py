from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eplb.errors import ConfigError, EplbError
from rebalance.engines.vllm.options import model_config_of, options_of, remarks

GOOD = (
    "vllm serve deepseek-ai/DeepSeek-V3 -dp 32 --enable-expert-parallel --enable-eplb "
    '--eplb-config \'{"num_redundant_experts": 32, "communicator": "torch_gloo"}\''
)
MODEL = {"n_routed_experts": 256, "quantization_config": {"quant_method": "fp8"}}


def refused(command: str, model: dict[str, Any] | None = None) -> dict[str, str]:
    """What was found and expected, by subject, of all that is not as it should be."""
    found = remarks(options_of(command), MODEL if model is None else model)
    return {one.subject: f"{one.found}; {one.expected}" for one in found if one.expected}


def test_command_that_fits_has_no_refusal() -> None:
    assert refused(GOOD) == {}
    assert refused(f"EPLB_CONFIG=eplb.toml {GOOD}") == {}


@pytest.mark.parametrize(
    ("old", "new", "subject", "sentence"),
    [
        ("--enable-eplb", "", "enable-eplb", "balances nothing"),
        ("--enable-eplb", "--no-enable-eplb", "enable-eplb", "balances nothing"),
        ("--enable-eplb", "", "eplb-config.num_redundant_experts", "without --enable-eplb"),
        ("--enable-expert-parallel", "", "enable-expert-parallel", "vLLM refuses EPLB without it"),
        ("-dp 32", "-dp 1", "ranks", "on one rank; 2 or more"),
        ("-dp 32", "-dp=5", "slots", "num_redundant_experts 34"),
        ("-dp 32", "-dp 32 --all2all-backend moonep", "all2all-backend", "moonep"),
        ("-dp 32", "-dp 32 --load-format=ipc_cache", "load-format", "ipc_cache"),
        ("-dp 32", "-dp 32 --enable_elastic_ep", "enable-elastic-ep", "the plug-in stays off"),
        ("-dp 32", "-dp 32 -q awq", "quantisation", "vLLM refuses EPLB with its expert layers"),
        ("torch_gloo", "pynccl", "eplb-config.communicator", "pynccl with use_async"),
        ("torch_gloo", "mpi", "eplb-config.communicator", "'mpi'; torch_nccl or"),
        ('": 32,', '": 2048,', "eplb-config.num_redundant_experts", "2048; 0 to 1023"),
        ('": 32,', '": "32",', "eplb-config.num_redundant_experts", "a value of type int"),
        ('": 32,', '": 32, "windows": 1,', "eplb-config.windows", "a setting that vLLM refuses"),
        ('": 32,', '": 32, "window_size": 0,', "eplb-config.window_size", "0; 1 or more"),
        ('": 32,', '": 32, "policy": "ours",', "eplb-config.policy", "'ours', which vLLM 0.33"),
    ],
)
def test_option_that_does_not_fit_is_refused_with_a_sentence(
    old: str, new: str, subject: str, sentence: str
) -> None:
    assert old in GOOD

    assert sentence in refused(GOOD.replace(old, new))[subject]


def test_dotted_settings_are_read_and_win() -> None:
    options = options_of(
        f"{GOOD} --eplb-config.num_redundant_experts 64 --eplb-config.use_async False"
    )

    assert options.balancer["num_redundant_experts"] == 64
    assert options.balancer["use_async"] is False
    assert options.balancer["communicator"] == "torch_gloo"


def test_async_with_pynccl_is_refused_and_sync_is_not() -> None:
    command = GOOD.replace("torch_gloo", "pynccl")

    assert refused(f"{command} --eplb-config.use_async false") == {}


def test_gpt_oss_with_mxfp4_is_refused_and_a_dense_model_too() -> None:
    layers = {"quant_method": "mxfp4"}
    gpt_oss = {"num_local_experts": 128, "architectures": ["GptOssForCausalLM"]}

    assert "quantisation" in refused(GOOD, gpt_oss | {"quantization_config": layers})
    assert "a model with experts" in refused(GOOD, {"hidden_size": 5120})["model"]
    assert refused(GOOD, {"text_config": {"num_experts": 128}}) == {}


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sglang serve --model m", "expected 'vllm serve MODEL ...'"),
        ("vllm serve 'm", "cannot be read: No closing quotation"),
        ("vllm serve m --eplb-config {", "expected JSON"),
        ("vllm serve m --eplb-config [1]", "expected a JSON object"),
        ("vllm serve m --eplb-config.window_size many", "expected a number or a switch"),
        ("vllm serve m -tp two", "--tensor-parallel-size is 'two', expected a number"),
    ],
)
def test_command_that_cannot_be_read_is_one_sentence(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(remarks(options_of(command), None))

    assert sentence in str(caught.value)


def test_config_of_the_model_is_read_from_its_folder_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8}', encoding="utf-8")

    assert model_config_of(options_of(f"vllm serve {tmp_path}"), None) == {"num_experts": 8}
    assert model_config_of(options_of("vllm serve m"), tmp_path) == {"num_experts": 8}
    assert model_config_of(options_of("vllm serve org/model"), None) is None
    with pytest.raises(EplbError, match=r"gone\.json does not exist"):
        model_config_of(options_of("vllm serve m"), tmp_path / "gone.json")
