"""Run the model on the compact rows of one microbatch."""

from __future__ import annotations

import torch

from harts.backends.base import Env
from harts.backends.plan_tensors import build_plan_tensors
from harts.ir import CompactLayout, CompactOutputs
from harts.stages.base import Stage


class Compact(Stage[CompactLayout, CompactOutputs]):
    """Every compact row passes the model once; the outputs keep their autograd graph (SPEC section 5)."""

    needs_env = True
    env: Env

    def run(self, layout: CompactLayout, /) -> CompactOutputs:  # noqa: D102
        # multiplicities count: bfloat16 would round them from 257 on
        dtype = torch.promote_types(self.env.dtype, torch.float32)
        out = self.env.model.forward(build_plan_tensors(layout, self.env.device, dtype))
        return CompactOutputs(layout, out.hidden, out.router_z, out.router_balance, out.expert_load)
