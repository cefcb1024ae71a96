"""What needs no GPU: refusals, costs, and the lists that launches get."""

import pytest
import torch

from harts.backends.full.costs import pass_flops
from harts.backends.full.flash_attention_4 import FlashAttention4, FlashAttention4Config
from harts.backends.full.tree import backend as tree_backend
from harts.backends.full.tree.backend import Tree
from harts.backends.full.tree.plan import TileSizes, tile_sizes, tree_plan
from harts.registry import resolve
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, views_of, visibility
from tests.backends.full.packed_fakes import need
from tests.backends.full.tree.library import seen_by

BF16 = {"dtype": torch.bfloat16, "full_heads": (16, 16), "full_head_dims": (192, 128)}
CHAIN = [(-1, 1000), (999, 129)]


@pytest.fixture
def hopper(monkeypatch):
    """A machine with everything that it needs."""
    monkeypatch.setattr(tree_backend, "machine_faults", lambda need, least: [])
    monkeypatch.setattr(tree_backend, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tree_backend, "import_faults", lambda module, extra: [])


def test_is_registered():
    assert resolve("full_attention", "tree") is Tree


def test_it_says_where_it_runs():
    assert Tree(StageConfig()).why_not(need(**BF16))[0] == "it needs a CUDA device, the device is cpu"


def test_every_reason_is_told(hopper):
    faulty = need(dtype=torch.float32, full_heads=(16, 2), full_head_dims=(250, 130))
    reasons = Tree(StageConfig()).why_not(faulty)
    assert len(reasons) == 3
    assert "torch.float32" in reasons[0]
    assert "(250, 130)" in reasons[1]
    assert "16 over 2" in reasons[2]


def test_another_compute_capability_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(tree_backend, "capability", lambda device: (10, 0))
    (reason,) = Tree(StageConfig()).why_not(need(**BF16))
    assert "compute capability 9.0, cpu has 10.0" in reason


def test_without_a_reason_it_serves(hopper):
    assert Tree(StageConfig()).why_not(need(**BF16)) == []


@pytest.mark.parametrize(
    ("head_dims", "sizes"),
    [
        ((64, 64), ((128, 128), (128, 128))),
        ((96, 96), ((128, 128), (64, 128))),
        ((128, 128), ((128, 128), (64, 128))),
        ((192, 128), ((128, 128), (64, 96))),
        ((256, 256), ((128, 80), (64, 64))),
        ((192, 192), None),
        ((128, 256), None),
    ],
)
def test_tile_sizes(head_dims, sizes):
    assert tile_sizes(head_dims) == (None if sizes is None else TileSizes(*sizes))


def test_unknown_head_dims_are_refused_where_they_are_used():
    q = torch.zeros(19, 2, 192)
    with pytest.raises(ValueError, match=r"head dims \(192, 192\)"):
        Tree(StageConfig()).attend(q, q, q, views_of(THREE_LEVELS), 1.0)


def test_it_expands_nothing_and_computes_whole_tiles():
    views, asked = views_of(CHAIN), need(**BF16)
    cost = Tree(StageConfig()).cost(views, asked)
    assert cost.expanded_bytes == 0
    assert pass_flops(views.pairs, asked) < cost.flops < 1.5 * pass_flops(views.pairs, asked)


def test_a_plan_is_made_once():
    views = views_of(CHAIN)
    assert tree_plan(views, TileSizes((128, 128), (64, 96))) is tree_plan(views, TileSizes((128, 128), (64, 96)))


BRANCHES = [*CHAIN, (5, 1), (500, 70), (1000, 100), (-1, 40), (1199, 1), (-1, 9)]
"""The first root, branches, and roots between and behind them."""
SIZES = [tile_sizes((dim, min(dim, 128))) for dim in (64, 128, 192)]


def rows_of(branches):
    return sum(length for _, length in branches)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("branches", "packed"), [(BRANCHES, 1000), ([*BRANCHES, (1000, 300)], 0)])
def test_lists_and_places_together_are_what_listed_rows_see(sizes, branches, packed):
    plan, wanted = tree_plan(views_of(branches), sizes), visibility(branches, rows_of(branches))
    assert plan.roots.rows == packed
    assert plan.roots.cu_q.tolist() == [0, packed][: 1 + bool(packed)]
    assert plan.listed.intervals.dtype == plan.listed.places.dtype == torch.int32
    aux = [plan.listed.places, plan.listed.intervals]
    for by, lists in enumerate((plan.listed.keys_of_queries, plan.listed.queries_of_keys)):
        assert torch.equal(seen_by(lists, lists.tile, aux, by), wanted[packed:].long())


@pytest.mark.parametrize(("root", "packed"), [(132, 132), (131, 0)])
def test_roots_are_packed_where_they_hold_half_of_the_pairs(root, packed):
    """Both branches see 60 of its rows, and their own up to themselves."""
    views = views_of([(-1, root), (59, 60), (59, 41)])
    plan = tree_plan(views, SIZES[0])
    of_branches = sum(60 * rows + rows * (rows + 1) // 2 for rows in (60, 41))
    assert (root * (root + 1) // 2 >= of_branches) == bool(packed)
    assert plan.roots.rows == packed
    assert len(plan.listed.places) == 2 * (views.rows - packed + 128)
    cost = Tree(StageConfig()).cost(views, need(**BF16))
    assert pass_flops(views.pairs, need(**BF16)) < cost.flops < 6 * pass_flops(views.pairs, need(**BF16))


def test_without_ancestors_nothing_is_listed():
    views = views_of([(-1, 3), (-1, 200), (-1, 1)])
    plan = tree_plan(views, SIZES[0])
    assert plan.listed is None
    assert plan.roots.rows == 204
    for name in ("cu_q", "run_offset", "run_row", "run_length"):
        assert getattr(plan.roots, name).tolist() == getattr(views, name).tolist()
    asked = need(**BF16)
    assert Tree(StageConfig()).cost(views, asked) == FlashAttention4(FlashAttention4Config()).cost(views, asked)
