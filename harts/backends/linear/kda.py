"""Kimi Delta Attention on a GPU: one decay gate a key channel."""

from __future__ import annotations

from typing import ClassVar

from harts.backends.linear.tree.backend import TreeBackend, TreeConfig
from harts.backends.linear.tree.kda_chunks import KERNELS, KdaChunks
from harts.backends.linear.tree.launch import Launcher
from harts.backends.linear.tree.rule import Rule
from harts.backends.linear.tree.states import KERNELS as STATE_KERNELS


class KdaConfig(TreeConfig):
    """Settings of the KDA kernels."""

    safe_gate: bool = False
    """Promise that every log decay lies in [-5, 0): the diagonal blocks then run on tensor cores. A gate below makes
    results wrong or infinite without notice, so a model has to bound its gates itself (lower_bound of its gate)."""


class Kda(TreeBackend):
    """KDA over flash-linear-attention's chunk kernels and our own state kernels."""

    Config = KdaConfig
    config: KdaConfig
    rules: ClassVar[tuple[str, ...]] = ("kda",)
    kernels = (*KERNELS, *STATE_KERNELS)

    def _chunks(self, launcher: Launcher) -> Rule:
        return KdaChunks(launcher, self.config.safe_gate)
