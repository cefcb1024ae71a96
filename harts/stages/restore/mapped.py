"""The restore stage `mapped`: from compact hidden states to log-probs in the original trajectories (SPEC section 6)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from harts.ir import CompactOutputs, SemanticOutputs
from harts.ir.base import Int64, TensorLike
from harts.stages.base import Stage, StageConfig
from harts.stages.restore.labels import predictions
from harts.stages.restore.mapped_logprobs import mapped_logprobs


class Mapped(Stage[CompactOutputs, SemanticOutputs]):
    """Read every trajectory's log-probs from the compact rows: logits once a row, one value a semantic position.

    Logits are divided by the temperature that each token was sampled with. Renormalisation by top-k or top-p
    sampling is not undone.
    """

    class Config(StageConfig):
        """How much exists at a time, and what else to restore."""

        rows_per_block: PositiveInt = 1024
        """Compact rows whose logits exist at the same time."""
        entropy: bool = False
        """Also restore the entropy of each next-token distribution, in nats."""
        positions: Literal["all", "trained"] = "all"
        """`trained`: of trained tokens alone, NaN for the others; rows that predict none of them have no logits."""

    needs_env = True

    def run(self, outputs: CompactOutputs, /) -> SemanticOutputs:
        """Restore one microbatch.

        Raises:
            BackendError: a target is outside the vocabulary.
            InputError: a temperature is not positive and finite.
        """
        weight = self.env.model.head_weight()
        hidden = _tensor(outputs.hidden, weight.device)
        wanted = predictions(outputs.layout, self.env.model.vocabulary)
        rows_per_block, entropy = self.config.rows_per_block, self.config.entropy
        if self.config.positions == "all":
            restored = mapped_logprobs(hidden, weight, wanted, rows_per_block=rows_per_block, entropy=entropy)
            return SemanticOutputs(outputs, *restored)
        columns = outputs.layout.plan.tree.columns
        trained = np.flatnonzero(columns.loss_mask[columns.predicted()])
        some = mapped_logprobs(hidden, weight, wanted.take(trained), rows_per_block=rows_per_block, entropy=entropy)
        return SemanticOutputs(outputs, *(_among(each, trained, len(wanted.row)) for each in some))


def _among(values: Tensor | None, members: Int64, count: int) -> Tensor | None:
    """Values of some positions among all, NaN for the others."""
    if values is None:
        return None
    index = torch.from_numpy(members).to(values.device)
    return values.new_full((count,), torch.nan).index_copy(0, index, values)


def _tensor(hidden: TensorLike, device: torch.device) -> Tensor:
    """Hidden states as they were executed, or as a dump of them was read."""
    if isinstance(hidden, np.ndarray):
        return torch.from_numpy(hidden.copy()).to(device)
    return hidden  # type: ignore[no-any-return]
