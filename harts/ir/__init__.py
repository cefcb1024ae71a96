"""The typed intermediate representation: what flows between stages. numpy and msgpack only, never torch."""

from harts.ir.base import Value
from harts.ir.compact_trie import CompactTrie
from harts.ir.layout import CompactLayout
from harts.ir.outputs import CompactOutputs, SemanticOutputs
from harts.ir.partitions import Partitions
from harts.ir.rollout_batch import Columns, RolloutBatch
from harts.ir.round_plan import RoundPlan
from harts.ir.segment_tree import SegmentTree
from harts.ir.semantic_map import SemanticMap
from harts.ir.step_plan import PerMicrobatch, StepPlan

__all__ = [
    "Columns",
    "CompactLayout",
    "CompactOutputs",
    "CompactTrie",
    "Partitions",
    "PerMicrobatch",
    "RolloutBatch",
    "RoundPlan",
    "SegmentTree",
    "SemanticMap",
    "SemanticOutputs",
    "StepPlan",
    "Value",
]
