"""A small Qwen3-MoE checkpoint with random weights, whose busy experts change with the topic.

    python -m benchmarks.engines.served.model FOLDER [--size wide] [--dtype bfloat16] [--seed 1]

A topic is a range of tokens. The embeddings of its tokens share a direction, which the router of
each layer maps to a preference of its own among the experts. So a batch of prompts of one topic
keeps a few experts busy, and other experts in each layer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.served.load import NUM_TOPICS, VOCABULARY, topic_tokens

HEAD = 64
TOPIC_SHARE = 0.7  # of an embedding's length
TOPIC_LOGIT, TOKEN_LOGIT = 1.0, 1.0  # spread of the router's logits by topic, and by token


@dataclass(frozen=True)
class Size:
    """What a checkpoint has."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SIZES = {
    "tiny": Size(layers=2, experts=8, top_k=2, hidden=256, intermediate=128),
    "small": Size(layers=2, experts=32, top_k=4, hidden=512, intermediate=256),
    # Six layers of Qwen3-30B-A3B with half of its experts.
    "wide": Size(layers=6, experts=64, top_k=8, hidden=2048, intermediate=768),
}


def configuration(size: Size, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``."""
    heads = size.hidden // HEAD
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "moe_intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": HEAD,
        "num_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def weights(size: Size, dtype: str, seed: int, device: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of a checkpoint."""
    import torch

    drawn = torch.Generator(device=device).manual_seed(seed)
    kind, hidden, inner = getattr(torch, dtype), size.hidden, size.intermediate

    def normal(*shape: int, scale: float) -> Any:
        return torch.randn(*shape, generator=drawn, device=device) * scale

    directions = torch.nn.functional.normalize(normal(NUM_TOPICS, hidden, scale=1.0), dim=1)
    embedded = torch.nn.functional.normalize(normal(VOCABULARY, hidden, scale=1.0), dim=1)
    for topic in range(NUM_TOPICS):
        tokens = topic_tokens(topic)
        embedded[tokens.start : tokens.stop] += TOPIC_SHARE * directions[topic]
    embedded = torch.nn.functional.normalize(embedded, dim=1) * hidden**0.5

    def named(name: str, tensor: Any) -> tuple[str, Any]:
        return name, tensor.to(kind).contiguous().cpu()

    yield named("model.embed_tokens.weight", embedded)
    yield named("lm_head.weight", normal(VOCABULARY, hidden, scale=1.5 * hidden**-0.5))
    yield named("model.norm.weight", torch.ones(hidden))
    reach = TOPIC_SHARE / (1 + TOPIC_SHARE**2) ** 0.5  # of the direction in a token's embedding
    heads, keys = hidden, hidden // HEAD // 4 * HEAD or HEAD
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield named(f"{prefix}.{norm}.weight", torch.ones(hidden))
        for norm in ("q_norm", "k_norm"):
            yield named(f"{prefix}.self_attn.{norm}.weight", torch.ones(HEAD))
        for part, rows, columns in (
            ("q_proj", heads, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, heads),
        ):
            matrix = normal(rows, columns, scale=0.5 * columns**-0.5)
            yield named(f"{prefix}.self_attn.{part}.weight", matrix)
        preference = normal(size.experts, NUM_TOPICS, scale=TOPIC_LOGIT / (reach * hidden**0.5))
        router = preference @ directions
        router += normal(size.experts, hidden, scale=TOKEN_LOGIT * hidden**-0.5)
        yield named(f"{prefix}.mlp.gate.weight", router)
        for expert in range(size.experts):
            for part, rows, columns in (
                ("gate_proj", inner, hidden),
                ("up_proj", inner, hidden),
                ("down_proj", hidden, inner),
            ):
                matrix = normal(rows, columns, scale=1.2 * columns**-0.5)
                yield named(f"{prefix}.mlp.experts.{expert}.{part}.weight", matrix)


def write_model(folder: Path, size: str, dtype: str, seed: int, device: str = "cpu") -> None:
    """Write the checkpoint, unless the folder has one."""
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights(SIZES[size], dtype, seed, device))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(configuration(SIZES[size], dtype), indent=1)
    (folder / "config.json").write_text(text)  # the last file: a folder with it is whole


def main() -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    write_model(options.folder, options.size, options.dtype, options.seed, options.device)


if __name__ == "__main__":
    main()
