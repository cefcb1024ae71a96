"""The start-up probe lets right kernels pass and refuses wrong ones."""

import re

import pytest
import torch

from harts.backends.full import probe
from harts.backends.full.probe import probe_faults, probe_views
from harts.backends.full.sdpa import Sdpa
from harts.backends.full.tree.plan import TileSizes, backward_tiles, forward_tiles, tile_sizes
from harts.backends.full.visibility import miscounted, read_visibility, visible_rows
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, visibility
from tests.backends.full.packed_fakes import (
    Broken,
    CountsItselfTwice,
    Fake,
    LosesARunOfDeepPaths,
    LosesFarDiagonal,
    LosesFirstAncestors,
    LosesFirstAncestorsLate,
    LosesLastAncestor,
    LosesWholeTiles,
    OwnScale,
    SeesOneAhead,
    TopLeft,
    Unmasked,
    WrongGradients,
    WrongHeads,
    fake,
    need,
)

PATH = [(372, 3), (702, 2), (704, 2), (706, 2), (708, 2), (710, 2)]
BRANCHES = [*THREE_LEVELS, (2, 2), (3, 1), (-1, 1), (-1, 413), (323, 131), (8, 131), (686, 3), *PATH]
"""The probe's forest."""
WIDE = need(dtype=torch.float32, full_head_dims=(8, 256))
"""Takes few calls to read a whole matrix."""


def test_the_forest_is_the_one_of_the_comments() -> None:
    views = probe_views(torch.device("cpu"))
    rows = int(views.cu_q[-1])
    assert views.rows > rows
    seen = visible_rows(views)
    assert torch.equal(seen[:rows, :rows], visibility(BRANCHES, rows))
    assert not seen[rows:].any() and not seen[:, rows:].any()
    two, one, alone = seen[19:21], seen[21], seen[22]
    assert two[:, [0, 1, 2, 19, 20]].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert one.nonzero().flatten().tolist() == [0, 1, 2, 3, 21]
    assert alone.nonzero().flatten().tolist() == [22]


