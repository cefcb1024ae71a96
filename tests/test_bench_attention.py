"""The benchmark of full attention: no time without parity, wrong backends are caught, figures are the views' own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.backends.base import AttentionCost, Need
from harts.backends.full.sdpa import Sdpa
from harts.backends.plan_tensors import AttentionViews
from harts.registry import BUILT_IN
from harts.schema import StageConfig
from tests.backends.full.forests import dense, views_of, visibility
from tests.scripts import script

DEVICE = ["--device", "cpu", "--dtype", "float32", "--scale", "0.02", "--repeats", "2"]
TINY = [*DEVICE, "--heads", "2", "--kv-heads", "1", "--key-dim", "24", "--value-dim", "16"]
SAMPLES, SEED = 40, 0


class _Compact(Sdpa):
    """Says that it expands nothing."""

    expands = False

    def cost(self, views: AttentionViews, need: Need) -> AttentionCost:
        return super().cost(views, need)._replace(expanded_bytes=0)


class _Shifted(_Compact):
    """Adds 1e-3 to outputs, and nothing without forks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        return super().attend(q, k, v, views, scale) + (1e-3 if _has_forks(views) else 0)


class _Unscaled(_Compact):
    """Wrong on flat rows as much as on compact ones."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        return super().attend(q, k, v, views, scale * 1.01)


class _LostKeys(_Compact):
    """Drops a tenth of the gradients of keys that are shared."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        kept = 0.9 * k + 0.1 * k.detach() if _has_forks(views) else k
        return super().attend(q, kept, v, views, scale)


