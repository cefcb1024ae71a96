"""Kimi Delta Attention on a GPU: one decay gate a key channel."""

from __future__ import annotations

from typing import ClassVar

from harts.backends.base import Need
from harts.backends.linear.tree.backend import TreeBackend, TreeConfig
from harts.backends.linear.tree.kda_chunks import KERNELS, KdaChunks
from harts.backends.linear.tree.launch import Launcher
from harts.backends.linear.tree.rule import Rule
from harts.backends.linear.tree.states import KERNELS as STATE_KERNELS

LEAST_SAFE_GATE = -5.0
"""Log decay down to which the factors of a block of 16 tokens stay within float32."""


class KdaConfig(TreeConfig):
    """Settings of the KDA kernels."""

    safe_gate: bool = False
    """Run the diagonal blocks on tensor cores, for models that bound their log decays to [-5, 0) (`lower_bound` of the
    gate); a gate below would make results wrong or infinite, so that other models are refused."""


class Kda(TreeBackend):
    """KDA over flash-linear-attention's chunk kernels and our own state kernels."""

    Config = KdaConfig
    config: KdaConfig
    rules: ClassVar[tuple[str, ...]] = ("kda",)
    gate_dims = 3
    kernels = (*KERNELS, *STATE_KERNELS)

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        found = super().why_not(need)
        if self.config.safe_gate and need.least_gate < LEAST_SAFE_GATE:
            found.append(
                f"safe_gate needs log decays of at least {LEAST_SAFE_GATE}, the model's bound is {need.least_gate}"
            )
        return found

    def _chunks(self, launcher: Launcher) -> Rule:
        return KdaChunks(launcher, self.config.safe_gate)
