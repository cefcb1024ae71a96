"""`harts tune`: the choice on made-up kernels and times, and the whole path once in the interpreter."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fla")

from triton.errors import TritonError
from triton.runtime._async_compile import active_mode

import harts
import harts.train.doctor_checks
from harts.backends.linear.tree import gdn_chunks, kda_chunks
from harts.backends.linear.tree.launch import Launcher, read_configs, shipped
from harts.backends.linear.tree.state_kernels import backward_states_kernel, forward_states_kernel
from harts.cli import main
from harts.errors import BackendError
from harts.train import precompile as compiling
from harts.train import tune as tuning
from harts.train.doctor_checks import Check
from harts.train.kernel_cases import tuning_spec
from tests.backends.linear import interpreter

ROOT = Path(__file__).resolve().parents[1]
SOLVE = "chunk_gated_delta_rule_fwd_kkt_solve_kernel"
ONE, TWO, FOUR, EIGHT = ({"BK": 64, "num_warps": warps} for warps in (1, 2, 4, 8))
"""The first is pinned."""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "gdn.yaml"
    path.write_text(
        f"extends: {ROOT}/pipelines/quickstart.yaml\nlinear_attention: {{type: gdn}}\ntrain: null\n"
        "model: {rule: gdn, dtype: float32, linear_heads: 1, linear_value_heads: 1, linear_key_dim: 16,"
        " linear_value_dim: 40}\n"
    )
    return path


@pytest.fixture(autouse=True)
def on_the_host():
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    interpreter.prepare()


class Clock:
    """Milliseconds by the configuration of what is timed."""

    def __init__(self, times):
        self.times, self.asked, self.running = times, [], None

    def time(self, launch):
        launch()

    def taken(self):
        self.asked.append(self.running)
        found = self.times[self.running]
        return found.pop(0) if isinstance(found, list) else found


class Kernel:
    """Stands in for the one kernel of an operator: notes its warps, or does not compile with 8."""

    __name__ = SOLVE

    def __init__(self, clock, error=None):
        self.clock, self.error = clock, error
        self.compiled = {}

    def __getitem__(self, grid):
        def launch(*, num_warps, **constants):
            if num_warps in self.compiled:
                self.compiled[num_warps].result()
            self._compile(num_warps)
            self.clock.running = num_warps

        return launch

    def warmup(self, *, grid, num_warps, **constants):
        """As Triton's: the future kernel is what a later launch finds, whether or not it compiled."""
        assert grid == (1,)
        submitted = active_mode.get().submit(num_warps, lambda: self._compile(num_warps), lambda _: None)
        self.compiled[num_warps] = submitted

    def _compile(self, num_warps):
        if num_warps == 8 and self.error is not None:
            raise self.error
        return num_warps


@pytest.fixture
def choose(path, monkeypatch):
    """Tune the one kernel of a made-up operator, some warps of which are wrong."""

    def run(times, tried, repeats=1, *, wrong=(), error=None, jobs=1):
        clock = Clock(times)
        kernel = clock.kernel = Kernel(clock, error)
        for module in (tuning, compiling):
            monkeypatch.setattr(module, "run", lambda backend, _: backend.launchers((16, 40)).run(kernel, (1,)))

        def checked(backend, need):
            warps = backend.launchers((16, 40)).config(kernel)["num_warps"]
            return [Check("kernel", warps not in wrong, "checked")]

        monkeypatch.setattr(tuning, "kernel_checks", checked)
        for name in ("operator_check", "linear_checks"):
            monkeypatch.setattr(tuning, name, lambda *_: [])
        said = []
        effort = tuning.Effort(12, repeats)
        table = tuning.tune(harts.load(path), effort, clock, said.append, lambda *_: tried, jobs=jobs)
        return table, clock, said

    return run


def kernel_of(table):
    return table["measured"]["gdn 16x64"]["kernels"][SOLVE]


def test_the_fastest_is_pinned_for_these_head_dims_alone(choose, tmp_path):
    table, clock, said = choose({1: 9.0, 4: 3.0, 2: 1.0}, [FOUR, TWO], repeats=2)
    assert clock.asked == [1] * 3 + [4] * 3 + [2] * 3
    assert table["device"] == "interpreter"
    assert kernel_of(table) == {
        "config": TWO,
        "chosen_ms": 1.0,
        "pinned_ms": 9.0,
        "candidates": 2,
        "skipped": 0,
        "refused": 0,
    }
    about = table["measured"]["gdn 16x64"]
    assert (about["rows"], about["head_dims"], about["dtype"]) == (12, [16, 40], "float32")
    assert about["versions"]["torch"] == torch.__version__
    assert len(said) == 1

    tuning.write_tuned(table, tmp_path / "table.json")
    configs, before = read_configs(tmp_path / "table.json"), read_configs(shipped()["NVIDIA H200"])
    assert configs.of(SOLVE, (16, 40)) == TWO
    assert configs.of(SOLVE, (128, 128)) == before.of(SOLVE, (128, 128)) == ONE
    assert {**configs.kernels, SOLVE: None} == {**before.kernels, SOLVE: None}


