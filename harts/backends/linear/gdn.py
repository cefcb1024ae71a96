"""Gated delta net on a GPU: one decay gate a head."""

from __future__ import annotations

from typing import ClassVar

import triton

from harts.backends.base import Need
from harts.backends.devices import capability
from harts.backends.linear.tree.backend import TreeBackend
from harts.backends.linear.tree.gdn_chunks import KERNELS, GdnChunks
from harts.backends.linear.tree.launch import Launcher
from harts.backends.linear.tree.machine import version
from harts.backends.linear.tree.rule import Rule
from harts.backends.linear.tree.states import KERNELS as STATE_KERNELS

MISCOMPILED = (3, 4, 0), (3, 7, 1)
"""Triton versions, from and below, whose code of the gated backward kernel is wrong on Hopper."""


class Gdn(TreeBackend):
    """GDN over flash-linear-attention's chunk kernels and our own state kernels."""

    rules: ClassVar[tuple[str, ...]] = ("gdn",)
    gate_dims = 2
    kernels = (*KERNELS, *STATE_KERNELS)

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        found = super().why_not(need)
        first, fixed = MISCOMPILED
        if capability(need.device) == (9, 0) and first <= version(triton.__version__) < fixed:
            found.append(
                f"triton {triton.__version__} miscompiles the gradients of q, k and g on Hopper "
                "(flash-linear-attention issue 640): install triton 3.7.1 or newer"
            )
        return found

    def _chunks(self, launcher: Launcher) -> Rule:
        return GdnChunks(launcher)
