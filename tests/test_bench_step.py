"""The benchmark of a training step: no time without parity, figures add up, cuts hold the same trajectories."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import AttentionViews, PlanTensors, attention_views, build_plan_tensors
from harts.errors import ConfigError, InputError
from harts.registry import BUILT_IN, resolve
from tests.scripts import TOOLS, script

SMALL = ["--model", "reference", "--set", "model.vocab_size=64", "--set", "call_plan.chunk_size=16", "--repeats", "2"]
CAPACITY = ["--capacity", "240"]


class _Forgetful(Sdpa):
    """Loses a part of the gradients of queries, too small for the start-up probe, where branches share rows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, views: AttentionViews, scale: float) -> Tensor:
        forks = len(views.run_row) > len(views.cu_q) - 1
        return super().attend(0.97 * q + 0.03 * q.detach() if forks else q, k, v, views, scale)


class _NoStates(Naive):
    """Starts every sequence from nothing."""

    def mix(self, inputs: dict[str, Tensor], plan: PlanTensors) -> Tensor:
        out = super().mix(inputs, plan)
        later = plan.rounds[0].own_rows.stop
        return torch.cat((out[:later], torch.zeros_like(out[later:])))


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The command, which is a script beside its modules."""
    with script("bench_step") as module:
        yield module


@pytest.fixture(scope="module")
def part(bench: ModuleType) -> Any:
    """Modules of the command by name."""
    return lambda name: importlib.import_module(f"step_bench.{name}")


def with_tiny_set(folder: Path) -> Path:
    """Shared data with one small set: three groups of six trajectories, the last four tokens of each trained."""
    draw = random.Random(0)
    (folder / "medium").mkdir()
    with gzip.open(folder / "medium" / "tiny.jsonl.gz", "wt") as out:
        for group in range(3):
            trunk = [draw.randrange(1_000) for _ in range(90)]
            for i in range(6):
                tail = [draw.randrange(60) for _ in range(draw.randrange(5, 30))]
                tokens = trunk[: draw.randrange(40, 90)] + tail
                mask = [int(j >= len(tokens) - 4) for j in range(len(tokens))]
                row = {"id": f"t{group}.{i}", "group": f"g{group}", "tokens": tokens, "loss_mask": mask}
                out.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tiny_set(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def tiny(part: Any, shared: Path) -> Any:
    """(pipeline, the planned small set)."""
    overrides = ["partition.capacity=240", "call_plan.chunk_size=16", "model.vocab_size=512"]
    pipeline = part("models").load("reference", overrides).pipeline
    batch = part("workloads").rollouts("tiny", shared, 0, 512, 240)
    return pipeline, part("steps").plan(pipeline, batch)


def told(bench: ModuleType, capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> dict[str, Any]:
    """The JSON object that the command prints."""
    assert bench.main([*SMALL, *arguments, "--quiet", "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_whole_command_adds_up(bench, capsys, shared):
    arguments = ["--workloads", "tiny", "none", "--shared", str(shared), *CAPACITY, "--microbatches", "2"]
    found = told(bench, capsys, 0, *arguments, "--set", "model.vocab_size=512")
    assert set(found) == {"settings", "pipeline", "device", "versions", "results"}
    assert found["pipeline"]["partition"]["capacity"] == 240
    for each in found["results"]:
        assert {"step", "cut", "planning_seconds", "sides", "parity", "seconds", "breakdown", "ratios"} < set(each)
        sides, cut = each["sides"], each["cut"]
        assert sides["HARTS"]["microbatches"] == 2
        assert sides["HARTS"]["rows"] == cut["compact_tokens"]
        assert sides["flat"]["rows"] == cut["semantic_tokens"]
        assert cut["compression"] == pytest.approx(cut["semantic_tokens"] / cut["compact_tokens"])
        assert max(sides[side]["fullest"] for side in sides) <= 240
        assert each["parity"]["faults"] == []
        assert each["parity"]["differences"]["HARTS"]["gradient"] < 1e-12
        assert each["parity"]["off_cosine"]["rerun"] == {"mean": 0.0, "most": 0.0}
        assert each["timed_loss_difference"] < 1e-12
        assert each["gradient_norm"]["HARTS"] == pytest.approx(each["gradient_norm"]["flat"])
        assert each["memory_bytes"] == {}
        _times_add_up(each)
        assert sides["flat"]["pairs"] / sides["HARTS"]["pairs"] <= cut["compression"]
    shared_prefixes, unshared = found["results"]
    assert unshared["sides"]["flat"]["pairs"] == unshared["sides"]["HARTS"]["pairs"]
    assert unshared["ratios"]["conversion that pairs and logits allow"] == 1
    assert shared_prefixes["ratios"]["conversion that pairs and logits allow"] < 1
    assert shared_prefixes["cut"]["compression"] > 2
    assert unshared["cut"]["compression"] == 1
    required = {each["ratio"] for each in shared_prefixes["requirements"]}
    assert {"F/B/Grad conversion", "Core conversion", "loss difference", "1 - cosine"} <= required
    assert "F/B/Grad speedup" in {each["ratio"] for each in unshared["requirements"]}


def _times_add_up(each: dict[str, Any]) -> None:
    for seconds in each["seconds"].values():
        parts = sum(seconds[name]["least"] for name in ("forward", "backward", "gradient"))
        assert 0 < parts <= seconds["total"]["most"]
    for side, repeats in each["microbatch_seconds"].items():
        for name in ("forward", "backward"):
            assert all(len(passes[name]) == each["sides"][side]["microbatches"] for passes in repeats)
            sums = [sum(passes[name]) for passes in repeats]
            assert min(sums) == pytest.approx(each["seconds"][side][name]["least"])
            assert max(sums) == pytest.approx(each["seconds"][side][name]["most"])
    total = {side: each["seconds"][side]["total"]["median"] for side in ("HARTS", "flat")}
    assert each["ratios"]["F/B/Grad speedup"] == pytest.approx(total["flat"] / total["HARTS"])
    core = total["flat"] / (total["HARTS"] + sum(each["planning_seconds"].values()))
    assert each["ratios"]["Core conversion"] == pytest.approx(core / each["cut"]["compression"])
    for parts in each["breakdown"]["seconds"].values():
        assert list(parts) == [
            *("delta rule", "linear layers, rest", "attention", "attention layers, rest", "MoE and MLP", "norms"),
            *("LM head, log-probs", "layout tensors", "other"),
        ]
        for name in ("delta rule", "linear layers, rest", "attention", "MoE and MLP", "norms"):
            assert min(parts[name].values()) > 0  # forward, recomputation and backward
        assert parts["LM head, log-probs"]["recompute"] == parts["layout tensors"]["backward"] == 0


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for one test: other tests ask for all names."""
    for section, kind in (("full_attention", _Forgetful), ("linear_attention", _NoStates)):
        monkeypatch.setitem(BUILT_IN[section], "wrong", f"{__name__}:{kind.__name__}")


