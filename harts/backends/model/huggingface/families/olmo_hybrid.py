"""OLMo Hybrid: GDN, with beta up to 2, and multi-head or grouped query attention, dense."""

from harts.backends.model.huggingface.family import Family, gated_delta_shapes

FAMILY = Family(
    module="olmo_hybrid",
    config="OlmoHybridConfig",
    model="OlmoHybridForCausalLM",
    model_types=("olmo_hybrid",),
    full_layer="OlmoHybridAttention",
    linear_layer="OlmoHybridGatedDeltaNet",
    rule="gdn",
    delta_rule="torch_chunk_gated_delta_rule",
    shapes=gated_delta_shapes,
)
