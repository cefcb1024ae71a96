"""The layers in Megatron's `HybridModel`, where attention and what follows it are layers of their own."""

from __future__ import annotations

from copy import copy
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from harts.backends.model.megatron.call import TreeParams
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.norm import RmsNorm
from harts.backends.model.megatron.rotary import RowRotary
from harts.backends.model.megatron.spec import feeding, has_experts, layer_spec, mixing

FULL = {"gqa": (Symbols.ATTENTION, "attention_layer"), "mla": (Symbols.MLA, "mla_layer")}
"""A layers: their letter in a pattern, and where their parts go."""


class TreeHybrid(HybridModel):  # type: ignore[misc]  # megatron has no types
    """As `TreeGpt`: in a call with a plan it gives the last stage's hidden states."""

    sublayers = 2
    """Megatron's layers that make one of the configuration."""
    post_process: bool
    rotary_pos_emb: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:  # Megatron's own last norm, which `stack_spec` leaves out, is Transformer Engine's
            self.decoder.final_norm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.decoder.post_layer_norm = True
        if "rotary_pos_emb" in self._modules:  # MLA has its own
            self.rotary_pos_emb = RowRotary(self.rotary_pos_emb)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's; hidden states [rows of this process, hidden] of a call with a plan."""
        if not self.post_process or not isinstance(kwargs.get("packed_seq_params"), TreeParams):
            return super().forward(*args, **kwargs)
        self.post_process = False  # a stage without a head returns what its layers give
        try:
            return super().forward(*args, **kwargs).squeeze(1)
        finally:
            self.post_process = True


def hybrid(config: MegatronConfig, options: Any, **given: Any) -> TreeHybrid:
    """This process's part of a model.

    Args:
        config: of the model.
        options: Megatron's configuration of the same model as a `GPTModel`.
        given: further arguments of Megatron's model.
    """
    own = copy(options)
    own.num_layers *= TreeHybrid.sublayers
    own.num_layers_in_first_pipeline_stage = own.num_layers_in_last_pipeline_stage = None  # the pattern has stages
    return TreeHybrid(own, stack_spec(config), hybrid_layer_pattern=pattern_of(config, options), **given)


def pattern_of(config: MegatronConfig, options: Any) -> str:
    """All layers as Megatron writes them, with pipeline stages cut as those of a `GPTModel`."""
    mixes = {"K": Symbols.GDN, "A": FULL[config.attention][0]}
    layers = [
        mixes[kind] + (Symbols.MOE if has_experts(config, index) else Symbols.MLP)
        for index, kind in enumerate(config.kinds)
    ]
    stages, first = [], 0
    for rank in range(config.parallel.pipeline):
        count = get_num_layers_to_build(options, pp_rank=rank)
        stages.append("".join(layers[first : first + count]))
        first += count
    return str(Symbols.PIPE.join(stages))


def stack_spec(config: MegatronConfig) -> ModuleSpec:
    """Which classes the layers of each letter are built from."""
    parts = {}
    if "K" in config.kinds:
        parts["gdn_layer"] = layer_spec(**mixing(config, "K"))
    if "A" in config.kinds:
        parts[FULL[config.attention][1]] = layer_spec(**mixing(config, "A"))
    for index in range(config.layers):
        parts["moe_layer" if has_experts(config, index) else "mlp_layer"] = layer_spec(**feeding(config, index))
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**parts), params={"post_layer_norm": False})