def test_the_best_repeat_counts_and_the_first_run_does_not(choose):
    table, *_ = choose({1: 9.0, 4: [0.1, 5.0, 2.0, 5.0], 2: [9.0, 3.0, 3.0, 3.0]}, [FOUR, TWO], repeats=3)
    assert (kernel_of(table)["config"], kernel_of(table)["chosen_ms"]) == (FOUR, 2.0)


@pytest.mark.parametrize("tried", [[FOUR, TWO], [TWO, FOUR]])
def test_ties_go_to_the_first(choose, tried):
    table, *_ = choose({1: 9.0, 2: 1.0, 4: 1.0}, tried)
    assert kernel_of(table)["config"] == tried[0]


def test_what_does_not_compile_is_skipped_and_what_is_wrong_is_refused(choose):
    table, *_ = choose(
        {1: 9.0, 2: 1.0, 4: 3.0}, [TWO, EIGHT, FOUR], wrong=(2,), error=TritonError("out of shared memory")
    )
    found = kernel_of(table)
    assert (found["config"], found["candidates"], found["skipped"], found["refused"]) == (FOUR, 3, 1, 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_candidates_are_compiled_before_they_are_timed_and_chosen_as_without(choose, jobs):
    table, clock, said = choose({1: 9.0, 2: 1.0, 4: 3.0}, [FOUR, EIGHT, TWO], error=TritonError("no"), jobs=jobs)
    found = kernel_of(table)
    assert (found["config"], found["candidates"], found["skipped"]) == (TWO, 3, 1)
    assert clock.asked == [1, 1, 4, 4, 4, 2, 2]  # once more after what does not compile
    assert list(clock.kernel.compiled) == ([4, 8, 2] if jobs > 1 else [])
    assert ("compiling 3 configurations, 2 at a time" in said) == (jobs > 1)


def test_a_kernel_with_nothing_to_choose_is_not_compiled(choose):
    *_, clock, said = choose({}, [TWO], jobs=2)
    assert clock.kernel.compiled == {}
    assert said == ["compiling 0 configurations, 2 at a time"]


def test_an_error_of_the_device_while_compiling_is_told(monkeypatch):
    kernel = Kernel(Clock({}), RuntimeError("CUDA error: an illegal memory access"))
    table = tuning.with_config(read_configs(shipped()["NVIDIA H200"]), SOLVE, "16x64", EIGHT)
    monkeypatch.setattr(compiling, "run", lambda backend, _: backend.launchers((16, 40)).run(kernel, (1,)))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compiling.precompile(SimpleNamespace(), None, table, {SOLVE: [TWO, FOUR]}, 2)
    assert list(kernel.compiled) == [2, 4]
    assert active_mode.get() is None


def test_a_kernel_that_is_wrong_with_every_configuration_is_named(choose):
    with pytest.raises(BackendError, match=f"{SOLVE}: no configuration of 2 is right"):
        choose({1: 9.0, 2: 1.0, 4: 3.0}, [TWO, FOUR], wrong=(1, 2, 4))


@pytest.mark.parametrize(("milliseconds", "kept"), [(0.97, TWO), (0.99, ONE), (1.5, ONE)])
def test_what_is_pinned_is_kept_unless_another_is_clearly_faster(choose, milliseconds, kept):
    table, *_ = choose({1: 1.0, 2: milliseconds, 4: 2.0}, [TWO, FOUR])
    assert kernel_of(table)["config"] == kept


def test_what_is_pinned_serves_where_all_that_is_faster_is_wrong(choose):
    table, *_ = choose({1: 9.0, 2: 1.0, 4: 3.0}, [TWO, FOUR], wrong=(2, 4))
    assert (kernel_of(table)["config"], kernel_of(table)["refused"]) == (ONE, 2)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_of_the_device_is_not_taken_for_one_of_a_candidate(choose, jobs):
    with pytest.raises(RuntimeError, match="illegal memory access"):
        choose({1: 9.0, 2: 1.0}, [TWO, EIGHT], error=RuntimeError("CUDA error: an illegal memory access"), jobs=jobs)


def test_a_kernel_with_nothing_to_choose_keeps_its_configuration(choose):
    table, clock, _ = choose({}, [TWO])
    assert table["measured"]["gdn 16x64"]["kernels"] == {}
    assert clock.asked == []


@pytest.mark.parametrize("kernel", [*kda_chunks.KERNELS, *gdn_chunks.KERNELS], ids=lambda kernel: kernel.__name__)
def test_candidates_vary_what_is_pinned(kernel):
    pinned = read_configs(shipped()["NVIDIA H200"]).of(kernel.__name__, (128, 128))
    found = tuning.candidates_of(kernel, pinned)
    assert len(found) > 1
    assert len({tuple(sorted(config.items())) for config in found}) == len(found)
    warps = {"num_warps", "num_stages"}
    assert all(set(config) - warps == set(pinned) - warps for config in found)


@pytest.mark.parametrize("kernel", [forward_states_kernel, backward_states_kernel], ids=lambda kernel: kernel.__name__)
def test_candidates_of_state_kernels(kernel):
    found = tuning.candidates_of(kernel, {})
    assert len(found) == 18
    assert {"BV": 32, "num_warps": 4, "num_stages": 3} in found


@pytest.mark.parametrize("rows", [1, 80, 1000, 65536])
def test_the_tree_that_is_timed_has_the_rows_that_were_asked_for(rows):
    spec = tuning_spec(rows)
    assert sum(tokens for _, tokens in spec) == rows
    assert all(tokens > 0 for _, tokens in spec)


def test_the_whole_path_runs_other_blocks_and_the_doctor_reads_the_table(path, tmp_path, monkeypatch, capsys):
    """Grids and counters follow the configuration: 40 value channels are three blocks, or one."""
    monkeypatch.setattr(harts.train.doctor_checks, "FORKS", [(-1, 10), (0, 3), (0, 1)])
    monkeypatch.setattr(harts.train.doctor_checks, "CALLS", 2)
    monkeypatch.setattr(harts.train.doctor_checks, "PREFIXES", (5,))
    clock = Clock({4: 2.0, 8: 1.0})
    name, tried = "backward_states_kernel", [{"BV": 64, "num_warps": 4}, {"BV": 16, "num_warps": 8}]
    monkeypatch.setattr(tuning, "CudaTimer", lambda device: clock)
    monkeypatch.setattr(
        tuning,
        "candidates_of",
        lambda kernel, _: tried if kernel.__name__ == name else [],
    )
    monkeypatch.setattr(tuning, "tuning_spec", lambda rows: [(-1, rows - 2), (0, 1), (0, 1)])
    config = Launcher.config

    def seen(launcher, kernel):
        if kernel.__name__ == name:
            clock.running = config(launcher, kernel)["num_warps"]
        return config(launcher, kernel)

    monkeypatch.setattr(Launcher, "config", seen)
    out = tmp_path / "t.json"
    words = ["tune", str(path), "--out", str(out), "--rows", "12", "--repeats", "1", "--jobs", "2"]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(out.read_text())
    assert name in captured.err
    assert "compiling 2 configurations, 2 at a time" in captured.err
    assert read_configs(out).of(name, (16, 40)) == tried[1]
    assert main(["doctor", str(path), "--set", f"linear_attention.kernel_configs={out}"]) == 0
    assert f"{out}, sha256" in capsys.readouterr().out


@pytest.mark.parametrize(("cpus", "jobs"), [(1, 1), (3, 3), (64, compiling.MOST_JOBS)])
def test_there_are_as_many_jobs_as_cpus_up_to_a_limit(monkeypatch, cpus, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    assert compiling.default_jobs() == jobs
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert compiling.default_jobs() == jobs


def test_no_job_at_all_is_bad_usage(path, tmp_path, capsys):
    assert main(["tune", str(path), "--out", str(tmp_path / "t.json"), "--jobs", "0"]) == 2
    assert "argument --jobs: 0 is less than 1" in capsys.readouterr().err


def test_without_cuda_it_is_bad_usage(path, tmp_path, capsys):
    assert main(["tune", str(path), "--out", str(tmp_path / "t.json")]) == 2
    assert "tuning needs a CUDA device; the pipeline's is cpu" in capsys.readouterr().err
    assert main(["tune", str(path), "--out", str(tmp_path / "t.json"), "--set", "device=cuda"]) == 2
    assert "tuning needs a CUDA device; torch finds none" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_a_backend_without_kernels_cannot_be_tuned(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "CudaTimer", lambda device: None)
    words = ["tune", str(path), "--out", str(tmp_path / "t.json"), "--set", "linear_attention={type: naive}"]
    assert main(words) == 2
    assert "naive has no kernels to tune" in capsys.readouterr().err
