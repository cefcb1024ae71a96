"""One training step: every microbatch forward and backward, gradients accumulated, then one optimizer step.

Nothing of a microbatch's graph outlives it. An untrained token still is a semantic token: it counts in the router
losses and in the experts' loads, as in trajectory-wise training. With several processes every one has the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from harts.backends.base import Env
from harts.backends.gradients import Pass
from harts.errors import ConfigError
from harts.ir import CompactLayout, PerMicrobatch
from harts.train.check import check_rollouts
from harts.train.config import TrainConfig
from harts.train.objectives import Objective
from harts.train.totals import StepResult, Totals


def run_step(
    layouts: PerMicrobatch[CompactLayout],
    execute: Any,
    restore: Any,
    objective: Objective,
    config: TrainConfig,
    *,
    on_microbatch: Callable[[int], None] | None = None,
) -> StepResult:
    """Compute the loss and the gradients of a step, replacing the gradients that the parameters hold.

    Args:
        layouts: every microbatch of the step, those of other replicas included.
        execute: stage CompactLayout -> CompactOutputs; `execute.env` holds the model.
        restore: stage CompactOutputs -> SemanticOutputs.
        objective: gives each microbatch's share of the policy loss.
        config: coefficients of the router losses.
        on_microbatch: called with the number of each microbatch that this process computes once it is done.

    Raises:
        ConfigError: the step was planned for another number of replicas than the model has.
        InputError: the rollouts lack a column or hold a token outside the vocabulary.
        HartsError: a loss or a gradient is not finite; the microbatch or parameter is named.
    """
    model = execute.env.model
    _check_replicas(layouts, model.split.replicas)
    check_rollouts(layouts, objective, model.vocabulary)
    begin = time.perf_counter()
    totals = Totals(layouts, objective, config, model.split)
    numbers = range(model.split.replica, len(layouts), model.split.replicas)

    def passes() -> Iterator[Pass]:
        for number in numbers:
            yield totals.watched(number, partial(execute.run, layouts.items[number]), restore.run)
            if on_microbatch is not None:
                on_microbatch(number)

    model.accumulate(len(numbers), passes())
    totals.gather(model.total)
    norm = model.gradient_norm()  # waits for the device, so it belongs to the time
    return totals.result(norm, time.perf_counter() - begin)


def _check_replicas(layouts: PerMicrobatch[CompactLayout], replicas: int) -> None:
    if replicas not in (1, layouts.step.replicas):
        raise ConfigError(
            f"partition.replicas: the step is planned for {layouts.step.replicas}, the model has {replicas} "
            "data-parallel replicas"
        )


def apply_step(env: Env, optimizer: Any, result: StepResult) -> None:
    """Update the parameters, and the expert biases from the whole step's loads; nothing if nothing was trained."""
    if result.trained_tokens == 0:
        return
    optimizer.step()
    if result.expert_load is not None:
        env.model.update_expert_bias(result.expert_load)
