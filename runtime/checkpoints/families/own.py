"""The model of the demo and the tests, whose weights ``runtime.checkpoints.own_model`` writes."""

from __future__ import annotations

from runtime.checkpoints.description import ConfigKeys, Family, Rule, separate, shared_names

OWN_MODEL = Family(
    name="eplb's own model",
    model_types=("eplb",),
    architectures=(),
    keys=ConfigKeys(
        num_experts=("n_routed_experts",),
        intermediate=("moe_intermediate_size",),
        moe_layers=((Rule.ONLY_IN, "moe_layers"),),
        num_shared=("n_shared_experts",),
    ),
    layers=("model.layers.{layer}",),
    layouts=(separate(),),
    router=(("weight", "mlp.gate.weight"),),
    shared=shared_names("mlp.shared_experts"),
)
