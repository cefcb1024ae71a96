"""The model backend `megatron`: a hybrid model of Megatron-core on compact rows, in one process or many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import Tensor, distributed

from harts.backends.base import FullAttention, LinearAttention, Model, ModelOutput, Need
from harts.backends.gradients import Optimizer, Pass
from harts.backends.model.megatron.config import MegatronConfig
from harts.backends.model.moe import check_load, move_bias
from harts.backends.model.reference import Reference
from harts.backends.model.tokens import check_tokens
from harts.backends.plan_tensors import PlanTensors
from harts.backends.split import HeadSplit, Split
from harts.errors import BackendError, ConfigError


class MegatronModel(Model):
    """Layers, experts and recomputation are Megatron's; same config and seed give the same parameters everywhere."""

    Config = MegatronConfig
    config: MegatronConfig

    def __init__(
        self, config: MegatronConfig, linear: LinearAttention, full: FullAttention, device: str = "cpu"
    ) -> None:
        super().__init__(config)
        self.device, self.linear, self.full = device, linear, full
        self.made: Any = _megatron("run").built(config, device)
        self.module: Any = self.made.module
        self.split = _split(config, self.made.groups)
        self.parallel: Any = None
        """Keeps gradients in float32 and sums them over processes. In one process it takes them from `grad` once whole
        steps are run, and if `grad` would be narrower."""
        if distributed.get_world_size() > 1:
            self.parallel = _megatron("optimizer").data_parallel(self.module, config)

    def need(self, chunk_size: int) -> Need:
        """What this model asks of the attention backends."""
        return self.need_of(self.config, chunk_size, self.device)

    @classmethod
    def need_of(cls, config: MegatronConfig, chunk_size: int, device: str) -> Need:
        """`need` of a model that has not been built: the reference model's shapes, and the heads of one process."""
        need, ranks = Reference.need_of(config, chunk_size, device), config.parallel.heads_split
        key_heads, value_heads = need.linear_heads
        queries, keys = need.full_heads
        return replace(
            need,
            linear_heads=(key_heads // ranks, value_heads // ranks),
            full_heads=(queries // ranks, keys // ranks),
        )

    def forward(self, plan: PlanTensors) -> ModelOutput:
        """Hidden states of every compact row, each computed once; router statistics are this process's part.

        Raises:
            InputError: a token id is not in the vocabulary.
            BackendError: a layer did not run on the plan, or the rows cannot be split over the processes.
        """
        check_tokens(plan, self.config.vocab_size)
        output: ModelOutput = _megatron("run").run(self.made, plan, self.linear, self.full, self.config)
        return output

    def head_weight(self) -> Tensor:
        """This process's rows of the LM head, without those beyond the vocabulary, [vocabulary, hidden]."""
        weight: Tensor = self.module.output_layer.weight
        if self.split.head is None:
            return weight
        return weight[: max(0, self.config.vocab_size - self.split.head.first)]

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.config.vocab_size

    def update_expert_bias(self, expert_load: Tensor) -> None:
        """Move the selection bias of each expert against its load: bias += rate * sign(mean load - load).

        Args:
            expert_load: q_c-weighted assignments over the whole step, [MoE layers, E].

        Raises:
            BackendError: the shape is not that of this model's experts.
        """
        moe = self.config.moe
        layers = 0 if moe is None else self.config.layers - moe.dense_layers
        check_load(expert_load, layers, moe.experts if moe else 0)
        if moe is None or not moe.expert_bias_rate:
            return
        for number, router in _megatron("run").routers_of(self.module).items():
            move_bias(router.expert_bias, expert_load[number - 1 - moe.dense_layers], moe.expert_bias_rate)
            router.local_tokens_per_expert.zero_()  # counted for loops of Megatron

    def accumulate(self, count: int, passes: Iterator[Pass]) -> None:
        """Run a step's microbatches; several processes in the order of Megatron's schedule."""
        self._widen()
        if self.parallel is None:
            super().accumulate(count, passes)
        else:
            _megatron("schedule").run_schedule(self.parallel, count, passes)

    def _widen(self) -> None:
        """Train narrow weights as several processes do."""
        if self.parallel is None and self.config.dtype != "float32":
            self.parallel = _megatron("optimizer").data_parallel(self.module, self.config)

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place; `values` is on the host."""
        if self.parallel is not None:
            there = values.to(self.device)
            distributed.all_reduce(there)
            values.copy_(there)
        return values

    def gradient_norm(self) -> float:
        """Euclidean norm of the step's gradients over all parameters, alike on every process.

        Raises:
            HartsError: a gradient is not finite; the parameter is named.
        """
        if self.parallel is None:
            return super().gradient_norm()
        parts = _megatron("parts").parts_of(self.module, self.config, self.made.groups)
        sharded = self.config.parallel.distributed_optimizer
        norm: float = _megatron("optimizer").norm_over_processes(self.parallel, parts, sharded)
        return norm

    def optimizer(self, name: Optimizer, learning_rate: float) -> Any:
        """What updates the parameters: of several processes or narrow weights Megatron's own, with copies in float32.

        Raises:
            ConfigError: the distributed optimizer cannot be of this name.
        """
        self._widen()
        if self.parallel is None:
            return super().optimizer(name, learning_rate)
        if name == "sgd" and self.config.parallel.distributed_optimizer:
            raise ConfigError("train.optimizer: sgd: Megatron's distributed optimizer has adamw alone")
        return _megatron("optimizer").built_optimizer(name, learning_rate, self.parallel, self.config)


def _split(config: MegatronConfig, groups: Any) -> Split:
    rows = -(-config.vocab_size // groups.tp.size())
    return Split(
        replica=groups.dp.rank(),
        replicas=groups.dp.size(),
        head=HeadSplit(groups.tp, groups.tp.rank() * rows) if groups.tp.size() > 1 else None,
        positions=groups.cp if groups.cp.size() > 1 else None,
        has_output=groups.pp.rank() == groups.pp.size() - 1,
        leads=groups.tp_cp.rank() == 0,
        row_multiple=config.parallel.row_multiple,
    )


def _megatron(name: str) -> Any:
    """A module of this package that needs Megatron-core.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return import_module(f"harts.backends.model.megatron.{name}")
    except ImportError as error:
        raise BackendError(f"models: megatron: cannot be imported ({error}); pip install 'harts[megatron]'") from error
