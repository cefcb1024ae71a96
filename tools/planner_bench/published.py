"""Figures of the paper's planner evaluation (arXiv 2608.28158, Tables 2 and 3); T = 65,536."""

from __future__ import annotations

from typing import NamedTuple

CAPACITY = 65_536


class Step(NamedTuple):
    """A row of Table 2; compact tokens are those after the split into microbatches."""

    paths: int
    raw: int
    harts: int
    or_tools: int
    time_ratio: float
    """Planning time of OR-Tools over that of HARTS; the paper gives no seconds."""


TABLE2 = (
    Step(1551, 42_329_859, 7_780_586, 8_058_974, 9.732),
    Step(1693, 44_799_214, 7_670_675, 7_915_111, 7.899),
    Step(2368, 58_835_220, 7_747_595, 8_361_767, 7.236),
    Step(1283, 34_603_796, 5_659_215, 5_924_124, 7.403),
    Step(1613, 43_931_290, 8_266_355, 8_556_470, 8.002),
    Step(1752, 48_612_718, 9_671_964, 9_774_737, 8.993),
    Step(1457, 38_966_280, 7_015_681, 7_233_955, 7.571),
    Step(1411, 38_541_212, 7_504_249, 7_697_111, 8.164),
    Step(1738, 48_352_605, 9_188_374, 9_256_559, 8.845),
    Step(1304, 36_062_624, 7_077_264, 7_435_059, 9.213),
)


class Balance(NamedTuple):
    """A row of Table 3 over the ten steps; imbalance in percent of the mean."""

    slots: int
    slot_p50: float
    slot_p95: float
    step_p50: float
    step_max: float


TABLE3 = {
    4: {
        "HARTS": Balance(301, 0.0247, 2.1379, 0.2607, 1.1050),
        "OR-Tools": Balance(319, 0.2628, 34.6410, 3.2079, 5.6756),
    },
    2: {
        "HARTS": Balance(599, 0.0069, 0.4963, 0.0343, 0.4667),
        "OR-Tools": Balance(614, 0.0851, 16.1598, 0.7799, 3.8462),
    },
}
"""By replicas D."""
