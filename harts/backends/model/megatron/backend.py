"""The model backend `megatron`: a hybrid model of Megatron-core on compact rows, in one process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from harts.backends.base import FullAttention, LinearAttention, Model, ModelOutput, Need
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.moe import check_load, move_bias
from harts.backends.model.reference import Reference
from harts.backends.model.tokens import check_tokens
from harts.backends.plan_tensors import PlanTensors
from harts.errors import BackendError


class MegatronModel(Model):
    """Layers, experts and recomputation are Megatron's; same config and seed give the same parameters everywhere."""

    Config = MegatronConfig
    config: MegatronConfig

    def __init__(
        self, config: MegatronConfig, linear: LinearAttention, full: FullAttention, device: str = "cpu"
    ) -> None:
        super().__init__(config)
        self.device, self.linear, self.full = device, linear, full
        self.megatron = _megatron()
        self.module: Any = self.megatron.built(config, device)

    def need(self, chunk_size: int) -> Need:
        """What this model asks of the attention backends."""
        return self.need_of(self.config, chunk_size, self.device)

    @classmethod
    def need_of(cls, config: MegatronConfig, chunk_size: int, device: str) -> Need:
        """`need` of a model that has not been built: that of the reference model, whose shapes it has."""
        return Reference.need_of(config, chunk_size, device)

    def forward(self, plan: PlanTensors) -> ModelOutput:
        """Hidden states of every compact row, each computed once.

        Raises:
            InputError: a token id is not in the vocabulary.
            BackendError: a layer did not run on the plan.
        """
        check_tokens(plan, self.config.vocab_size)
        output: ModelOutput = self.megatron.run(self.module, plan, self.linear, self.full, self.config.kinds)
        return output

    def head_weight(self) -> Tensor:
        """LM head, [vocabulary, hidden]."""
        weight: Tensor = self.module.output_layer.weight
        return weight

    def update_expert_bias(self, expert_load: Tensor) -> None:
        """Move the selection bias of each expert against its load: bias += rate * sign(mean load - load).

        Args:
            expert_load: q_c-weighted assignments over the whole step, [MoE layers, E].

        Raises:
            BackendError: the shape is not that of this model's experts.
        """
        routers = self.megatron.routers_of(self.module).values()
        moe = self.config.moe
        check_load(expert_load, len(routers), moe.experts if moe else 0)
        if moe is None or not moe.expert_bias_rate:
            return
        for router, load in zip(routers, expert_load, strict=True):
            move_bias(router.expert_bias, load, moe.expert_bias_rate)
            router.local_tokens_per_expert.zero_()  # counted for loops of Megatron


def _megatron() -> Any:
    """What needs Megatron-core.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return import_module("harts.backends.model.megatron.run")
    except ImportError as error:
        raise BackendError(f"models: megatron: cannot be imported ({error}); pip install 'harts[megatron]'") from error
