"""The benchmark of linear attention: no time without parity, figures that are those of the plan, honest baselines."""

from __future__ import annotations

import builtins
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

from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import PackedCall, build_plan_tensors
from harts.registry import BUILT_IN
from tests.scripts import script
from tests.shared import shared_data

TINY = ["--device", "cpu", "--dtype", "float32", "--heads", "2", "--value-heads", "4", "--key-dim", "16"]
TINY += ["--value-dim", "8", "--scale", "0.02", "--repeats", "2", "--tolerance", "1e-5"]


class _Shifted(Naive):
    """Adds 1e-3 to the output of each row of a tree, and nothing without forks: parity must not hold."""

    def mix(self, inputs: dict[str, Tensor], plan: Any) -> Tensor:
        return super().mix(inputs, plan) + (1e-3 if len(plan.rounds) > 1 else 0)


class _Drifting(Naive):
    """Gives other gradients at every second run."""

    runs = 0

    def mix(self, inputs: dict[str, Tensor], plan: Any) -> Tensor:
        type(self).runs += 1
        output = super().mix(inputs, plan)
        return output + (type(self).runs % 2) * 1e-3 * (output - output.detach())


class _LostState(Naive):
    """Drops the gradients of boundary states."""

    def call(self, rows: Any, packed: Any, initial_state: Tensor, /) -> Any:
        return super().call(rows, packed, initial_state.detach())


@pytest.fixture
def broken_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for one test: other tests ask for all names."""
    for name in ("_Shifted", "_Drifting", "_LostState"):
        monkeypatch.setitem(BUILT_IN["linear_attention"], name, f"{__name__}:{name}")


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The command, which is a script beside its modules."""
    with script("bench_linear") as module:
        yield module


@pytest.fixture(scope="module")
def part(bench: ModuleType) -> Any:
    """Modules of the command by name."""
    return lambda name: importlib.import_module(f"linear_bench.{name}")


def told(bench: ModuleType, capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> dict[str, Any]:
    """The JSON object that the command prints."""
    assert bench.main([*TINY, "--json", *arguments]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_parity_is_measured_before_time(bench, capsys, rule):
    arguments = ["--rule", rule, "--backend", "naive", "--baselines", "--workloads", "none", "forest", "sand"]
    found = told(bench, capsys, 0, *arguments)
    assert [each["workload"] for each in found["results"]] == ["none", "forest", "sand"]
    for each in found["results"]:
        assert each["parity"]["faults"] == []
        for which in ("tree", "flat"):
            errors = each["parity"]["errors"][which]
            assert set(errors) == {"o", "q", "k", "v", "g", "beta"}
            assert all(1e-9 < error < 1e-6 for error in errors.values())  # float32 against float64
        assert 0 < each["times_ms"]["fused"]["forward"]["median"] < each["times_ms"]["fused"]["both"]["median"]
    assert found["settings"]["rule"] == rule


@pytest.mark.parametrize("rows_per_call", [100, 700, 10**6])
def test_trajectories_in_several_calls_give_the_same_errors(bench, capsys, rows_per_call):
    arguments = ["--rule", "kda", "--backend", "naive", "--baselines", "--workloads", "forest"]
    (each,) = told(bench, capsys, 0, *arguments, "--rows-per-call", str(rows_per_call))["results"]
    assert each["parity"]["errors"]["tree"]["v"] == pytest.approx(each["parity"]["errors"]["flat"]["v"], rel=0.3)


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("_Shifted", "trajectories differ from the operator run on each by itself"),
        ("_Drifting", "v: the second run differs from the first"),
        ("_LostState", "k: error of tree"),
    ],
)
def test_without_parity_there_is_no_time_and_the_status_is_1(bench, capsys, broken_backends, backend, fault):
    arguments = ["--rule", "kda", "--backend", backend, "--baselines", "--workloads", "forest"]
    found = told(bench, capsys, 1, *arguments)
    (each,) = found["results"]
    assert any(fault in text for text in each["parity"]["faults"])
    assert not {"times_ms", "ratios", "memory_bytes"} & set(each)


