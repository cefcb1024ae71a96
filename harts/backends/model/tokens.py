"""A check that all models share."""

from __future__ import annotations

from harts.backends.plan_tensors import PlanTensors
from harts.errors import InputError


def check_tokens(plan: PlanTensors, vocab_size: int) -> None:
    """Find a token that a model does not know.

    Raises:
        InputError: there is one; which row and position, and how many tokens the model knows.
    """
    row, token = plan.largest_token
    if token >= vocab_size:
        where = f"compact row {row} (position {int(plan.position_ids[row])})"
        raise InputError(f"tokens: {where} is token {token}, but the model's vocab_size is {vocab_size}")
