"""Tiny random models of the families that the ``transformers`` library has, saved by it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.folders import INDEX, change_config, write_shards

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

Tensors = dict[str, torch.Tensor]
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 32, 24

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
GQA = BASE | {"num_key_value_heads": 2, "head_dim": 8}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
WIDTHS = {"intermediate_size": 48, "moe_intermediate_size": INTERMEDIATE}
LOCAL = GQA | {"intermediate_size": INTERMEDIATE, "num_local_experts": NUM_EXPERTS}
TYPES = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
ROUTED = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1}
DEEPSEEK = BASE | MLA | WIDTHS | ROUTED | {"first_k_dense_replace": 1}
DEEPSEEK_V3 = DEEPSEEK | {"n_group": 2, "topk_group": 1}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
QWEN = GQA | WIDTHS | {"num_experts": NUM_EXPERTS, "mlp_only_layers": [0]}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": INTERMEDIATE,
}
QWEN35 = (
    GQA
    | LINEAR_ATTENTION
    | {
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": NUM_EXPERTS,
    }
)
LLAMA4 = LOCAL | {
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
}
STEP = (
    GQA
    | WIDTHS
    | {
        "n_routed_experts": NUM_EXPERTS,
        "share_expert_dim": INTERMEDIATE,
        "moe_layers_enum": "1,2",
    }
)
M3 = LOCAL | TYPES | {"dense_intermediate_size": 48, "shared_intermediate_size": INTERMEDIATE}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY_WIDE = TINY | {"intermediate_size": 16}
LLAMA4_VISION = TINY | {
    "intermediate_size": 64,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "vision_output_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
OCR_VISION = {
    "sam_config": TINY
    | {
        "output_channels": 8,
        "image_size": 64,
        "mlp_dim": 16,
        "downsample_channels": [8, 32],
        "global_attn_indexes": [0],
    },
    "encoder_config": TINY_WIDE | {"hidden_size": 32, "num_key_value_heads": 2, "vocab_size": 8},
}


@dataclass(frozen=True)
class Case:
    """One family: the library's class, a tiny configuration, what is on disk."""

    name: str
    model_class: str
    config: dict[str, Any]
    moe_layers: tuple[int, ...] = (1, 2)
    family: str = ""  # where it is not the name
    publish: Callable[[Tensors], Tensors] = field(default=lambda tensors: tensors)
    model_type: str | None = None  # of the published config.json, where the library's differs


