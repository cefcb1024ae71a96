"""The contracts of everything that computes: linear attention, full attention, models, and the `Env` they form.

Shape suffixes: R compact rows, T packed rows of a call, N sequences of a call, P requested states, H query and key
heads, HV value heads, G key/value heads of full attention, K and V head dims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from harts.backends.gradients import Optimizer, Pass, build_optimizer, gradient_norm
from harts.backends.linear.inputs import delta_inputs
from harts.backends.linear.rounds import run_rounds
from harts.backends.plan_tensors import AttentionViews, PackedCall, PlanTensors
from harts.backends.split import Split
from harts.schema import StageConfig

Rule = Literal["kda", "gdn"]
"""Of the reference model: `kda` decays each key channel by its own gate [T, HV, K], `gdn` a head by one [T, HV]."""


@dataclass(frozen=True)
class Need:
    """What a pipeline asks of its backends; each answers with `why_not`."""

    device: str
    dtype: torch.dtype
    rule: str
    """`kda` or `gdn` of the reference model; a third party's model and backend agree on a name of their own."""
    chunk_size: int
    conv_width: int
    linear_heads: tuple[int, int]
    """(H, HV)."""
    linear_head_dims: tuple[int, int]
    """(K, V)."""
    full_heads: tuple[int, int]
    """(query heads, key/value heads G)."""
    full_head_dims: tuple[int, int]
    """(query/key dim, value dim)."""
    least_gate: float = float("-inf")
    """Bound that the model keeps its log decays g above; none: -inf."""


class Backend:
    """Base of all backends: built from its own strict `Config`, and able to say why it cannot serve."""

    Config: ClassVar[type[StageConfig]] = StageConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can.

        Asked of devices that are not here, too, for the reasons that can be told without them.
        """
        return []


class RoundOutput(NamedTuple):
    """One packed call's results."""

    output: Tensor
    """[T, HV, V]."""
    states: Tensor
    """Requested states in float32 or wider, [P, HV, K, V]; differentiable."""


class LinearAttention(Backend, ABC):
    """Packed chunkwise linear attention that returns requested states (equation 16)."""

    token_inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "g", "beta")
    """Inputs with one row a token: gather, replay and scatter are generic over these."""
    rules: ClassVar[tuple[str, ...]] = get_args(Rule)
    """Rules that it serves, as in `Need.rule`."""
    bitwise: ClassVar[bool] = False
    """A promise that tests check: a trajectory's outputs have the same bits alone and as a part of any tree."""

    def draw_inputs(self, rows: int, need: Need, draw: torch.Generator) -> dict[str, Tensor]:
        """Random valid inputs for tests, one tensor [rows, ...] on the host for each of `token_inputs`.

        In the shapes and dtypes in which a model hands them over. These are the delta rules'; a backend of other
        inputs draws its own.
        """
        return delta_inputs(rows, need, draw)

    @abstractmethod
    def call(self, rows: dict[str, Tensor], packed: PackedCall, initial_state: Tensor, /) -> RoundOutput:
        """Run N independent sequences, each from its own state.

        Args:
            rows: one tensor for each of `token_inputs`. Of the delta rules: q, k [T, H, K]; v [T, HV, V]; g log-decay,
                natural logarithm, at most 0, [T, HV, K] for kda or [T, HV] for gdn; beta in (0, 1), [T, HV]. q and k
                are normalised already; q is not scaled yet (the call scales it by K ** -0.5).
            packed: the sequences and the states that are requested.
            initial_state: [N, HV, K, V], float32 or wider.

        Returns:
            Outputs of all rows and the requested states. A gradient of a returned state flows into the recurrence
            that produced it; several consumers sum.
        """

    def mix(self, inputs: dict[str, Tensor], plan: PlanTensors) -> Tensor:
        """Linear attention over the compact rows of one microbatch: every layer's entry.

        Walks the plan's rounds, one `call` each. A backend may execute the plan in another way, with equal results.

        Args:
            inputs: one tensor [R, ...] for each of `token_inputs`; k [R, H, K] and v [R, HV, V] are among them.
            plan: the microbatch.

        Returns:
            [R, HV, V]; zeros on padding rows, which are never read.

        Raises:
            ValueError: an input is missing, unknown, or has another number of rows than the plan.
        """
        return run_rounds(self, inputs, plan)


