"""Families with layouts of their own: Qwen, Mixtral, gpt-oss, MiniMax, LongCat, Llama 4, Step."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoints.description import (
    ConfigKeys,
    ExpertLayout,
    Family,
    Rule,
    separate,
    shared_names,
)

LAYER = "model.layers.{layer}"
_W123 = separate("block_sparse_moe.experts", "w1", "w3", "w2")
_LOCAL = ConfigKeys(num_experts=("num_local_experts",), intermediate=("intermediate_size",))
_MTP = ("mtp.layers.{mtp}",)

QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    keys=ConfigKeys(
        num_experts=("num_experts", "num_local_experts"),
        intermediate=("moe_intermediate_size",),
        moe_layers=((Rule.NOT_IN, "mlp_only_layers"), (Rule.EVERY_NTH, "decoder_sparse_step")),
    ),
    layers=(LAYER,),
    layouts=(separate(),),
    router=(("weight", "mlp.gate.weight"),),
)
QWEN3_NEXT = replace(
    QWEN3_MOE,
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    shared=(*shared_names("mlp.shared_expert"), "mlp.shared_expert_gate.weight"),
    mtp_layers=_MTP,
)
QWEN35_MOE = replace(
    QWEN3_NEXT,
    name="Qwen3.5-MoE",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    architectures=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    layers=("model.language_model.layers.{layer}", LAYER),
    layouts=(
        ExpertLayout(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj"),
        separate(),  # the FP8 checkpoints
    ),
    sections=("text_config",),
)

MIXTRAL = Family(
    name="Mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    keys=_LOCAL,
    layers=(LAYER,),
    layouts=(_W123,),
    router=(("weight", "block_sparse_moe.gate.weight"),),
)
MINIMAX_M1 = replace(
    MIXTRAL,
    name="MiniMax-M1",
    model_types=("minimax_m1", "minimax_text_01", "minimax"),
    architectures=("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxForCausalLM"),
)
MINIMAX_M2 = replace(
    MIXTRAL,
    name="MiniMax-M2",
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    router=(
        ("weight", "block_sparse_moe.gate.weight"),
        ("correction_bias", "block_sparse_moe.e_score_correction_bias"),
    ),
)
MINIMAX_M3 = replace(
    MINIMAX_M2,
    name="MiniMax-M3",
    model_types=("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"),
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
    keys=replace(
        _LOCAL,
        moe_layers=((Rule.TYPES, "mlp_layer_types"), (Rule.EVERY, "moe_layer_freq")),
        num_shared=("n_shared_experts",),
    ),
    layers=("language_model.model.layers.{layer}", LAYER),
    shared=shared_names("block_sparse_moe.shared_experts"),
    sections=("text_config",),
)

OLMOE = Family(
    name="OLMoE",
    model_types=("olmoe",),
    architectures=("OlmoeForCausalLM",),
    keys=ConfigKeys(num_experts=("num_experts",), intermediate=("intermediate_size",)),
    layers=(LAYER,),
    layouts=(separate(),),
    router=(("weight", "mlp.gate.weight"),),
)
GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    keys=ConfigKeys(
        num_experts=("num_local_experts", "num_experts"),
        intermediate=("intermediate_size",),
        top_k=("num_experts_per_tok", "experts_per_token"),
    ),
    layers=(LAYER,),
    layouts=(
        ExpertLayout(
            gate_up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
            is_transposed=True,
            is_interleaved=True,
        ),
    ),
    router=(("weight", "mlp.router.weight"), ("bias", "mlp.router.bias")),
)
LLAMA4 = Family(
    name="Llama 4",
    model_types=("llama4", "llama4_text"),
    architectures=("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    keys=replace(
        _LOCAL,
        moe_layers=((Rule.ONLY_IN, "moe_layers"), (Rule.EVERY_NTH, "interleave_moe_layer_step")),
    ),
    layers=("language_model.model.layers.{layer}", LAYER),
    layouts=(
        ExpertLayout(
            gate_up="feed_forward.experts.gate_up_proj",
            down="feed_forward.experts.down_proj",
            is_transposed=True,
        ),
        separate("feed_forward.experts"),  # the FP8 checkpoints
    ),
    router=(("weight", "feed_forward.router.weight"),),
    shared=shared_names("feed_forward.shared_expert"),
    sections=("text_config",),
)
LONGCAT_FLASH = Family(
    name="LongCat-Flash",
    model_types=("longcat_flash",),
    architectures=("LongcatFlashForCausalLM", "LongcatCausalLM"),
    keys=ConfigKeys(
        num_experts=("n_routed_experts",),
        intermediate=("expert_ffn_hidden_size",),
        top_k=("moe_topk", "num_experts_per_tok"),
        num_layers=("num_layers", "num_hidden_layers"),
        num_zero=("zero_expert_num",),
    ),
    layers=(LAYER,),
    layouts=(separate(),),
    router=(
        ("weight", "mlp.router.classifier.weight"),
        ("correction_bias", "mlp.router.e_score_correction_bias"),
    ),
)
HUNYUAN = Family(
    name="Hunyuan",
    model_types=("hunyuan_v1_moe", "hunyuan"),
    architectures=("HunYuanMoEV1ForCausalLM", "HunYuanMoEForCausalLM"),
    keys=ConfigKeys(
        num_experts=("num_experts",),
        intermediate=("moe_intermediate_size", "intermediate_size"),
        top_k=("moe_topk", "num_experts_per_tok"),
        moe_layers=((Rule.FROM, "moe_layer_num_skipped"),),
        num_shared=("num_shared_expert",),
    ),
    layers=(LAYER,),
    layouts=(separate(),),
    router=(("weight", "mlp.gate.wg.weight"),),
    shared=shared_names("mlp.shared_mlp"),
)

STEP_35 = Family(
    name="Step-3.5, 3.7",
    model_types=("step3p5", "step3p7"),
    architectures=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    keys=ConfigKeys(
        num_experts=("moe_num_experts", "n_routed_experts"),
        intermediate=("moe_intermediate_size",),
        top_k=("moe_top_k", "num_experts_per_tok"),
        moe_layers=((Rule.ONLY_IN, "moe_layers_enum"), (Rule.TYPES, "mlp_layer_types")),
    ),
    layers=(LAYER,),
    layouts=(ExpertLayout(gate="moe.gate_proj", up="moe.up_proj", down="moe.down_proj"),),
    router=(("weight", "moe.gate.weight"), ("correction_bias", "moe.router_bias")),
    shared=shared_names("share_expert"),
    sections=("text_config",),
)
STEP_3 = replace(
    STEP_35,
    name="Step-3",
    model_types=("step3_text", "step3_vl", "step3"),
    architectures=("Step3TextForCausalLM", "Step3VLForConditionalGeneration"),
    router=(("weight", "moe.gate.weight"),),
    unproven="the library has Step-3.5 and 3.7 only; names as vLLM loads them",
)