def renamed(pattern: str, to: str) -> Callable[[Tensors], Tensors]:
    """The library writes names that differ from the published ones."""
    return lambda tensors: {re.sub(pattern, to, name): t for name, t in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    """As Qwen3.5's BF16 checkpoints: all experts of a layer in two tensors."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    left, stacks = {}, {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            stacks.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            left[name] = tensor
    for name, parts in stacks.items():
        experts = range(len(parts) // 3)
        both = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in experts]
        left[f"{name}.gate_up_proj"] = torch.stack(both)
        left[f"{name}.down_proj"] = torch.stack([parts[e, "down"] for e in experts])
    return left


CASES = (
    Case("DeepSeek-V2", "DeepseekV2ForCausalLM", DEEPSEEK),
    Case("DeepSeek-V3, R1", "DeepseekV3ForCausalLM", DEEPSEEK_V3),
    Case("DeepSeek-V3.2", "DeepseekV32ForCausalLM", DEEPSEEK_V3 | INDEXER),
    Case(
        "DeepSeek-V4",
        "DeepseekV4ForCausalLM",
        BASE
        | ROUTED
        | INDEXER
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "moe_intermediate_size": INTERMEDIATE,
            "o_groups": 2,
            "o_lora_rank": 8,
            "sliding_window": 8,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
        (0, 1, 2),
        publish=renamed(r"^model\.", ""),
    ),
    Case("Kimi K2", "DeepseekV3ForCausalLM", DEEPSEEK_V3, model_type="kimi_k2"),
    Case(
        "Kimi K2.5",
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": DEEPSEEK_V3 | {"model_type": "deepseek_v3"},
            "vision_config": TINY_WIDE,
            "projection_hidden_size": 64,
        },
        publish=renamed(r"^language_model\.model\.blocks\.", "language_model.model.layers."),
    ),
    Case(
        "Kimi Linear",
        "KimiLinearForCausalLM",
        BASE
        | MLA
        | WIDTHS
        | {
            "num_local_experts": NUM_EXPERTS,
            "n_shared_experts": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    Case("GLM-4.5", "Glm4MoeForCausalLM", GQA | WIDTHS | ROUTED | {"first_k_dense_replace": 1}),
    Case("Qwen3-MoE", "Qwen3MoeForCausalLM", QWEN),
    Case("Qwen3-Next", "Qwen3NextForCausalLM", QWEN | LINEAR_ATTENTION),
    Case("Qwen3.5-MoE, FP8's layout", "Qwen3_5MoeForCausalLM", QWEN35, (0, 1, 2), "Qwen3.5-MoE"),
    Case(
        "Qwen3.5-MoE",
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": QWEN35,
            "vision_config": {
                "hidden_size": 16,
                "depth": 1,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 32,
            },
        },
        (0, 1, 2),
        publish=fused,
    ),
    Case("Mixtral", "MixtralForCausalLM", LOCAL, (0, 1, 2)),
    Case("gpt-oss", "GptOssForCausalLM", LOCAL, (0, 1, 2)),
    Case(
        "OLMoE",
        "OlmoeForCausalLM",
        BASE
        | {"num_key_value_heads": 2, "intermediate_size": INTERMEDIATE, "num_experts": NUM_EXPERTS},
        (0, 1, 2),
    ),
    Case("MiniMax-M1", "MiniMaxForCausalLM", LOCAL, (0, 1, 2)),
    Case("MiniMax-M2", "MiniMaxM2ForCausalLM", LOCAL, (0, 1, 2)),
    Case(
        "MiniMax-M3",
        "MiniMaxM3SparseForConditionalGeneration",
        {"text_config": M3, "vision_config": TINY_WIDE | {"patch_size": 4}},
    ),
    Case(
        "LongCat-Flash",
        "LongcatFlashForCausalLM",
        {k: v for k, v in (BASE | MLA).items() if k not in ("num_hidden_layers",)}
        | {
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": INTERMEDIATE,
            "n_routed_experts": NUM_EXPERTS,
            "zero_expert_num": 4,
            "moe_topk": 2,
        },
        (0, 1),
    ),
    Case("Llama 4, text only", "Llama4ForCausalLM", LLAMA4, (1,), "Llama 4"),
    Case(
        "Llama 4",
        "Llama4ForConditionalGeneration",
        {"text_config": LLAMA4, "vision_config": LLAMA4_VISION},
        (1,),
    ),
    Case(
        "Hunyuan",
        "HunYuanMoEV1ForCausalLM",
        GQA
        | {"intermediate_size": INTERMEDIATE, "num_experts": NUM_EXPERTS, "moe_topk": [2, 2, 2]},
        (0, 1, 2),
    ),
    Case(
        "Step-3.5, 3.7",
        "Step3p7ForConditionalGeneration",
        {
            "text_config": STEP,
            "vision_config": {"width": 16, "layers": 1, "heads": 2, "image_size": 28, **TINY},
        },
    ),
    Case(
        "Ling 3.0",
        "BailingHybridForCausalLM",
        BASE
        | WIDTHS
        | {k: v for k, v in MLA.items() if k != "q_lora_rank"}
        | {
            "head_dim": 8,
            "num_local_experts": NUM_EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    Case(
        "DeepSeek-OCR-2",
        "DeepseekOcr2ForConditionalGeneration",
        {
            "text_config": BASE | {"num_key_value_heads": 4} | WIDTHS | ROUTED | TYPES,
            "vision_config": OCR_VISION,
        },
    ),
)


def build(case: Case, seed: int = 7) -> torch.nn.Module:
    """Build the library's model; every number in it is drawn at random."""
    model_class = getattr(transformers, case.model_class)
    model: torch.nn.Module = model_class(model_class.config_class(**case.config))
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.2, generator=generator)
    for parameter in model.parameters():  # buffers, such as the routers' biases, stay in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def save(case: Case, model: Any, folder: Path) -> Path:
    """Have the library save it in several files; then rename what it names unlike the published."""
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    everything = {name: files[file][name] for name, file in index.items()}
    published = case.publish(everything)
    if published.keys() != everything.keys():
        for file in files:
            (folder / file).unlink()
        write_shards(folder, published)
    if case.model_type is not None:
        change_config(folder, model_type=case.model_type)
    return folder


def expert_modules(model: torch.nn.Module) -> dict[int, Any]:
    """Modules that hold the experts of a layer, by the model's own layer number."""
    found = {}
    for name, module in model.named_modules():
        down = getattr(module, "down_proj", None)
        if isinstance(down, torch.nn.Parameter) and down.dim() == 3:
            number = re.search(r"layers\.(\d+)\.", name)
            assert number is not None, name
            found[int(number[1])] = module
    return found
