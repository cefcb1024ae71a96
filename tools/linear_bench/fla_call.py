"""One packed call of FLA's public operators, under the contract of ours: gates, norms and beta are made outside."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harts.backends.base import Rule


class Packing(NamedTuple):
    """The same tensors at every call: FLA keeps what it derives from them, as long as they are the same."""

    device: Tensor
    host: Tensor


class FlaCall(Protocol):
    """Outputs [T, HV, V] and, if asked, final states [N, HV, K, V] of packed sequences."""

    def __call__(
        self, rows: dict[str, Tensor], packing: Packing, initial_state: Tensor | None = None, final: bool = False
    ) -> tuple[Tensor, Tensor]: ...


def packing(cu_seqlens: Tensor, device: str) -> Packing:
    """Starts and end of sequences on the host, [N + 1], on both."""
    host = cu_seqlens.to(torch.int64)
    return Packing(host.to(device), host)


def fla_call(rule: Rule, safe_gate: bool) -> FlaCall:
    """The operator of a rule.

    Raises:
        ModuleNotFoundError: fla-core is not installed.
    """
    if rule == "kda":
        from fla.ops.kda import chunk_kda as operator  # noqa: PLC0415  needs a GPU, or its interpreter

        options = {"safe_gate": safe_gate}
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as operator  # noqa: PLC0415

        options = {}

    def call(
        rows: dict[str, Tensor], packing: Packing, initial_state: Tensor | None = None, final: bool = False
    ) -> tuple[Tensor, Tensor]:
        output, states = operator(
            **{name: x.unsqueeze(0) for name, x in rows.items()},
            initial_state=initial_state,
            output_final_state=final,
            cu_seqlens=packing.device,
            cu_seqlens_cpu=packing.host,
            **options,
        )
        return output.squeeze(0), states

    return call
