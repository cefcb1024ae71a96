"""Bottom-up peeling: while what is left below a fork does not fit into one microbatch, fill one there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harts.compiled import compiled
from harts.ir.base import Int32, Int64
from harts.ir.prefix_tree import PrefixTree
from harts.stages.partition.search.knapsack import CELLS, OPEN, TAKE, Choice, fill
from harts.stages.partition.search.rng import Rng, below, seeded

WINDOW = 1024
"""Nodes that one microbatch is filled from, rounded up to whole children of the fork."""
PROFIT = 4
"""Of a token that no other microbatch will need."""


class Tools(NamedTuple):
    """What a search uses from its first to its last step."""

    rng: Rng
    """Changed by every draw."""
    space: NDArray[np.int32]
    """For knapsacks, [WINDOW + 1, CELLS]; larger ones make their own."""


class Rule(NamedTuple):
    """How microbatches are filled."""

    capacity: int
    """Compact tokens that one may hold."""
    noise: int
    """Tokens count up to this many 256ths more, at random; 0 is the plain rule."""
    penalty: int
    """Of 64 tokens that are computed again; a token that is done with counts PROFIT."""


class Rest(NamedTuple):
    """What no microbatch holds yet."""

    alive: NDArray[np.bool_]
    """Nodes with trajectories that are left, [M]."""
    below: Int64
    """Their tokens below each node, [M]."""
    label: Int64
    """Microbatch of each leaf's position so far, [N]."""


def tools(seed: int) -> Tools:
    """The tools of one thread."""
    return Tools(seeded(seed), np.empty((WINDOW + 1, CELLS), dtype=np.int32))


@compiled
def peeled(tree: PrefixTree, rule: Rule, tools: Tools) -> tuple[Int64, int]:
    """Put the trajectories of a tree into microbatches.

    What one takes below a fork is chosen so that the least is left for the others: tokens that only its own
    trajectories hold count, those that others will compute again do not.

    Args:
        tree: none of its trajectories is longer than the capacity.
        rule: how microbatches are filled.
        tools: of this thread.

    Returns:
        Microbatch of each leaf's position, [N], and how many there are.
    """
    count = len(tree.end)
    profit = _profits(tree, rule, tools.rng)
    label = np.empty(np.count_nonzero(tree.leaf >= 0), dtype=np.int64)
    rest = Rest(np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.int64), label)
    used = 0
    for v in range(count):
        if tree.leaf[v] >= 0:
            continue
        _refresh(tree, rest, v)
        while tree.end[v] + rest.below[v] > rule.capacity:
            choice = _choice(tree, _window(tree, rest.alive, v), profit)
            enough = len(choice.node) < len(tools.space)
            space = tools.space if enough else np.empty((len(choice.node) + 1, CELLS), dtype=np.int32)
            taken = fill(choice, tree.end[v], rule.capacity - tree.end[v], rule.penalty, space)
            if not _close(tree, choice, taken, rest, used):
                _close_first(tree, choice.node, rest, used)
            used += 1
            for node in choice.node:
                if rest.alive[node] and tree.leaf[node] < 0:
                    _refresh(tree, rest, node)
            _refresh(tree, rest, v)
    last = False
    for v in range(count):
        if rest.alive[v] and tree.leaf[v] >= 0:
            label[tree.leaf[v]] = used
            last = True
    return label, used + last


@compiled
def _profits(tree: PrefixTree, rule: Rule, rng: Rng) -> Int64:
    """Of each node's own tokens, small enough for sums of 32 bits, and 1 for each trajectory, [M]."""
    profit = np.empty(len(tree.end), dtype=np.int64)
    scale = 1 + rule.capacity // (1 << 26)
    for v in range(len(profit)):
        more = below(rng, rule.noise) if rule.noise > 0 else 0
        profit[v] = tree.tokens[v] * PROFIT * (256 + more) // 256 // scale + (tree.leaf[v] >= 0)
    return profit


@compiled
def _refresh(tree: PrefixTree, rest: Rest, v: int) -> None:
    """Sum what is left below a fork; one that has nothing left is no longer alive."""
    total, some = 0, False
    child, before = v - 1, v - tree.size[v]
    while child > before:
        if rest.alive[child]:
            total += rest.below[child] + tree.tokens[child]
            some = True
        child -= tree.size[child]
    rest.below[v] = total
    rest.alive[v] = some


@compiled
def _window(tree: PrefixTree, alive: NDArray[np.bool_], v: int) -> Int64:
    """Alive nodes below a fork, in postorder: whole children, the first of them, until there are enough."""
    begins = np.empty(tree.size[v], dtype=np.int64)
    children = 0
    child, before = v - 1, v - tree.size[v]
    while child > before:
        if alive[child]:
            begins[children] = child
            children += 1
        child -= tree.size[child]
    nodes = np.empty(tree.size[v], dtype=np.int64)
    used = 0
    while children > 0 and used < WINDOW:
        children -= 1
        child = begins[children]
        for node in range(child - tree.size[child] + 1, child + 1):
            if alive[node]:
                nodes[used] = node
                used += 1
    return nodes[:used]


@compiled
def _choice(tree: PrefixTree, nodes: Int64, profit: Int64) -> Choice:
    count = len(nodes)
    size = np.ones(count, dtype=np.int64)
    end = np.empty(count, dtype=np.int64)
    tokens = np.empty(count, dtype=np.int64)
    gain = np.empty(count, dtype=np.int64)
    leaf = np.empty(count, dtype=np.bool_)
    for j in range(count):
        v = nodes[j]
        end[j], tokens[j], gain[j], leaf[j] = tree.end[v], tree.tokens[v], profit[v], tree.leaf[v] >= 0
        child, first = j - 1, v - tree.size[v] + 1
        while child >= 0 and nodes[child] >= first:
            size[j] += size[child]
            child -= size[child]
    return Choice(nodes, size, end, tokens, gain, leaf)


@compiled
def _close(tree: PrefixTree, choice: Choice, taken: Int32, rest: Rest, number: int) -> bool:
    """Give what was taken to a microbatch; False if that is no trajectory."""
    some = False
    j = len(taken) - 1
    while j >= 0:
        if taken[j] == TAKE:
            for node in choice.node[j - choice.size[j] + 1 : j + 1]:
                rest.alive[node] = False
                if tree.leaf[node] >= 0:
                    rest.label[tree.leaf[node]] = number
            some = True
        j -= 1 if taken[j] == OPEN else choice.size[j]
    return some


@compiled
def _close_first(tree: PrefixTree, nodes: Int64, rest: Rest, number: int) -> None:
    """Rounding left nothing that fits: one trajectory always does."""
    for node in nodes:
        if tree.leaf[node] >= 0:
            rest.alive[node] = False
            rest.label[tree.leaf[node]] = number
            break