def test_the_first_differing_position_is_told(part):
    parity, inputs, candidates = part("parity"), part("inputs"), part("candidates")
    forests, workloads, trajectories = part("forests"), part("workloads"), part("trajectories")
    planned = workloads.Workload("w", workloads.planned(forests.forest([-1, 0, 0], [70, 9, 5])))
    shape = inputs.Shape("kda", 1, 1, 8, 4, torch.float32, "cpu")
    group = list(trajectories.groups(planned, 1000, "cpu"))
    leaves = inputs.leaves(shape, planned.rows, 0)
    plan = build_plan_tensors(planned.layout, "cpu", torch.float32)
    grad = inputs.upstream(shape, planned.rows, 1)
    problem = candidates.Problem(planned, shape, plan, leaves, grad, group)

    class Wrong(Naive):
        def mix(self, inputs: dict[str, Tensor], plan: Any) -> Tensor:
            output = super().mix(inputs, plan).clone()
            if len(plan.rounds) > 1:
                row = planned.layout.segment_row[2] + 3  # position 73 of the second trajectory
                output[row, 0, 0] += 1
            return output

    found = parity.check(problem, parity.Operators(Wrong(Naive.Config())), parity.Limits(1e-5, 1), 0)
    assert "1 of 2 trajectories differ" in found.faults[0]
    assert "first is trajectory 1 at position 73" in found.faults[0]


def test_paper_cases_have_their_published_sizes(part):
    sizes = {}
    for name in ("case1", "case2", "case3"):
        found = part("workloads").workload(name, shared_data(), 0, 1.0)
        found.layout.verify()
        figures = found.figures()
        sizes[name] = (figures["compact_rows"], figures["rounds"], figures["replay_rows"])
    assert sizes == {"case1": (71_804, 3, 373), "case2": (41_563, 2, 813), "case3": (80_319, 2, 780)}


def test_the_generated_microbatch_is_full(part):
    found = part("workloads").workload("claude", shared_data(), 0, 1.0)
    found.layout.verify()
    assert 0.95 * 65_536 < found.rows <= 65_536
    assert found.compression > 2


def test_the_typical_microbatch_is_like_its_step(part):
    found = part("workloads").workload("step", shared_data(), 0, 1.0)
    found.layout.verify()
    assert 0.85 * 65_536 < found.rows <= 65_536
    assert 5 < found.compression < 6.5


@pytest.mark.parametrize("name", ["none", "forest", "sand"])
def test_synthetic_workloads_are_valid_layouts(part, name):
    found = part("workloads").workload(name, Path("absent"), 3, 1.0 if name != "sand" else 0.05)
    found.layout.verify()
    if name == "none":
        assert (found.rows, found.compression, len(found.layout.plan.anchor)) == (65_536, 1.0, 8)
    else:
        assert found.compression > 1.5
    if name == "forest":
        tree = found.layout.plan.tree
        fork = tree.end[np.unique(tree.parent[tree.parent >= 0])] % 64
        assert {0, 1, 63} <= set(fork.tolist())


def test_scaling_keeps_the_shape(part):
    tree = part("forests").random_forest(0, 1.0)
    small = part("forests").scaled(tree, 0.1)
    small.verify()
    assert small.parent.tolist() == tree.parent.tolist()
    assert small.tail.tolist() == tree.tail.tolist()
    assert np.abs(small.length - np.maximum(tree.length * 0.1, 1)).max() <= 0.5


def test_groups_hold_every_trajectory_once_and_every_row_new_once(part):
    found = part("workloads").workload("forest", Path("absent"), 0, 0.1)
    rows = found.layout.semantic_map.rows()
    for most in (1, 500, 10**6):
        groups = list(part("trajectories").groups(found, most, "cpu"))
        assert torch.cat([group.compact_row for group in groups]).tolist() == rows.tolist()
        new = torch.cat([group.compact_row[group.new] for group in groups])
        assert sorted(new.tolist()) == list(range(found.rows))
        assert all(len(group.length) == 1 or sum(group.length) <= most for group in groups)


def test_without_shared_data_it_says_so(bench, capsys, tmp_path):
    arguments = ["--rule", "kda", "--backend", "naive", "--baselines", "--workloads", "case1", "claude"]
    assert bench.main([*TINY, *arguments, "--shared", str(tmp_path)]) == 1
    heard = capsys.readouterr()
    assert "case1: skipped: needs" in heard.err
    assert "claude: skipped: needs" in heard.err
    assert "nothing was measured" in heard.err
    assert heard.out == ""


