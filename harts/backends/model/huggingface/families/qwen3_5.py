"""Qwen3.5, the text model: GDN and gated grouped query attention, dense."""

from harts.backends.model.huggingface.family import Family, gated_delta_shapes

FAMILY = Family(
    module="qwen3_5",
    config="Qwen3_5TextConfig",
    model="Qwen3_5ForCausalLM",
    model_types=("qwen3_5", "qwen3_5_text"),
    full_layer="Qwen3_5Attention",
    linear_layer="Qwen3_5GatedDeltaNet",
    rule="gdn",
    delta_rule="torch_chunk_gated_delta_rule",
    shapes=gated_delta_shapes,
)
