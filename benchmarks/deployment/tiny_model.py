"""The tiny DeepSeek-V3 of the ``transformers`` library that a soak serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY, NUM_EXPERTS, NUM_MOE_LAYERS = 64, 16, 2
WEIGHT_SPREAD = 0.2  # wide: an expert in another's place must change every answer that it is in
SHAPES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1 + NUM_MOE_LAYERS,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def write_tiny_model(folder: Path, seed: int) -> None:
    """Have the library save a random model in float32."""
    model: Any = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SHAPES))
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=WEIGHT_SPREAD, generator=generator)
    model.save_pretrained(folder)


def read_model(folder: Path) -> Any:
    """Load a saved model, as an engine does."""
    return transformers.DeepseekV3ForCausalLM.from_pretrained(folder).eval()
