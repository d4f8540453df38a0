"""DeepSeek and the families that kept its layout: Kimi, GLM, Ling, DeepSeek-OCR."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoints.description import (
    ConfigKeys,
    Family,
    Rule,
    separate,
    shared_names,
)

LAYER = "model.layers.{layer}"
_DENSE_FIRST = (
    (Rule.FROM, "first_k_dense_replace"),
    (Rule.EVERY, "moe_layer_freq"),
    (Rule.TYPES, "mlp_layer_types"),
)
_KEYS = ConfigKeys(
    num_experts=("n_routed_experts", "num_local_experts"),
    intermediate=("moe_intermediate_size",),
    moe_layers=_DENSE_FIRST,
    num_groups=("n_group",),
    num_shared=("n_shared_experts",),
)
_ROUTER = (("weight", "mlp.gate.weight"), ("correction_bias", "mlp.gate.e_score_correction_bias"))

DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    keys=_KEYS,
    layers=(LAYER,),
    layouts=(separate(),),
    router=_ROUTER[:1],
    shared=shared_names("mlp.shared_experts"),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="DeepSeek-V3, R1",
    model_types=("deepseek_v3",),
    architectures=("DeepseekV3ForCausalLM",),
    router=_ROUTER,
    mtp_layers=(LAYER,),
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="DeepSeek-V3.2",
    model_types=("deepseek_v32",),
    architectures=("DeepseekV32ForCausalLM",),
)
DEEPSEEK_V4 = Family(
    name="DeepSeek-V4",
    model_types=("deepseek_v4",),
    architectures=("DeepseekV4ForCausalLM",),
    keys=_KEYS,
    layers=("layers.{layer}", LAYER),
    layouts=(separate("ffn.experts", "w1", "w3", "w2"),),
    router=(
        ("weight", "ffn.gate.weight"),
        ("correction_bias", "ffn.gate.bias"),
        ("token_table", "ffn.gate.tid2eid"),  # of layers whose experts follow from the token id
    ),
    shared=shared_names("ffn.shared_experts", ("w1", "w3", "w2")),
    mtp_layers=("mtp.{mtp}",),
)
DEEPSEEK_OCR2 = replace(
    DEEPSEEK_V2,
    name="DeepSeek-OCR-2",
    model_types=("deepseek_ocr2",),
    architectures=("DeepseekOcr2ForConditionalGeneration", "DeepseekOCR2ForCausalLM"),
    sections=("text_config", "language_config"),
)
DEEPSEEK_OCR = replace(
    DEEPSEEK_OCR2,
    name="DeepSeek-OCR",
    model_types=("deepseek_ocr", "deepseekocr", "DeepseekOCR"),
    architectures=("DeepseekOCRForCausalLM",),
    unproven="the library has DeepSeek-OCR-2 only; names as vLLM loads them",
)

KIMI_K2 = replace(
    DEEPSEEK_V3,
    name="Kimi K2",
    model_types=("kimi_k2",),
    architectures=("KimiK2ForCausalLM",),
)
KIMI_K25 = replace(
    DEEPSEEK_V3,
    name="Kimi K2.5",
    model_types=("kimi_k25",),
    architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    layers=("language_model.model.layers.{layer}", "model.language_model.layers.{layer}"),
    mtp_layers=(),
    sections=("text_config",),
)
KIMI_LINEAR = Family(
    name="Kimi Linear",
    model_types=("kimi_linear",),
    architectures=("KimiLinearForCausalLM",),
    keys=ConfigKeys(
        num_experts=("num_experts", "num_local_experts"),
        intermediate=("moe_intermediate_size",),
        top_k=("num_experts_per_token", "num_experts_per_tok"),
        moe_layers=_DENSE_FIRST,
        num_groups=("num_expert_group",),
        num_shared=("num_shared_experts",),
    ),
    layers=(LAYER,),
    layouts=(separate("block_sparse_moe.experts", "w1", "w3", "w2"),),
    router=(
        ("weight", "block_sparse_moe.gate.weight"),
        ("correction_bias", "block_sparse_moe.gate.e_score_correction_bias"),
    ),
    shared=shared_names("block_sparse_moe.shared_experts"),
)

GLM_45 = replace(
    DEEPSEEK_V3,
    name="GLM-4.5",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
)

LING_HYBRID = Family(
    name="Ling 3.0",
    model_types=("bailing_hybrid",),
    architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
    keys=ConfigKeys(
        num_experts=("num_experts", "num_local_experts"),
        intermediate=("moe_intermediate_size",),
        top_k=("num_experts_per_tok", "num_experts_per_token"),
        moe_layers=_DENSE_FIRST,
        num_groups=("n_group", "num_expert_group"),
        num_shared=("num_shared_experts",),
    ),
    layers=(LAYER,),
    layouts=(separate(),),
    router=(("weight", "mlp.gate.weight"), ("correction_bias", "mlp.gate.expert_bias")),
    shared=shared_names("mlp.shared_experts"),
    mtp_layers=(LAYER,),
)
LING = replace(
    LING_HYBRID,
    name="Ling, Ling 2.0",
    model_types=("bailing_moe", "bailing_moe_v2"),
    architectures=("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    unproven="the library has Ling 3.0 only; names as vLLM loads them",
)