def test_a_backend_that_cannot_serve_is_refused(bench, capsys):
    arguments = [*TINY, "--rule", "kda", "--workloads", "none", "--baselines"]
    assert bench.main([*arguments, "--backend", "naive", "--value-heads", "3"]) == 2
    assert "3 value heads are not a multiple of 2 query heads" in capsys.readouterr().err
    assert bench.main([*arguments, "--backend", "nave"]) == 2
    assert "did you mean naive?" in capsys.readouterr().err


def test_ratios_and_requirements_follow_from_medians(part):
    requirements = part("requirements")
    both = {"fused": 21.0, "recomputed": 19.0, "plain": 20.0, "expand": 42.0, "flat": 60.0, "projections": 10.0}
    times = {name: {"forward": {"median": ms / 4}, "both": {"median": ms}} for name, ms in both.items()}
    memory = {"bank": 100, "fused": 1_300, "plain": 1_000}
    found = requirements.ratios(times, 3.0, memory)
    assert found == pytest.approx(
        {
            "fused / plain": 1.05,
            "fused / plain, forward": 1.05,
            "fused / plain, layer": 31 / 30,
            "expand / fused": 2.0,
            "flat / fused": 60 / 21,
            "expand / fused, layer": 52 / 31,
            "recomputed / plain": 0.95,
            "flat / fused over S / C": 20 / 21,
            "flat / recomputed over S / C": 20 / 19,
            "flat / plain over S / C": 1.0,
            "memory without bank, fused / plain": 1.2,
        }
    )
    met = {each["ratio"]: each["met"] for each in requirements.requirements("case1", found)}
    assert met == {
        "fused / plain": True,
        "expand / fused, layer": True,
        "flat / fused over S / C": True,
        "memory without bank, fused / plain": False,
    }
    unshared = {each["ratio"]: each for each in requirements.requirements("none", found)}
    assert (unshared["fused / plain"]["most"], unshared["fused / plain"]["met"]) == (1.02, False)
    assert requirements.requirements("forest", found) == []


@pytest.fixture
def interpreted_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's public operators in Triton's interpreter: no driver to tune with, and some of its language missing."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    pytest.importorskip("fla")
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, _: self.configs[:1])
    monkeypatch.setattr(autotuner, "_bench", lambda *_, **__: [0.0, 0.0, 0.0])
    intra = importlib.import_module("fla.ops.kda.chunk_intra")
    monkeypatch.setattr(intra, "IS_GATHER_SUPPORTED", False)
    ieee = importlib.import_module("triton.language").constexpr("ieee")
    monkeypatch.setattr(intra, "SAFE_GATE_DOT_PRECISION", ieee)
    states = importlib.import_module("fla.ops.common.chunk_delta_h")
    monkeypatch.setattr(states, "range", _counted, raising=False)


class _Index(int):
    """A loop variable that can be asked for another integer type, as in compiled kernels."""

    def to(self, _: Any) -> _Index:
        return self


def _counted(*bounds: Any) -> Iterator[_Index]:
    return map(_Index, builtins.range(*map(int, bounds)))


