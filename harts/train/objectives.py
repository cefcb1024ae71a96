"""What is minimised: GRPO, PPO and SFT as a share of the step's loss (SPEC section 6, equation 18).

Only trained positions are ever read. They are selected before any exponential, so that what a masked position holds
(-1e10, -inf, NaN) reaches neither the loss nor a gradient. torch is not imported: a file can be checked without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from harts.errors import ConfigError
from harts.ir import Columns, StepPlan
from harts.ir.base import Float64, Int64
from harts.stages.base import StageConfig
from harts.train.reduction import ReductionConfig, position_weights, trained_positions, trained_values

if TYPE_CHECKING:
    from torch import Tensor

LowerClip = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class LossTerms:
    """What an objective sees of one microbatch."""

    logprobs: Tensor
    """Current log-probs, in nats, [S - N]."""
    entropy: Tensor | None
    """In nats, [S - N]; None if `restore.entropy` is false."""
    columns: Columns
    step: StepPlan

    @cached_property
    def trained(self) -> Int64:
        """Indices of the trained positions, [t]."""
        return trained_positions(self.columns)

    @cached_property
    def current(self) -> Tensor:
        """Current log-probs of the trained positions, [t]."""
        return self.logprobs[self.trained]

    def column(self, field: str, values: Float64 | None) -> Tensor:
        """A column's values at the trained positions, [t].

        Raises:
            InputError: the column is missing, or not finite at a trained position.
        """
        return self.logprobs.new_tensor(trained_values(self.columns, field, values))

    def reduced(self, terms: Tensor, config: ReductionConfig) -> Tensor:
        """Sum of the trained positions' terms [t], each with its weight in the step's loss; scalar."""
        weights = position_weights(self.columns, self.step, config.reduction, config.denominator)
        return (terms * terms.new_tensor(weights[self.trained])).sum()


class Objective(ABC):
    """A registered objective, built from its own strict `Config`. Pure."""

    Config: ClassVar[type[StageConfig]] = StageConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the rollouts must have; `advantage` and its like stand for either form."""
        return ()

    @property
    def needs_entropy(self) -> bool:
        """Whether `restore.entropy` must be true."""
        return float(getattr(self.config, "entropy_coefficient", 0.0)) > 0

    @abstractmethod
    def loss(self, terms: LossTerms) -> Tensor:
        """This microbatch's share of the step's loss: the shares of all microbatches add up to it; scalar.

        A microbatch without a trained position gives exactly 0 with gradient 0.

        Raises:
            InputError: a column that it needs is missing, or not finite at a trained position.
            ConfigError: it needs the entropy, which is not restored.
        """


class Sft(Objective):
    """Negative log-likelihood of the trained tokens."""

    class Config(ReductionConfig):
        """Reduction only."""

    def loss(self, terms: LossTerms) -> Tensor:  # noqa: D102
        return terms.reduced(-terms.current, self.config)


class PolicyConfig(ReductionConfig):
    """What GRPO and PPO add to the surrogate."""

    kl_coefficient: NonNegativeFloat = 0.0
    """Factor on the KL estimate to the reference policy; above 0 needs `ref_logprobs`."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Factor on the entropy bonus; above 0 needs `restore.entropy: true`."""


class Grpo(Objective):
    """Clipped importance ratio times advantage, with optional KL to the reference and entropy bonus."""

    class Config(PolicyConfig):
        """Clips and the policy that the ratio is against."""

        clip_low: LowerClip = 0.2
        """The ratio is clipped below at 1 - clip_low."""
        clip_high: PositiveFloat = 0.2
        """The ratio is clipped above at 1 + clip_high."""
        old_logprobs: Literal["batch", "current"] = "batch"
        """batch: the policy that sampled, from the data. current: this policy before the step (on-policy, ratio 1)."""

    @property
    def columns(self) -> tuple[str, ...]:  # noqa: D102
        old = ("old_logprobs",) if self.config.old_logprobs == "batch" else ()
        return ("advantage", *old, *_reference(self.config))

    def loss(self, terms: LossTerms) -> Tensor:  # noqa: D102
        current = self.config.old_logprobs == "current"
        old = terms.current.detach() if current else sampled_logprobs(terms)
        return policy_loss(terms, old, self.config.clip_low, self.config.clip_high, self.config)


class Ppo(Objective):
    """Clipped surrogate against the sampling policy, with KL to the reference and optional entropy bonus."""

    class Config(PolicyConfig):
        """Clips."""

        clip: LowerClip = 0.2
        """The ratio is clipped to [1 - clip, 1 + clip]."""
        clip_high: PositiveFloat | None = None
        """Upper clip if it differs: [1 - clip, 1 + clip_high]."""

    @property
    def columns(self) -> tuple[str, ...]:  # noqa: D102
        return ("advantage", "old_logprobs", *_reference(self.config))

    def loss(self, terms: LossTerms) -> Tensor:  # noqa: D102
        low, high = self.config.clip, self.config.clip_high
        return policy_loss(terms, sampled_logprobs(terms), low, low if high is None else high, self.config)


def policy_loss(terms: LossTerms, old: Tensor, low: float, high: float, config: PolicyConfig) -> Tensor:
    """Surrogate, KL penalty and entropy bonus of the trained positions, reduced; scalar."""
    loss = surrogate(terms, old, low, high)
    if config.kl_coefficient:
        loss = loss + config.kl_coefficient * kl_to_reference(terms)
    if config.entropy_coefficient:
        if terms.entropy is None:
            raise ConfigError(
                f"objective.entropy_coefficient: {config.entropy_coefficient} needs restore.entropy: true"
            )
        loss = loss - config.entropy_coefficient * terms.entropy[terms.trained]
    return terms.reduced(loss, config)


def sampled_logprobs(terms: LossTerms) -> Tensor:
    """Log-probs of the trained tokens under the policy that sampled them, [t]."""
    return terms.column("old_logprobs", terms.columns.old_logprobs)


def _reference(config: Any) -> tuple[str, ...]:
    return ("ref_logprobs",) if config.kl_coefficient > 0 else ()


def surrogate(terms: LossTerms, old: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(current - old), [t].

    The log-ratio is clipped instead of the ratio, on the one side that the sign of A makes effective: the same
    number, but a ratio that overflows stays finite, value and gradient, wherever it is clipped.
    """
    advantage = terms.column("advantage", terms.columns.per_token("advantage"))
    log_ratio = terms.current - old
    clipped = log_ratio.clamp(max=math.log1p(high)).where(advantage >= 0, log_ratio.clamp(min=math.log1p(-low)))
    return -clipped.exp() * advantage


def kl_to_reference(terms: LossTerms) -> Tensor:
    """exp(ref - current) - (ref - current) - 1, an unbiased and never negative estimate, [t]."""
    gap = terms.column("ref_logprobs", terms.columns.ref_logprobs) - terms.current
    return gap.exp() - gap - 1