@pytest.mark.parametrize("dims", [(8, 8), (24, 16), (16, 300)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
def test_right_backends_pass(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    asked = need(full_heads=heads, full_head_dims=dims)
    assert probe_faults(fake(), asked) == []
    assert probe_faults(Sdpa(StageConfig()), asked) == []


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_forest_holds_whole_tiles_and_others_in_both_directions(dims: tuple[int, int]) -> None:
    sizes = tile_sizes(dims)
    assert isinstance(sizes, TileSizes)
    views = probe_views(torch.device("cpu"))
    for tiles in (forward_tiles(views, sizes), backward_tiles(views, sizes)):
        assert tiles.full.sum() >= 2
        assert (~tiles.full).sum() >= 2
        assert len(set(tiles.query[tiles.full])) >= 2  # of several branches, too


def test_visibility_is_read_of_every_head() -> None:
    views = probe_views(torch.device("cpu"))
    for seen in read_visibility(fake(), WIDE, views):
        assert torch.equal(seen, visible_rows(views)[:, None].expand_as(seen))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_counted_without_a_mistake(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """A pair that is wrong changes counts of its rows, of its head alone."""
    views = probe_views(torch.device("cpu"))
    asked, seen = need(full_heads=heads, dtype=dtype), visible_rows(views)
    assert not any(each.any() for each in miscounted(fake(), asked, views, seen))
    seen[400, 100], seen[300, 301] = False, True
    forward, backward = miscounted(fake(), asked, views, seen)
    every = list(range(heads[0]))
    assert forward.nonzero().tolist() == [[row, head] for row in (300, 400) for head in every]
    assert backward.nonzero().tolist() == [[row, head] for row in (100, 301) for head in every]


@pytest.mark.parametrize("kind", [TopLeft, Unmasked])
def test_a_wrong_mask_is_refused(kind: type[Fake]) -> None:
    (reason,) = probe_faults(fake(kind), WIDE)
    assert "wrong pairs of rows forward" in reason
    assert "row 0 sees row 1" in reason if kind is Unmasked else "does not see" in reason


WRONG_BACKWARD = [
    LosesFarDiagonal,
    SeesOneAhead,
    LosesLastAncestor,
    LosesFirstAncestors,
    LosesFirstAncestorsLate,
    LosesARunOfDeepPaths,
    LosesWholeTiles,
    WrongHeads,
]


@pytest.mark.parametrize("kind", WRONG_BACKWARD)
def test_gradients_of_a_wrong_mask_are_refused_whatever_the_outputs(kind: type[Fake]) -> None:
    """A few wrong pairs past a tile would not show in the norm of all gradients."""
    (reason,) = probe_faults(fake(kind), WIDE)
    assert "wrong pairs of rows backward" in reason


def test_weights_that_are_not_equal_are_refused() -> None:
    (reason,) = probe_faults(fake(CountsItselfTwice), WIDE)
    assert re.search(r"wrong weights of 70\d rows forward: in head 0, those of row 2 are not equal", reason)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (OwnScale, {"outputs", "gradients of q", "gradients of k", "gradients of v"}),
        (WrongGradients, {"gradients of k"}),
    ],
)
def test_wrong_numbers_are_refused(kind: type[Fake], parts: set[str]) -> None:
    reasons = probe_faults(fake(kind), need())
    assert len(reasons) == len(parts)
    assert all(any(f"in {part}," in reason for reason in reasons) for part in parts)


def test_what_a_kernel_raises_is_a_reason() -> None:
    assert probe_faults(fake(Broken), need()) == ["the start-up probe failed: RuntimeError: no kernel image"]


def test_what_chooses_kernels_is_probed_anew() -> None:
    """A config that cannot be hashed, and torch's setting of deterministic algorithms."""

    class Sizes(StageConfig):
        sizes: list[int]

    class OnlyDeterministic(Fake):
        Config = Sizes

        def _run(self, *given):
            assert torch.are_deterministic_algorithms_enabled(), "any order"
            assert self.config.sizes == [1], "other sizes"
            return super()._run(*given)

    one, two = (OnlyDeterministic(Sizes(sizes=[size])) for size in (1, 2))
    assert probe_faults(one, need()) == ["the start-up probe failed: AssertionError: any order"]
    torch.use_deterministic_algorithms(True)
    try:
        assert probe_faults(one, need()) == []
        assert probe_faults(two, need()) == ["the start-up probe failed: AssertionError: other sizes"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert probe_faults(one, need()) == ["the start-up probe failed: AssertionError: any order"]


def test_it_runs_once_for_a_backend_a_config_and_a_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Fake):
        runs = 0

        def _run(self, *given):
            Counted.runs += 1
            return super()._run(*given)

    assert probe_faults(fake(Counted), need()) == []
    first = Counted.runs
    assert probe_faults(fake(Counted), need()) == []
    assert Counted.runs == first > 0
    assert probe_faults(fake(Counted), need(dtype=torch.float16)) == []
    assert Counted.runs > first
    monkeypatch.setattr(probe, "TOLERANCE", -1.0)
    assert probe_faults(fake(Counted), need()) == []


def test_it_can_run_where_no_gradients_are_taken() -> None:
    class Here(Fake):
        pass

    with torch.inference_mode():
        assert probe_faults(fake(Here), need()) == []


class _WrongAlone(Sdpa):
    """Forgets the mask where nothing is shared."""

    def attend(self, q, k, v, views, scale):
        if len(views.run_row) > len(views.cu_q) - 1:
            return super().attend(q, k, v, views, scale)
        return super().attend(q, k.flip(0), v, views, scale)


def test_where_nothing_is_shared_is_looked_at_as_well() -> None:
    faults = probe_faults(_WrongAlone(StageConfig()), need())
    names = [
        re.fullmatch(r"the start-up probe found an error of [\d.]+ in (.+), allowed is 0.05", each) for each in faults
    ]
    assert [name and name[1] for name in names] == ["outputs", "gradients of q", "gradients of k", "gradients of v"]
