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


def test_head_dims_that_backward_kernels_do_not_have_are_refused(hopper):
    for dims in ((64, 128), (56, 72), (128, 32)):
        (reason,) = Tree(StageConfig()).why_not(need(dtype=torch.bfloat16, full_heads=(16, 16), full_head_dims=dims))
        assert "equal head dims, or values of 64 or 128 under wider keys" in reason and str(dims) in reason
    assert Tree(StageConfig()).why_not(need(**{**BF16, "full_head_dims": (96, 64)})) == []


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


def test_lists_hold_the_intervals_whose_address_kernels_are_given():
    plan = tree_plan(views_of(CHAIN), TileSizes((128, 128), (64, 128)))
    for lists in (plan.keys_of_queries, plan.queries_of_keys):
        for each in lists:
            assert each.untyped_storage().data_ptr() == plan.intervals.data_ptr()
    assert plan.intervals.data_ptr() % 8 == 0  # both numbers are one load


BRANCHES = [*CHAIN, (5, 1), (500, 70), (1000, 100), (-1, 40), (1199, 1), (-1, 9)]
"""Branches, and roots between and behind them."""


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_lists_and_places_together_are_what_rows_see(dims):
    plan, wanted = tree_plan(views_of(BRANCHES), tile_sizes(dims)), visibility(BRANCHES, 1350)
    assert plan.intervals.dtype == torch.int32
    for by, lists in enumerate((plan.keys_of_queries, plan.queries_of_keys)):
        assert torch.equal(seen_by(lists, plan.sizes[by], plan.intervals, by), wanted.long())


def test_where_nothing_is_shared_the_cost_is_that_of_packed_sequences():
    views, asked = views_of([(-1, 3), (-1, 200), (-1, 1)]), need(**BF16)
    assert Tree(StageConfig()).cost(views, asked) == FlashAttention4(FlashAttention4Config()).cost(views, asked)


def test_torchs_deterministic_algorithms_are_refused_unless_it_only_warns(hopper):
    reasons = {}
    try:
        for warn_only in (False, True):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            reasons[warn_only] = Tree(StageConfig()).why_not(need(**BF16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert reasons == {
        False: [
            "torch.use_deterministic_algorithms asked for deterministic kernels, and it sums gradients in any order"
        ],
        True: [],
    }
