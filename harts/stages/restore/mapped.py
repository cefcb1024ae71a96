"""The restore stage `mapped`: from compact hidden states to log-probs in the original trajectories (SPEC section 6)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import PositiveInt
from torch import Tensor

from harts.errors import BackendError
from harts.ir import CompactOutputs, SemanticOutputs
from harts.ir.base import Int64, TensorLike
from harts.stages.base import Stage, StageConfig
from harts.stages.restore.labels import Predictions, predictions
from harts.stages.restore.mapped_logprobs import mapped_logprobs
from harts.stages.restore.positions import exchange, own_positions


class Mapped(Stage[CompactOutputs, SemanticOutputs]):
    """Read every trajectory's log-probs from the compact rows: logits once a row, one value a semantic position.

    Logits are divided by the temperature that each token was sampled with. Renormalisation by top-k or top-p
    sampling is not undone.

    Where the model's work is split over processes, all of them get every log-prob, in equal bits, and all have to
    compute the same loss of them. Gradients are then of this process's part alone: of its rows of the LM head, or of
    its positions; those of hidden states are summed over the processes by the model.
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
            BackendError: a target is outside the vocabulary, or hidden states do not come out of the model here.
            InputError: a temperature is not positive and finite.
        """
        if not self.env.model.split.has_output:
            raise BackendError(
                "restore: this process is no last pipeline stage; whole steps run over stages (run_step)"
            )
        columns = outputs.layout.plan.tree.columns
        wanted = predictions(outputs.layout, self.env.model.vocabulary)
        if self.config.positions == "all":
            return SemanticOutputs(outputs, *self._restored(outputs.hidden, wanted))
        trained = np.flatnonzero(columns.loss_mask[columns.predicted()])
        some = self._restored(outputs.hidden, wanted.take(trained))
        return SemanticOutputs(outputs, *(_among(each, trained, len(wanted.row)) for each in some))

    def _restored(self, hidden: TensorLike, wanted: Predictions) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of what is wanted; each process of `split.positions` computes those of some rows."""
        model, config = self.env.model, self.config
        weight, group = model.head_weight(), model.split.positions

        def computed(wanted: Predictions) -> tuple[Tensor, Tensor | None]:
            return mapped_logprobs(
                _tensor(hidden, weight.device),
                weight,
                wanted,
                rows_per_block=config.rows_per_block,
                entropy=config.entropy,
                split=model.split.head,
            )

        if group is None:
            return computed(wanted)
        own = own_positions(wanted.row, dist.get_rank(group), dist.get_world_size(group))
        values = [each for each in computed(wanted.take(own)) if each is not None]
        logprobs, *entropies = exchange(torch.stack(values), own, len(wanted.row), group).unbind()
        return logprobs, entropies[0] if entropies else None


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
