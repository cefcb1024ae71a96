"""Qwen3-Next: GDN and gated grouped query attention, experts with softmax scores."""

from harts.backends.model.huggingface.family import Family, Router, gated_delta_shapes

FAMILY = Family(
    module="qwen3_next",
    config="Qwen3NextConfig",
    model="Qwen3NextForCausalLM",
    model_types=("qwen3_next",),
    full_layer="Qwen3NextAttention",
    linear_layer="Qwen3NextGatedDeltaNet",
    rule="gdn",
    delta_rule="torch_chunk_gated_delta_rule",
    shapes=gated_delta_shapes,
    router=Router("Qwen3NextTopKRouter", "softmax", shared_gate="shared_expert_gate"),
)
