"""The start-up probe lets right kernels pass and refuses wrong ones."""

import pytest
import torch

from harts.backends.full import probe
from harts.backends.full.probe import probe_faults, probe_views, read_visibility, visible_rows
from harts.backends.full.sdpa import Sdpa
from harts.schema import StageConfig
from tests.backends.full.forests import THREE_LEVELS, visibility
from tests.backends.full.packed_fakes import (
    Broken,
    Fake,
    LosesFarDiagonal,
    LosesLastAncestor,
    OwnScale,
    SeesOneAhead,
    TopLeft,
    Unmasked,
    WrongGradients,
    WrongHeads,
    fake,
    need,
)

BRANCHES = [*THREE_LEVELS, (2, 2), (3, 1), (-1, 1), (8, 261), (222, 3)]
"""The probe's forest."""


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


def test_visibility_is_read_of_every_head() -> None:
    views = probe_views(torch.device("cpu"))
    seen = read_visibility(fake(), need(), views)
    assert torch.equal(seen, visible_rows(views)[:, None].expand_as(seen))


@pytest.mark.parametrize("kind", [TopLeft, Unmasked])
def test_a_wrong_mask_is_refused(kind: type[Fake]) -> None:
    (reason,) = probe_faults(fake(kind), need())
    assert "wrong pairs of rows forward" in reason
    assert "row 0 sees row 1" in reason if kind is Unmasked else "does not see" in reason


@pytest.mark.parametrize("kind", [LosesFarDiagonal, SeesOneAhead, LosesLastAncestor, WrongHeads])
def test_gradients_of_a_wrong_mask_are_refused_whatever_the_outputs(kind: type[Fake]) -> None:
    """A few wrong pairs past a tile would not show in the norm of all gradients."""
    (reason,) = probe_faults(fake(kind), need())
    assert "wrong pairs of rows backward" in reason


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