class AttentionCost(NamedTuple):
    """What one layer of full attention takes for one microbatch, forward and backward."""

    expanded_bytes: int
    """Keys and values that are held beside the compact ones while a layer runs."""
    flops: int
    """Floating-point operations of the products that are computed, those that a mask then discards included."""


class FullAttention(Backend, ABC):
    """Softmax attention of compact queries over each branch's ancestors and itself, bottom-right causal (22)."""

    expands: ClassVar[bool] = True
    """Whether it gathers the keys and values that branches share, once for each of them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        """Attend: every layer's entry.

        Args:
            q: [R, H, Dk], rotated.
            k: [R, G, Dk], rotated; H is a multiple of G.
            v: [R, G, Dv].
            views: which rows see which.
            scale: factor on the scores.

        Returns:
            [R, H, Dv]; zeros on padding rows, whose gradients are zeros.

        Raises:
            ValueError: q, k or v has another number of rows than the views, padding included.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            if len(x) != views.rows:
                raise ValueError(f"{name}: has {len(x)} rows, the views have {views.rows}")
        return self.call(q, k, v, views, scale)

    @abstractmethod
    def call(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float, /) -> Tensor:
        """Attend to rows whose number is that of the views: see `attend`."""

    @abstractmethod
    def deterministic(self, need: Need) -> bool:
        """Whether two runs give equal bits, forward and backward."""

    @abstractmethod
    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        """What one layer takes for a microbatch; also of a need that `why_not` refuses."""


@dataclass(frozen=True)
class ModelOutput:
    """What a model gives for the rows of one microbatch; `None` without MoE layers."""

    hidden: Tensor
    """After the final norm, [R, hidden]."""
    router_z: Tensor | None
    """Sum over MoE layers and rows of q_c * logsumexp(router logits)^2, scalar."""
    router_balance: Tensor | None
    """Sum over MoE layers of E * sum_e f_e * P_e, scalar (f, P weighted by q_c, normalised by sum q_c)."""
    expert_load: Tensor | None
    """q_c-weighted assignments of each expert, without gradient, [MoE layers, E]."""


class Model(Backend, ABC):
    """A whole model that runs on compact rows through the two attention backends."""

    module: torch.nn.Module
    """Owner of all parameters."""
    split: Split = Split()
    """What of a step this process computes: everything, unless a model says otherwise."""
    takes_module: ClassVar[bool] = False
    """Whether it can run a module of the caller's: `cls(config, linear, full, device, module)`."""

    @classmethod
    def waits_for_module(cls, config: Any) -> bool:
        """Whether only a module that the caller hands over can be run."""
        return False

    @classmethod
    def need_of(cls, config: Any, chunk_size: int, device: str) -> Need | None:
        """`need` of a model that has not been built; None if its config alone does not tell."""
        return None

    @abstractmethod
    def need(self, chunk_size: int) -> Need:
        """What this model asks of the attention backends."""

    def install(self) -> None:
        """Make the module ready for `forward`. It comes when everything serves: what is refused stays as it was."""

    @abstractmethod
    def forward(self, plan: PlanTensors) -> ModelOutput:
        """Hidden states of every compact row, each computed once."""

    @abstractmethod
    def head_weight(self) -> Tensor:
        """LM head, or this process's rows of it if `split.head` says so, [vocabulary, hidden]."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below it: rows of the whole LM head."""
        return self.head_weight().shape[0]

    @abstractmethod
    def update_expert_bias(self, expert_load: Tensor) -> None:
        """Move the routing bias of each expert against its load over the whole step, [MoE layers, E]."""

    def accumulate(self, count: int, passes: Iterator[Pass]) -> None:
        """Run a step's microbatches, replacing the gradients that parameters hold by those of the step.

        Args:
            count: microbatches that this process computes.
            passes: of them, in order. The next one is asked for when a forward pass begins, once more at the end.
        """
        self.module.zero_grad(set_to_none=True)
        for each in passes:
            each.run()

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place; `values` is on the host. Every process takes part."""
        return values

    def gradient_norm(self) -> float:
        """Euclidean norm of the step's gradients over all parameters, alike on every process.

        Raises:
            HartsError: a gradient is not finite; the parameter is named.
        """
        return gradient_norm(self.module.named_parameters())

    def optimizer(self, name: Optimizer, learning_rate: float) -> Any:
        """What updates the parameters from the step's gradients when its `step` is called."""
        return build_optimizer(name, learning_rate, self.module)


@dataclass(frozen=True)
class Env:
    """What executes: the built model with its backends inside."""

    model: Model
    device: str
    dtype: torch.dtype