def naive_call(*_: Any) -> Any:
    """What FLA's operators compute, by the backend `naive`."""

    def call(rows: dict[str, Tensor], packing: Any, initial_state: Any = None, final: bool = False) -> Any:
        cu = packing.host
        states = torch.arange(len(cu) - 1)
        heads, key_dim, value_dim = rows["v"].shape[1], rows["k"].shape[-1], rows["v"].shape[-1]
        start = torch.zeros(len(states), heads, key_dim, value_dim) if initial_state is None else initial_state
        output, states = Naive(Naive.Config()).call(rows, PackedCall(64, cu, states, cu.diff()), start)
        return output, states if final else None

    return call


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_one_fla_call_is_the_operator_of_the_contract(part, interpreted_fla, rule):
    shape = part("inputs").Shape(rule, 1, 2, 16, 16, torch.float32, "cpu")
    leaves = part("inputs").leaves(shape, 90, 0)
    start = torch.randn(2, 2, 16, 16).requires_grad_()
    packing = part("fla_call").packing(torch.tensor([0, 70, 90]), "cpu")
    upstream = [torch.randn(90, 2, 16), torch.randn(2, 2, 16, 16)]

    def results(call: Any) -> list[Tensor]:
        outputs = call(leaves, packing, start, True)
        found = torch.autograd.grad(outputs, [*leaves.values(), start], upstream)
        return [x.detach() for x in (*outputs, *found)]

    fla = results(part("fla_call").fla_call(rule, True))
    for ours, theirs in zip(fla, results(naive_call()), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_the_whole_command_runs_all_baselines(bench, part, capsys, monkeypatch, rule):
    monkeypatch.setattr(part("measure"), "fla_call", naive_call)
    arguments = ["--rule", rule, "--backend", "naive", "--workloads", "forest", "none"]
    each, unshared = told(bench, capsys, 0, *arguments, "--rows-per-call", "1000")["results"]
    assert {"plain", "plain_one", "plain_flat_lengths", "expand", "depth", "flat"} < set(each["times_ms"])
    assert each["calls"]["expand"] == each["calls"]["flat"] > 1 == each["calls"]["plain"]
    differences = each["differences"]
    assert max(differences["expand"], differences["flat"]) < 1e-5  # the same chunks
    assert 0 < differences["depth"] < 1e-5  # others
    assert each["ratios"]["fused / plain"] > 0
    required = {kind["ratio"] for kind in unshared["requirements"]}
    assert required == {"fused / plain", "flat / fused over S / C"}


def test_baselines_have_the_gradients_of_the_tree(part):
    """Summed over the parts, since each part has a share of the outputs."""
    tree = part("forests").forest([-1, 0, 0, 1, 1, -1], [70, 5, 9, 64, 1, 3], [(2, 9), (3, 64), (4, 1), (5, 3), (3, 7)])
    planned = part("workloads").Workload("w", part("workloads").planned(tree))
    shape = part("inputs").Shape("kda", 1, 2, 8, 4, torch.float64, "cpu")
    groups = list(part("trajectories").groups(planned, 200, "cpu"))
    assert len(groups) > 1
    leaves = part("inputs").leaves(shape, planned.rows, 0)
    plan = build_plan_tensors(planned.layout, "cpu", torch.float64)
    problem = part("candidates").Problem(
        planned, shape, plan, leaves, part("inputs").upstream(shape, planned.rows, 1), groups
    )
    wanted = gradients(part("candidates").operator(problem, "fused", Naive(Naive.Config())), part)
    for make in (part("candidates").expand, part("candidates").depth):
        found = gradients(make(problem, naive_call()), part)
        for ours, theirs in zip(found, wanted, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-6  # states are handed over in float32


def gradients(candidate: Any, part: Any) -> list[Tensor]:
    """Of each compact row."""
    total: list[Tensor] = []
    for piece in candidate.parts:
        _, found = part("timing").run(piece)
        if candidate.name == "depth":  # its leaves are in the order of its calls
            found = tuple(torch.zeros_like(x).index_copy_(0, piece.compact_row, x) for x in found)
        total = [a + b for a, b in zip(total, found, strict=True)] if total else list(found)
    return total


def test_a_baseline_that_computes_something_else_is_not_timed(bench, part, capsys, monkeypatch):
    def skewed(*_: Any) -> Any:
        def call(rows: dict[str, Tensor], *_: Any) -> tuple[Tensor, None]:
            return sum(x.sum() for x in rows.values()) * 1e-9 + rows["v"], None

        return call

    monkeypatch.setattr(part("measure"), "fla_call", skewed)
    arguments = ["--rule", "gdn", "--backend", "naive", "--workloads", "forest", "--baselines", "expand"]
    (each,) = told(bench, capsys, 1, *arguments)["results"]
    assert "expand: outputs differ from ours by" in each["parity"]["faults"][0]
    assert "times_ms" not in each


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_small_workloads_hold_on_a_gpu(bench, rule):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    arguments = ["--rule", rule, "--workloads", "none", "forest", "sand", "--scale", "0.1", "--repeats", "2"]
    assert bench.main(arguments) == 0