class _Unsampled(_Compact):
    """Wrong gradients of the rows alone that are not compared with float64."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        rows = importlib.import_module("attention_bench.samples").sampled_rows(views, SAMPLES, SEED + 1)
        other = torch.ones(len(q), 1, 1).index_fill_(0, torch.from_numpy(rows), 0)
        out = super().attend(q, k, v, views, scale)
        return out + 0.1 * other * (out - out.detach()) if _has_forks(views) else out


class _Drifting(_Compact):
    """Gives other gradients at every second run, by less than rounding."""

    runs = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        type(self).runs += 1
        out = super().attend(q, k, v, views, scale)
        return out + (type(self).runs % 2) * 1e-6 * (out - out.detach())


class _Undecided(_Drifting):
    """The same without a promise."""

    def deterministic(self, need: Need) -> bool:
        return False


class _Choice(_Undecided):
    """Has the choice of equal bits."""

    class Config(StageConfig):
        deterministic: bool = False

    def deterministic(self, need: Need) -> bool:
        return bool(self.config.deterministic)


class _Raising(_Compact):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        raise RuntimeError("no kernel for this")


def _has_forks(views: AttentionViews) -> bool:
    return len(views.run_row) > len(views.cu_q) - 1


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for one test: other tests ask for all names. `tree` is a stand-in that a CPU can run."""
    kinds = (_Shifted, _Unscaled, _LostKeys, _Unsampled, _Drifting, _Undecided, _Choice, _Raising)
    for name, kind in [("tree", _Compact), *((kind.__name__, kind) for kind in kinds)]:
        monkeypatch.setitem(BUILT_IN["full_attention"], name, f"{__name__}:{kind.__name__}")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The command, which is a script beside its modules."""
    with script("bench_attention") as module:
        yield module


@pytest.fixture(scope="module")
def part(bench: ModuleType) -> Any:
    """Modules of the command by name."""
    return lambda name: importlib.import_module(f"attention_bench.{name}")


@pytest.fixture(scope="module")
def forest(bench: ModuleType, part: Any) -> Any:
    """A small planned workload."""
    made = importlib.import_module("linear_bench.workloads").workload("forest", Path("absent"), 0, 0.05)
    return part("problem").planned(made)


def told(bench: ModuleType, capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> dict[str, Any]:
    """The JSON object that the command prints."""
    assert bench.main([*arguments, "--samples", str(SAMPLES), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_parity_is_measured_before_time(bench, capsys, registered):
    arguments = [*TINY, "--workloads", "none", "forest", "sand", "--backends", "sdpa", "tree", "--flat", "sdpa", "tree"]
    found = told(bench, capsys, 0, *arguments)
    assert [each["workload"] for each in found["results"]] == ["none", "forest", "sand"]
    for each in found["results"]:
        assert each["parity"]["faults"] == {"sdpa": [], "tree": []}
        assert each["shape"] == {"heads": 2, "kv_heads": 1, "key_dim": 24, "value_dim": 16}
        errors = each["parity"]["errors"]
        assert {"sdpa", "tree", "flat:sdpa", "flat:tree", "flat:sdpa, rounded", "flat:tree, rounded"} == set(errors)
        for error in errors.values():
            assert set(error) == {"out", "dq", "dk", "dv"}
            assert all(1e-9 < size < 2e-6 for size in error.values())  # float32 against float64
        assert each["parity"]["reference"] == "sdpa"
        assert max(each["parity"]["differences"]["tree"].values()) < 1e-5
        assert each["parity"]["bits"]["tree"] == {"promised": True, "measured": True}
        assert set(each["times_ms"]) == set(each["tflops"]) == {"sdpa", "tree", "flat:sdpa", "flat:tree"}
        assert 0 < each["times_ms"]["tree"]["forward"]["median"] < each["times_ms"]["tree"]["both"]["median"]
        for name, pairs in (("tree", each["plan"]["pairs"]), ("flat:tree", each["plan"]["flat_pairs"])):
            done = each["tflops"][name]["forward"] * each["times_ms"][name]["forward"]["median"] * 1e9
            assert done == pytest.approx(2 * pairs * 2 * (24 + 16))
        assert each["cost"]["tree"]["expanded_bytes"] == 0 < each["cost"]["sdpa"]["expanded_bytes"]
        assert each["best"] == {"expanding": "sdpa", "flat": "flat:tree"}
        assert each["ratios"]["best expanding / tree"] > 0
        assert each["requirements"][0]["met"]
    assert found["settings"]["key_dim"] == 24


def test_several_shapes_run_in_turn(bench, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"a": (2, 2, 16, 16), "b": (2, 1, 16, 8)})
    arguments = [*DEVICE, "--workloads", "none", "--backends", "sdpa", "--flat", "--shapes", "a", "b"]
    found = told(bench, capsys, 0, *arguments)["results"]
    assert [tuple(each["shape"].values()) for each in found] == [(2, 2, 16, 16), (2, 1, 16, 8)]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_Shifted", "out: error of _Shifted"),
        ("_Unscaled", "out: error of flat:_Unscaled"),
        ("_LostKeys", "dk: error of _LostKeys"),
        ("_Unsampled", "dv: error of _Unsampled from sdpa"),
        ("_Drifting", "says that two runs give equal bits, but dq, dk, dv differ"),
        ("_Raising", "raised RuntimeError: no kernel for this"),
    ],
)
def test_a_wrong_backend_has_no_times_and_the_status_is_1(bench, capsys, registered, name, fault):
    arguments = [*TINY, "--workloads", "forest", "--backends", name, "sdpa", "--flat", name]
    (each,) = told(bench, capsys, 1, *arguments)["results"]
    assert any(text.startswith(fault) for text in each["parity"]["faults"][name])
    assert each["parity"]["faults"]["sdpa"] == []
    assert set(each["times_ms"]) == {"sdpa"}


def test_bits_that_are_not_promised_may_differ(bench, capsys, registered):
    arguments = [*TINY, "--workloads", "forest", "--backends", "sdpa", "_Undecided", "--flat"]
    (each,) = told(bench, capsys, 0, *arguments)["results"]
    assert each["parity"]["bits"]["_Undecided"] == {"promised": False, "measured": False}


def test_backends_that_have_the_choice_are_asked_for_equal_bits(bench, capsys, registered):
    arguments = [*TINY, "--workloads", "forest", "--backends", "_Choice", "sdpa", "--flat", "--deterministic"]
    (each,) = told(bench, capsys, 1, *arguments)["results"]
    assert each["parity"]["bits"]["_Choice"] == {"promised": True, "measured": False}


def test_without_an_expanding_backend_it_says_what_is_not_compared(bench, capsys, registered):
    assert bench.main([*TINY, "--workloads", "none", "--backends", "tree", "--flat", "tree"]) == 0
    assert "results of all rows are not compared: no expanding backend is sound" in capsys.readouterr().out


def test_backends_that_cannot_serve_are_skipped_with_their_reasons(bench, capsys, monkeypatch):
    monkeypatch.setitem(BUILT_IN["full_attention"], "absent", "no_such_module:Absent")
    arguments = [*TINY, "--workloads", "none", "--backends", "absent", "flex", "sdpa", "--flat"]
    (each,) = told(bench, capsys, 0, *arguments)["results"]
    assert each["skipped"]["flex"] == ["FlexAttention has no backward pass on a CPU"]
    assert "cannot be imported" in each["skipped"]["absent"][0]
    assert set(each["times_ms"]) == {"sdpa"}
    assert bench.main([*TINY, "--workloads", "none", "--backends", "flex"]) == 1
    heard = capsys.readouterr()
    assert "flex skipped: FlexAttention has no backward pass on a CPU" in heard.out
    assert "nothing was measured" in heard.err


def test_an_unknown_backend_is_refused(bench, capsys):
    assert bench.main([*TINY, "--backends", "sdpo"]) == 2
    assert "no such backend: sdpo; known:" in capsys.readouterr().err


def test_without_shared_data_it_says_so(bench, capsys, tmp_path):
    arguments = ["--workloads", "case1", "claude", "--backends", "sdpa", "--shared", str(tmp_path)]
    assert bench.main([*TINY, *arguments]) == 1
    heard = capsys.readouterr()
    assert "case1: skipped: needs" in heard.err
    assert "claude: skipped: needs" in heard.err
    assert "nothing was measured" in heard.err


def test_float64_results_are_those_of_dense_attention(part):
    branches, scale = [(-1, 9), (4, 5), (8, 1), (13, 3), (-1, 2)], 0.3
    views = views_of(branches, padding=2)
    draw = torch.Generator().manual_seed(0)
    size = {"q": (4, 6), "k": (2, 6), "v": (2, 5)}
    leaves = {
        name: torch.randn(22, *each, generator=draw, dtype=torch.float64).requires_grad_()
        for name, each in size.items()
    }
    rows = np.array([0, 8, 9, 13, 14, 17, 19])
    grad = torch.randn(len(rows), 4, 5, generator=draw, dtype=torch.float64)
    seen = part("samples").seen_rows(views, rows)
    wanted_seen = visibility(branches, 20)[rows]
    assert torch.equal(seen[:, :20], wanted_seen)
    assert not seen[:, 20:].any()
    found = part("samples").exact(leaves, torch.from_numpy(rows), seen, grad, scale)
    out = dense(*(each[:20] for each in leaves.values()), visibility(branches, 20), scale)[rows]
    wanted = out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_samples_are_at_the_ends_of_branches_and_the_edges_of_tiles(part):
    views = views_of([(-1, 700), (300, 1), (699, 400), (699, 90), (900, 2)])
    rows = part("samples").sampled_rows(views, 192, 0)
    assert np.all(np.diff(rows) > 0)
    assert 150 < len(rows) <= 192
    assert {699, 700, 1_100, 1_190, 1_192} <= set(rows.tolist())
    beside = np.isin(rows % 128, (127, 0, 1))
    assert beside.sum() > 15
    assert rows[0] >= 0
    assert rows[-1] < 1_193
    assert len(part("samples").sampled_rows(views_of([(-1, 1)]), 192, 0)) == 1


def test_flat_rows_are_the_tokens_of_their_compact_rows(part, forest):
    row, layout = forest.compact_row(), forest.workload.layout
    assert np.array_equal(forest.flat.input_ids, layout.input_ids[row])
    assert np.array_equal(forest.flat.position_ids, layout.position_ids[row])
    assert np.array_equal(np.bincount(row, minlength=layout.rows), layout.multiplicity)
    made = part("problem").problem(forest, part("problem").Shape(2, 1, 8, 4, torch.float32, "cpu"), 0)
    assert torch.equal(made.flat.leaves["k"], made.compact.leaves["k"][row])
    figures = made.figures()
    assert figures["flat_rows"] == len(row)
    length = forest.workload.layout.plan.tree.columns.length
    assert figures["flat_pairs"] == int((length * (length + 1) // 2).sum())
    assert figures["pairs"] == int((layout.position_ids + 1).sum())


@pytest.mark.parametrize(("groups", "key_dim", "value_dim"), [(2, 16, 16), (1, 24, 16)])
def test_flex_attends_like_the_oracle(part, groups, key_dim, value_dim):
    views = views_of([(-1, 300), (200, 150), (127, 1), (449, 70)], padding=3)
    draw = torch.Generator().manual_seed(0)
    size = ((2, key_dim), (groups, key_dim), (groups, value_dim))
    inputs = [torch.randn(views.rows, *each, generator=draw) for each in size]
    flex = part("flex").Flex(part("flex").Flex.Config())
    with torch.no_grad():
        found, wanted = (each.attend(*inputs, views, 0.2) for each in (flex, Sdpa(Sdpa.Config())))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    mask = views.once("flex_mask", lambda: None)
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 1, 1, 0]  # rows 128:512 see rows 0:128
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist() == [1, 2, 3, 4, 5]


def test_ratios_and_requirements_follow_from_medians(part):
    requirements = part("requirements")
    both = {"varlen": 30.0, "flash_attention_4": 12.0, "transformer_engine": 15.0, "tree": 10.0, "flex": 20.0}
    both |= {"flat:flash_attention_4": 44.0, "flat:tree": 50.0}
    times = {name: {"forward": {"median": ms / 4}, "both": {"median": ms}} for name, ms in both.items()}
    found, best = requirements.ratios(times, 5.0, 4.0, ["varlen", "flash_attention_4", "transformer_engine"])
    assert best == {"expanding": "flash_attention_4", "flat": "flat:flash_attention_4"}
    assert found == pytest.approx(
        {
            "best expanding / tree": 1.2,
            "best expanding / tree, forward": 1.2,
            "varlen / tree": 3.0,
            "flash_attention_4 / tree": 1.2,
            "transformer_engine / tree": 1.5,
            "flex / tree": 2.0,
            "best flat / tree": 4.4,
            "best flat / tree over S / C": 0.88,
            "best flat / tree over ratio of pairs": 1.1,
            "flat:flash_attention_4 / flash_attention_4": 44 / 12,
            "flat:flash_attention_4 / flash_attention_4 over S / C": 44 / 60,
            "flat:flash_attention_4 / flash_attention_4 over ratio of pairs": 44 / 48,
        }
    )
    cost = {"tree": {"expanded_bytes": 0, "flops": 1}}
    told = {each["ratio"]: each for each in requirements.requirements("claude", found, cost, 0.02)}
    assert {name: each["met"] for name, each in told.items()} == {
        "bytes of expanded keys and values, tree": True,
        "held over expanded keys and values, tree": True,
        "best expanding / tree": True,
        "best flat / tree over S / C": False,
        "best flat / tree over ratio of pairs": True,
    }
    assert told["best expanding / tree"]["reached"] is False
    assert [each["most"] for each in requirements.requirements("none", found, cost, None)] == [0]
    assert [each["met"] for each in requirements.requirements("none", found, cost, 0.11)] == [True, False]
    assert requirements.requirements("none", found, {}, None) == []
    del found["transformer_engine / tree"]  # not measured: the best of the others may not be the best
    (told,) = (
        each
        for each in requirements.requirements("claude", found, cost, 0.02)
        if each["ratio"] == "best expanding / tree"
    )
    assert (told["value"], told["met"], told["reached"]) == (None, False, False)


@pytest.mark.parametrize("groups", [4, 2])
def test_what_tree_holds_is_told_from_its_peak(part, forest, groups):
    """Rows that are expanded are seen in it, whatever the backend says of itself."""
    measure, problem = part("measure"), part("problem")
    made = problem.problem(forest, problem.Shape(4, groups, 24, 16, torch.float32, "cpu"), 0)
    rows, keys = made.compact.views.rows, int(made.compact.views.cu_k[-1])
    expanded = keys * groups * (24 + 16) * 4
    compact = (rows + 256) * (4 * 16 * 4 + 4 * (4 * 24 + (groups * 40 if groups < 4 else 0) + 3 * 4))
    assert measure.compact_bytes(made.shape, rows) == compact
    assert measure._held(made, {"tree": compact // 2}) == 0
    assert measure._held(made, {"tree": compact + expanded}) == 1
    assert measure._held(made, {"sdpa": 1}) is None


def test_a_candidate_runs_by_itself_before_it_is_timed_however_long_its_first_call_took(part, forest, monkeypatch):
    timing, problem = part("timing"), part("problem")
    shape = problem.Shape(2, 1, 24, 16, torch.float32, "cpu")
    rows = problem.problem(forest, shape, SEED).compact
    queued = []

    def timed(candidate: Any, shape: Any, calls: int) -> tuple[float, float]:
        queued.append((candidate.name, calls))
        return (0.0, 5000.0) if len(queued) == 1 else (0.0, {"short": 12.0, "long": 600.0}[candidate.name])

    monkeypatch.setattr(timing, "_host_ms", timed)
    candidates = [timing.Candidate(name, Sdpa(StageConfig()), rows, rows.leaves["q"], 2) for name in ("short", "long")]
    measured = timing.measure_all(candidates, shape)
    assert queued == [("short", 0)] * 2 + [("long", 0)] * 2 + [("short", 17), ("long", 1), ("long", 1), ("short", 17)]
    assert measured["short"].times.both == [12.0, 12.0]


def test_tables_tell_what_is_met(bench, capsys, registered):
    arguments = [*TINY, "--workloads", "case1", "--backends", "sdpa", "tree", "--flat", "tree", "--scale", "0.005"]
    status = bench.main(arguments)
    heard = capsys.readouterr()
    if "skipped: needs" in heard.err:
        pytest.skip("needs the shared data")
    assert status == 0
    for text in (
        "parity of tree holds",
        "flat:tree, rounded",
        "fwd + bwd",
        "two runs of tree give equal bits; promised",
    ):
        assert text in heard.out
    assert "bytes of expanded keys and values, tree" in heard.out
    lines = [line for line in heard.out.splitlines() if line.startswith("  best expanding / tree")]
    assert "at least 1: " in lines[0]
    assert "aim 1.3: " in lines[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(2, 2, 128, 128), (2, 2, 192, 128), (8, 1, 128, 128)])
def test_small_workloads_hold_on_a_gpu(bench, dims):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    names = ("--heads", "--kv-heads", "--key-dim", "--value-dim")
    size = [word for name, value in zip(names, dims, strict=True) for word in (name, str(value))]
    workloads = ["--workloads", "none", "forest", "sand", "--scale", "0.1", "--repeats", "2"]
    assert bench.main([*workloads, *size]) == 0