def two_layers(shared: Path) -> list[str]:
    """One microbatch of the small set in a model of one layer of each kind."""
    arguments = ["--workloads", "tiny", "--shared", str(shared), *CAPACITY, "--microbatches", "1"]
    return [*arguments, "--set", "model.vocab_size=512", "--set", "model.layers=2", "--set", "model.pattern=KA"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("section", ["full_attention", "linear_attention"])
def test_a_wrong_backend_has_no_times_and_the_status_is_1(bench, capsys, shared, section):
    (each,) = told(bench, capsys, 1, *two_layers(shared), "--set", f"{section}={{type: wrong}}")["results"]
    assert any(fault.startswith("gradient: differs by a relative") for fault in each["parity"]["faults"])
    assert not {"seconds", "breakdown", "memory_bytes"} & set(each)
    assert "F/B/Grad speedup" not in each["ratios"]


def test_rows_that_count_once_have_no_times(bench, capsys, shared, monkeypatch):
    """Statistics of routers are part of no loss here, and compared all the same."""

    def once(layout: Any, *others: Any) -> PlanTensors:
        plan = build_plan_tensors(layout, *others)
        return replace(plan, multiplicity=plan.multiplicity.clamp(max=1))

    monkeypatch.setattr("harts.stages.execute.compact.build_plan_tensors", once)
    (each,) = told(bench, capsys, 1, *two_layers(shared))["results"]
    (of_z, moved) = each["parity"]["faults"]
    assert of_z.startswith("statistic z of routers: differs by a relative")
    assert moved.startswith("assignments of experts: differs by a relative")
    assert "seconds" not in each


def test_progress_and_tables_are_for_people(bench, capsys, shared):
    arguments = ["--workloads", "none", *CAPACITY, "--microbatches", "1", "--layers", "1", "--samples", "5"]
    arguments += ["--set", "restore.positions=all", "--set", "model.moe=null"]
    assert bench.main([*SMALL, *arguments]) == 0
    heard = capsys.readouterr()
    assert "none, model reference, 1 layers, float64: cut to 1 of 2 microbatches of 240 rows" in heard.out
    assert "parity holds (microbatches: 1 of HARTS, 1 of flat)" in heard.out
    assert "1 - cosine of logits, 5 positions" in heard.out
    assert "none: repeat 2 of 2, flat" in heard.err
    assert "ms of flat, same trajectories" in heard.out
    assert bench.main([*SMALL, *arguments, "--no-breakdown"]) == 0
    heard = capsys.readouterr()
    assert "F/B/Grad speedup" in heard.out
    assert "ms of flat, same trajectories" not in heard.out + heard.err


def test_what_cannot_run_is_refused(bench, capsys, shared, tmp_path):
    assert bench.main([*SMALL, "--workloads", "tiny", "--shared", str(shared), "--capacity", "100", "--quiet"]) == 2
    assert "trajectory 't1.5' has 107 tokens, a microbatch has 100 rows (1 of 18 " in capsys.readouterr().err
    assert bench.main([*SMALL, "--workloads", "tiny", "--shared", str(shared), *CAPACITY, "--quiet"]) == 2
    assert "different tokens, the model's vocabulary is 64" in capsys.readouterr().err
    assert bench.main([*SMALL, "--workloads", "none", "tinny", "--shared", str(shared)]) == 2
    assert "no such workload: tinny; known: claude, none, synthetic, tiny" in capsys.readouterr().err
    assert bench.main([*SMALL, "--workloads", "none", "--set", "full_attention.type=tree", "--quiet"]) == 2
    assert "full_attention: Tree: " in capsys.readouterr().err
    assert bench.main([*SMALL, "--workloads", "claude", "--shared", str(tmp_path), "--quiet"]) == 1
    heard = capsys.readouterr().err
    assert "claude: skipped: needs" in heard
    assert "nothing was measured" in heard
    bare = ["--model", str(TOOLS.parent / "pipelines" / "plan_only.yaml"), "--layers", "2"]
    assert bench.main([*bare, "--workloads", "none", "--quiet"]) == 2
    assert "is no model, known are those of huggingface, megatron, reference" in capsys.readouterr().err


def test_both_sides_of_a_cut_hold_the_same_trajectories(part, tiny):
    steps, (pipeline, planned) = part("steps"), tiny
    made = steps.cut(pipeline, planned, [0, 2], 3, "cpu")
    other = steps.repacked(pipeline, planned.batch, made)
    wanted = np.flatnonzero(np.isin(planned.trees.step.microbatch, (0, 2)))
    assert made.keys.tolist() == wanted.tolist()
    for side in (made.ours, made.flat, other):
        trees = [each.layout.plan.tree for each in side.microbatches]
        assert sorted(np.concatenate([tree.key for tree in trees]).tolist()) == wanted.tolist()
        assert max(each.rows for each in side.microbatches) <= 240
        assert side.pairs == sum(attention_views(each.layout, "cpu").pairs for each in side.microbatches)
        assert sum(float(each.weight.sum()) for each in side.microbatches) == pytest.approx(1.0)
        for each, tree in zip(side.microbatches, trees, strict=True):
            each.layout.verify()
            assert each.trained.tolist() == np.flatnonzero(tree.columns.loss_mask[tree.columns.predicted()]).tolist()
            assert float(each.weight.min()) > 0
    lengths = planned.batch.columns.length
    assert made.flat.rows == other.rows == int(lengths[wanted].sum())
    assert {each.layout.plan.rounds for each in made.flat.microbatches} == {1}
    assert made.flat.padded_rows == 0
    share = made.flat.rows / planned.trees.step.semantic_tokens
    assert made.seconds["partition"] == pytest.approx(share * planned.seconds["partition"])


def test_trajectories_go_where_least_room_is_left(part):
    columns = SimpleNamespace(length=np.array([3, 7, 5, 2, 4]))
    found = part("steps").packed(SimpleNamespace(columns=columns), np.arange(5), 10)
    assert [each.tolist() for each in found] == [[0, 1], [2, 4], [3]]


def _tree(*paths: int, shared: int = 0) -> Any:
    """Trajectories of some lengths that share their first tokens."""
    length = np.array(paths)
    ends = np.array([shared, *paths]) if shared else length
    start = np.array([0, *[shared] * len(paths)]) if shared else 0 * length
    return SimpleNamespace(
        semantic_tokens=int(length.sum()),
        tokens=range(int((ends - start).sum())),
        start=start,
        end=ends,
        columns=SimpleNamespace(length=length),
    )


def test_a_cut_stands_for_its_step(part):
    """S / C of slots is 1, 1.82, 1, 3.17 and 1.6, together 1.91; pairs are 1, 1.68, 1, 2.67 and 1.40, together 1.86;
    rows are 10, 110, 100, 101 and 50, on average 74."""
    trees = [_tree(10), _tree(100, 100, shared=90), _tree(50, 50)]
    trees += [_tree(80, 80, 80, 80, shared=73), _tree(40, 40, shared=30)]
    choice = part("choice")
    sizes = np.array([choice._sizes(tree) for tree in trees])
    assert sizes.sum(0).tolist() == [710, 371, 27_305, 14_642]

    def off(members: list[int]) -> float:
        return float(choice._off(sizes[members].mean(0), sizes.mean(0)))

    assert choice.chosen(trees, 1) == [1]
    for count in (2, 3, 4):
        found = choice.chosen(trees, count)
        assert len(set(found)) == count
        exchanged = [[*(each for each in found if each != out), new] for out in found for new in {*range(5)} - {*found}]
        assert off(found) <= min(map(off, exchanged))
    assert choice.chosen(trees, None) == choice.chosen(trees, 5) == list(range(5))
    assert choice.chosen(trees[:4], 1, 2) == [2, 3]  # slots of two replicas


def test_replicas_have_as_many_flat_microbatches(part):
    batch = SimpleNamespace(columns=SimpleNamespace(length=np.array([3, 7, 5, 2, 4])), source="it")
    bins = [np.array([0, 1]), np.array([2, 4]), np.array([3])]
    evened = part("steps").evened
    assert evened(batch, bins, 1) is bins
    assert [each.tolist() for each in evened(batch, bins, 2)] == [[2, 4], [1], [0], [3]]
    assert [each.tolist() for each in evened(batch, bins, 5)] == [[1], [2], [4], [0], [3]]
    with pytest.raises(InputError, match="5 trajectories cannot be shared by 7 replicas"):
        evened(batch, bins, 7)


def test_a_slot_is_as_slow_as_its_slowest_replica(part):
    imbalance = part("passes").slot_imbalance
    assert imbalance([(0, [1.0, 2.0]), (0, [1.5, 2.0])]) is None
    # two stages of replica 0, one of replica 1: slots of (1.5, 1) and (2, 4) seconds
    found = [(0, [1.0, 2.0]), (0, [1.5, 2.0]), (1, [1.0, 4.0])]
    assert imbalance(found) == pytest.approx((1.5 + 4) / (1.25 + 3) - 1)


def test_topologies_are_of_the_processes_that_are_there(part, monkeypatch):
    overrides = part("processes").overrides
    with pytest.raises(ConfigError, match="tp2\\+sp is of 2 processes, torchrun started 1"):
        overrides("tp2+sp")
    with pytest.raises(ConfigError, match="--topology: 'xp2'"):
        overrides("xp2")
    monkeypatch.setattr(part("processes"), "PROCESSES", 8)
    found = overrides("tp2+sp+cp2+dp2")
    assert {"model.parallel.tensor=2", "partition.replicas=2", "layout.row_multiple=4"} <= set(found)


def test_exchanges_are_known_by_their_kernels(part):
    kind = part("communication").kind
    assert kind("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "AllReduce"
    assert kind("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") == "SendRecv"


def test_samples_are_found_on_both_sides(part, tiny):
    pipeline, planned = tiny
    made = part("steps").cut(pipeline, planned, [1], 0, "cpu")
    columns = planned.batch.columns
    sample = part("parity").sampled(columns.length, made.keys, 40, 0)
    assert len(sample.key) == 40
    for side in (made.ours, made.flat):
        seen = []
        for each in side.microbatches:
            members, rows = part("parity").sample_rows(each.layout, sample)
            tokens = planned.batch.tokens[columns.offset[sample.key[members]] + sample.position[members]]
            assert np.array_equal(each.layout.input_ids[rows], tokens)
            assert np.array_equal(each.layout.position_ids[rows], sample.position[members])
            seen += members.tolist()
        assert sorted(seen) == list(range(40))


def test_bounds_of_parity_are_those_of_the_dtype(part):
    made = part("parity").Difference(1e-5, 0.08, "a", 0.2, 0.5, {"a": 0.2, "b": 0.05})
    spread = made._replace(gradient=0.03, parameters={"a": 0.05, "b": 0.001})
    faults = part("parity").faults
    assert faults(made, [spread], torch.bfloat16) == [
        "gradient: differs by a relative 8.0e-02, allowed is 6.0e-02; worst is a",
        "gradient of b: differs by a relative 5.0e-02, allowed is 2.0e-02",
    ]
    other = spread._replace(gradient=0.05, parameters={"a": math.inf, "b": 0.03})
    assert faults(made, [spread, other], torch.bfloat16) == []
    assert faults(made._replace(gradient=0.019), [spread._replace(gradient=0.0)], torch.bfloat16)[0].startswith(
        "gradient of b"
    )
    assert len(faults(made, [spread], torch.float32)) == 2
    apart = made._replace(gradient=1.0, parameters={"a": 0.5, "b": 1.0})
    of_itself = made._replace(gradient=1.09, parameters={"a": 1.09, "b": 1.09})
    assert faults(apart, [of_itself], torch.bfloat16) == [
        "gradient: differs by a relative 1.0e+00, allowed is 5.0e-01; worst is a",
        "gradient of b: differs by a relative 1.0e+00, allowed is 9.0e-01",
    ]
    assert len(faults(made._replace(loss=float("nan")), [made], torch.bfloat16)) == 1
    many = made._replace(gradient=0.0, parameters=dict.fromkeys("abcdef", 1.0))
    found = faults(many, [many._replace(parameters=dict.fromkeys("abcdef", 0.1))], torch.bfloat16)
    assert found[3:] == ["3 more parameters' gradients are too far off"]


def test_bounds_of_routers_are_what_the_flat_run_differs_from_itself(part):
    made = part("parity").Difference(0.0, 0.0, "a", 0.0, 0.5, {}, router_z=4e-3, moved=0.05)
    faults = part("parity").faults
    for dtype, limit in ((torch.bfloat16, "1.0e-03"), (torch.float32, "1.0e-06")):
        assert faults(made, [made._replace(router_z=0.0, moved=0.0)], dtype) == [
            f"statistic z of routers: differs by a relative 4.0e-03, allowed is {limit}",
            "assignments of experts: differs by a relative 5.0e-02, allowed is 1.0e-03",
        ]
        assert faults(made, [made._replace(router_z=2e-3, moved=0.025)], dtype) == []
    load = torch.tensor([2.0, 10, 6, 4], dtype=torch.float64)
    assert part("parity")._of_routers(load + torch.tensor([0.5, -2, 0, 2]), load) == (0.25, 0.1)
    assert part("parity")._of_routers(torch.zeros(1), torch.zeros(1)) == (0.0, 0.0)


def test_logits_are_no_farther_off_than_rounding_takes_them(part):
    off = {name: {"mean": mean, "most": 1.0} for name, mean in (("HARTS", 5e-5), ("rerun", 0.0), ("rounded", 2e-5))}
    assert part("parity").cosine_faults(off) == ["logits: 1 - cosine is 5.0e-05 on average, allowed is 4.0e-05"]
    off["rounded"]["mean"] = 3e-5
    assert part("parity").cosine_faults(off) == []
    assert part("parity").cosine_faults({"HARTS": {"mean": math.nan}, "rerun": {"mean": 0.0}}) != []
    assert part("parity").cosine_faults({"HARTS": {"mean": 1e-9}, "rerun": {"mean": 0.0}}) == []


def test_rounding_explains_nothing_where_logits_are_equal(part):
    apart = {
        name: part("parity").Difference(1e-5, 0.08, name, 0.2, 0.5, {}) for name in ("rounded", "rerun", "repacked")
    }
    for most, wanted in ((0.0, ["repacked", "rerun"]), (1e-16, ["repacked", "rerun", "rounded"])):
        assert [each.worst for each in part("parity").spread(apart, {"HARTS": {"mean": 0.0, "most": most}})] == wanted


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_sums_have_a_fixed_order_in_models_of_megatron_alone(part, before):
    enabled, others = torch.are_deterministic_algorithms_enabled, [SimpleNamespace()]
    kind = part("processes").TransformerEngine
    others += [SimpleNamespace(parallel=None, full=kind(kind.Config()))]
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        megatron = SimpleNamespace(parallel=None, full=None)
        for model, within in ((megatron, True), *((each, before[0]) for each in others)):
            with pytest.raises(KeyError), part("processes").fixed_order(model):
                assert enabled() == within
                raise KeyError
            assert (enabled(), torch.is_deterministic_algorithms_warn_only_enabled()) == before
            assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_rounding_is_of_the_embeddings_alone(part, tiny):
    pipeline, planned = tiny
    made = part("steps").cut(pipeline, planned, [1], 0, "cpu")
    sample = part("parity").sampled(planned.batch.columns.length, made.keys, 40, 0)
    parity, module = part("parity"), pipeline.env.model.module
    first = parity._embeddings(module)[0]
    before = first(torch.arange(5))
    plain, off = (run(pipeline, made.flat, sample) for run in (parity.execute, partial(parity.rounded, seed=3)))
    moved = (off.hidden - plain.hidden).norm() / plain.hidden.norm()
    assert 1e-17 < float(moved) < 1e-13  # float64
    assert torch.equal(first(torch.arange(5)), before)


def test_cosines_are_exact_near_1(part):
    a = torch.eye(2, 5)
    b = a + torch.tensor([[0, 1e-7, 0, 0, 0], [0, 0, 0, 0, 0]])
    found = part("parity").off_cosine(3 * a, b)
    assert found["most"] == pytest.approx(0.5e-14, rel=1e-6)
    assert found["mean"] == pytest.approx(found["most"] / 2)


class _Ticks:
    """A clock of one second a mark."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)


def test_a_moment_belongs_to_the_innermost_part(part):
    trace = part("trace").Trace(_Ticks())
    x = torch.ones(3, requires_grad=True)
    with trace.span("other"):
        out = trace.call("outer", lambda each: trace.call("inner", torch.exp, each) * 2, x)
    trace.backward = True
    with trace.span("other", "backward"), pytest.raises(RuntimeError), trace.span("again"):
        trace.begin("interrupted")
        raise RuntimeError
    with trace.span("other", "backward"):
        out.sum().backward()
    found = trace.seconds()
    assert torch.equal(x.grad, 2 * x.detach().exp())
    assert found["inner"] == {"forward": 1, "recompute": 0, "backward": 1}
    assert found["outer"] == {"forward": 2, "recompute": 0, "backward": 2}
    assert found["interrupted"]["recompute"] == found["again"]["recompute"] == 1
    assert found["other"]["forward"] == 2
    assert sum(sum(each.values()) for each in found.values()) == 5 + 4 + 5  # gaps between spans belong to nobody


def test_parts_are_known_by_their_classes(part):
    def of(*names: str) -> nn.Module:
        return type(names[0], (nn.Module,), {})() if len(names) == 1 else nn.ModuleDict({n: of(n) for n in names[1:]})

    layer = type("QwenDecoderLayer", (nn.Module,), {})()
    names = {
        "a": "QwenGatedDeltaNet",
        "b": "KimiDeltaAttention",
        "c": "QwenAttention",
        "d": "LingMoE",
        "e": "AnRMSNorm",
    }
    names |= {"h": "TreeLinearAttention", "i": "GatedMla", "j": "TreeMla", "k": "MoELayer"}
    names["l"] = "KimiLinearAttention"
    for name, cls in {**names, "f": "SparseMoeBlock", "g": "QwenMLP"}.items():
        layer.add_module(name, of(cls))
    layer.d.add_module("inner", of("QwenMLP"))
    layer.c.add_module("inner", of("AnRMSNorm"))
    found = part("breakdown").parts_of(nn.Sequential(layer, of("AnRMSNorm")))
    assert {type(each).__name__: name for each, name in found.items()} == {
        "QwenGatedDeltaNet": "linear layers, rest",
        "KimiDeltaAttention": "linear layers, rest",
        "QwenAttention": "attention layers, rest",
        "LingMoE": "MoE and MLP",
        "SparseMoeBlock": "MoE and MLP",
        "QwenMLP": "MoE and MLP",
        "TreeLinearAttention": "linear layers, rest",
        "GatedMla": "attention layers, rest",
        "TreeMla": "attention layers, rest",
        "KimiLinearAttention": "attention layers, rest",
        "MoELayer": "MoE and MLP",
        "AnRMSNorm": "norms",
    }
    assert len(found) == 12


def test_layers_of_every_family_are_known(part):
    for name in BUILT_IN["huggingface_families"]:
        family = resolve("huggingface_families", name)
        for layer, kind in (
            (family.full_layer, "attention layers, rest"),
            (family.linear_layer, "linear layers, rest"),
        ):
            module = type(layer, (nn.Module,), {})()
            assert part("breakdown").parts_of(nn.Sequential(module)) == {module: kind}


def test_conversion_that_pairs_and_logits_allow(part):
    """Of flat's 24 s, 8 are of pairs and gain 2, 4 of rows of logits and gain nothing, 12 of rows and gain 4; times are
    of a half of it, which has a quarter of the pairs."""
    seconds = {
        "attention": {"forward": 0.5, "backward": 1.5},
        "LM head, log-probs": {"forward": 2.0},
        "norms": {"forward": 4.0},
        "other": {"backward": 2.0},
    }
    timed = {
        "flat": {"rows": 800, "pairs": 6000, "logit_rows": 50},
        "HARTS": {"rows": 200, "pairs": 3000, "logit_rows": 50},
    }
    half = {"sides": {"flat": {"rows": 400, "pairs": 1500, "logit_rows": 25}}, "seconds": {"flat": seconds}}
    assert part("requirements")._allowed(timed, half) == pytest.approx(24 / (8 / 2 + 4 + 12 / 4) / 4)


def test_requirements_follow_from_medians(part):
    requirements = part("requirements")
    times = {"HARTS": (1.0, 2.9, 0.1, 4.0), "flat": (5.0, 14.5, 0.5, 20.0)}
    names = ("forward", "backward", "gradient", "total")
    made: dict[str, Any] = {
        "seconds": {
            side: {name: {"median": value} for name, value in zip(names, each, strict=True)}
            for side, each in times.items()
        },
        "cut": {"compression": 5.2},
        "planning_seconds": {"partition": 0.1, "layout": 0.1},
        "timed_loss_difference": 1e-7,
        "parity": {
            "differences": {"HARTS": {"loss": 2e-6}},
            "off_cosine": {
                side: {"mean": off}
                for side, off in (("HARTS", 2e-5), ("repacked", 3e-5), ("rerun", 2e-5), ("rounded", 4e-5))
            },
        },
        "sides": {"HARTS": {"fullest": 60}, "flat": {"fullest": 50}},
        "memory_bytes": {"HARTS": {"peak": 170, "held": 50}, "flat": {"peak": 150, "held": 50}},
    }
    found = requirements.ratios(made)
    assert found["F/B/Grad conversion"] == pytest.approx(5 / 5.2)
    assert found["F/B conversion"] == pytest.approx(19.5 / 3.9 / 5.2)
    assert found["Core speedup"] == pytest.approx(20 / 4.2)
    assert found["peak memory at equal rows"] == pytest.approx(1.0)
    verdicts = {each["ratio"]: each["met"] for each in requirements.requirements("claude", found)}
    assert verdicts == {
        "F/B/Grad conversion": True,
        "Core conversion": False,
        "peak memory at equal rows": True,
        "loss difference": False,
        "loss difference, timed": True,
        "1 - cosine": True,
    }
    found["1 - cosine"] = 2.1e-5
    unshared = {each["ratio"]: each["met"] for each in requirements.requirements("none", found)}
    assert unshared["F/B/Grad speedup"]
    assert not unshared["1 - cosine"]


@pytest.mark.parametrize("name", ["ling", "ling_megatron", "qwen3_next", "dense"])
def test_files_of_large_models_are_valid(part, name):
    pytest.importorskip("transformers")
    loaded = part("models").load(name, layers=8)
    assert loaded.layers == 8
    model = loaded.pipeline.settings.components["model"]
    need = model.cls.need_of(model.config, 64, "cuda")
    assert need.conv_width == loaded.pipeline.settings.components["layout"].config.conv_width
    assert need.full_head_dims == ((192, 128) if "ling" in name else (256, 256))
    assert need.least_gate == (-5.0 if "ling" in name else float("-inf"))
    assert model.config.recompute == "full"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ling", "ling_megatron", "qwen3_next", "dense"])
def test_shallow_models_hold_on_a_gpu(bench, name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for package in ("megatron.core" if name == "ling_megatron" else "transformers", "fla", "flash_attn.cute"):
        pytest.importorskip(package)
    arguments = ["--workloads", "synthetic", "--capacity", "4096", "--microbatches", "1", "--repeats", "1"]
    assert bench.main(["--model", name, "--layers", "4", *arguments]) == 0
