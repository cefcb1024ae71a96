"""The small hybrid model that HARTS is tested with: linear and full attention, dense or MoE, on compact rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.backends.base import FullAttention, LinearAttention, Model, ModelOutput, Need
from harts.backends.model.block import Hybrid
from harts.backends.model.config import ReferenceConfig
from harts.backends.model.moe import RouterStatistics, check_load, move_bias
from harts.backends.model.parameters import Draw, initialise
from harts.backends.model.tokens import check_tokens
from harts.backends.plan_tensors import PlanTensors


class Reference(Model):
    """A model such as `KKKA` repeated. Same config and seed give the same parameters in every process."""

    Config = ReferenceConfig
    config: ReferenceConfig

    def __init__(
        self, config: ReferenceConfig, linear: LinearAttention, full: FullAttention, device: str = "cpu"
    ) -> None:
        super().__init__(config)
        self.device = device
        self.module: Hybrid = Hybrid(config, linear, full)
        initialise(self.module, Draw(config.seed, config.init_std))
        self.module.to(device)

    def need(self, chunk_size: int) -> Need:
        """What this model asks of the attention backends."""
        return self.need_of(self.config, chunk_size, self.device)

    @classmethod
    def need_of(cls, config: ReferenceConfig, chunk_size: int, device: str) -> Need:
        """`need` of a model that has not been built."""
        return Need(
            device=device,
            dtype=config.torch_dtype,
            rule=config.rule,
            chunk_size=chunk_size,
            conv_width=config.conv_width,
            linear_heads=(config.linear_heads, config.linear_value_heads),
            linear_head_dims=(config.linear_key_dim, config.linear_value_dim),
            full_heads=config.full_heads,
            full_head_dims=config.full_head_dims,
            least_gate=-math.inf if config.least_gate is None else config.least_gate,
        )

    def forward(self, plan: PlanTensors) -> ModelOutput:
        """Hidden states of every compact row, each computed once.

        Raises:
            InputError: a token id is not in the vocabulary.
        """
        check_tokens(plan, self.config.vocab_size)
        padding = torch.arange(len(plan.input_ids), device=plan.input_ids.device) >= plan.rows
        # zeros, whatever token 0 holds: a NaN in a padding row would reach every weight gradient as 0 * NaN
        x = self.module.embedding(plan.input_ids).masked_fill(padding[:, None], 0.0)
        found: list[RouterStatistics] = []
        for block in self.module.blocks:
            x, statistics = self._run(block, x, plan)
            if statistics is not None:
                found.append(statistics)
        hidden = self.module.norm(x)
        if not found:
            return ModelOutput(hidden, None, None, None)
        z, balance, load = (torch.stack(each) for each in zip(*found, strict=True))
        return ModelOutput(hidden, z.sum(), balance.sum(), load)

    def _run(self, block: Any, x: Tensor, plan: PlanTensors) -> Any:
        if self.config.recompute == "none":
            return block(x, plan)
        return checkpoint(block, x, plan, use_reentrant=False, preserve_rng_state=False)

    def head_weight(self) -> Tensor:
        """LM head, [vocabulary, hidden]."""
        return self.module.head.weight

    def update_expert_bias(self, expert_load: Tensor) -> None:
        """Move the selection bias of each expert against its load: bias += rate * sign(mean load - load).

        Args:
            expert_load: q_c-weighted assignments over the whole step, [MoE layers, E].

        Raises:
            BackendError: the shape is not that of this model's experts.
        """
        layers = self.module.moe_layers
        experts = self.config.moe.experts if self.config.moe else 0
        check_load(expert_load, len(layers), experts)
        for layer, load in zip(layers, expert_load, strict=True):
            move_bias(layer.expert_bias, load, layer.config.expert_bias_rate)
