"""The same weights in Megatron's own model, which runs whole trajectories side by side: no plan, no sharing.

Layers, attention, router and norms are Megatron's. It has no KDA, and its GDN needs kernels: linear attention is ours,
a trajectory at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from harts.backends.model.megatron import options, spec
from harts.backends.model.megatron.backend import MegatronModel
from harts.backends.model.megatron.call import tree_params
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.megatron.linear_attention import TreeLinearAttention
from tests.backends.model.megatron.runs import BALANCE, Z, flat, one_by_one, policy_loss, tensors
from tests.parity.trees import Paths


class OneByOne(TreeLinearAttention):
    """[length, trajectories, hidden], each trajectory a microbatch of its own."""

    backends: tuple[Any, Any]

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, None]:
        alone = tensors(flat([list(range(len(hidden_states)))]))
        columns = [
            super(OneByOne, self).forward(column, packed_seq_params=tree_params(alone, *self.backends))[0]
            for column in hidden_states.split(1, dim=1)
        ]
        return torch.cat(columns, dim=1), None


class Scores(MegatronModule):
    """Attention written out; Megatron's own takes no value heads of another width."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[s, b, h, d] each to [s, b, h * d]."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)
        return mixed.flatten(2)


def with_router_losses(config: MegatronConfig, balance: str) -> Any:
    """Megatron's configuration of a model, with its own router losses."""
    made = options.transformer_config(config)
    made.moe_router_load_balancing_type = balance
    made.calculate_per_token_loss = False  # else its router losses are sums over tokens, for a schedule that divides
    if config.moe is not None:
        made.moe_aux_loss_coeff, made.moe_z_loss_coeff = BALANCE, Z
    return made


def stock(model: MegatronModel, balance: str = "aux_loss") -> Any:
    """Megatron's model with the weights of ours and Megatron's own router losses."""
    config = model.config
    made = with_router_losses(config, balance)
    layers = [_layer(config, index, (model.linear, model.full)) for index in range(config.layers)]
    norm = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.input_layernorm
    theirs = GPTModel(
        made,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
        vocab_size=config.vocab_size,
        max_sequence_length=0,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=config.rotary_percent,
        share_embeddings_and_output_weights=False,
    )
    theirs.load_state_dict(one_by_one(model.module.state_dict()))
    model_parallel_cuda_manual_seed(1)  # its attention asks for the random state of dropout, used or not
    return theirs


def _layer(config: MegatronConfig, index: int, backends: tuple[Any, Any]) -> ModuleSpec:
    dense = config.moe is None or index < config.moe.dense_layers
    layer = get_gpt_layer_local_spec(
        num_experts=None if dense or config.moe is None else config.moe.experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=bool(config.overrides.get("qk_layernorm")),
    )
    if config.kinds[index] == "K":
        layer.submodules.self_attention = spec.linear_attention(config)
        layer.submodules.self_attention.module = type("Bound", (OneByOne,), {"backends": backends})
    elif config.attention == "mla":
        layer.submodules.self_attention = spec.full_attention(config)
        if not config.head_gate:
            layer.submodules.self_attention.module = MLASelfAttention
        layer.submodules.self_attention.submodules.core_attention = Scores
    return layer


def stock_loss(theirs: Any, paths: Paths) -> Tensor:
    """Policy loss of a batch of trajectories of one length; Megatron adds the gradients of router losses itself."""
    ids = torch.tensor(paths)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return policy_loss(list(theirs(ids, positions, None)), paths)
