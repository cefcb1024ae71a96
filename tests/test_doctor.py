"""`harts doctor`: what it says of a machine, and that it names what is wrong."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("fla")

import harts.backends.linear.conv_fused
import harts.backends.linear.gdn
import harts.backends.linear.tree.launch
import harts.train.doctor
import harts.train.doctor_checks
from harts import registry
from harts.backends.linear.tree.launch import Launcher
from harts.backends.linear.tree.reference import (
    chunk_scores,
    cumulative,
    from_state,
    state_after,
    unit_inverse,
    w_and_u,
)
from tests.backends.linear import interpreter
from tests.backends.linear.calls import naive, packed_call, random_rows

ROOT = Path(__file__).resolve().parents[1]
HEADS = "linear_heads: 1, linear_value_heads: 1, linear_key_dim: 16, linear_value_dim: 16"
SMALL = [(-1, 66), (0, 3), (0, 1)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few rows: kernels are interpreted."""
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU: there, `harts doctor --gpu` itself is the test")
    interpreter.prepare()
    monkeypatch.setattr(harts.train.doctor_checks, "FORKS", SMALL)
    monkeypatch.setattr(harts.train.doctor_checks, "CALLS", 2)
    monkeypatch.setattr(harts.train.doctor_checks, "PREFIXES", (21,))


@pytest.fixture
def pipeline(tmp_path):
    def write(rule, **linear):
        path = tmp_path / f"{rule}.yaml"
        section = ", ".join(f"{name}: {value}" for name, value in {"type": rule, **linear}.items())
        path.write_text(
            f"extends: {ROOT}/pipelines/quickstart.yaml\nlinear_attention: {{{section}}}\n"
            f"model: {{rule: {rule}, dtype: float32, {HEADS}}}\ntrain: null\n"
        )
        return path

    return write


def report_of(call, *words):
    code, out, _ = call("doctor", *words, "--json")
    return code, json.loads(out)


def failed(report):
    return [check["name"] for check in report["checks"] if not check["ok"]]


def test_versions_and_backends_are_told_without_a_gpu(call):
    code, report = report_of(call, ROOT / "pipelines/quickstart.yaml")
    assert code == 0
    assert report["ok"]
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["versions"]) == {"python", "harts", "numpy", "torch", "triton", "fla-core"}
    assert report["gpu"] == {"device": "cpu", "name": None, "capability": None, "cuda": torch.version.cuda}
    assert {name: each["why_not"] for name, each in report["serving"].items()} == {
        "linear_attention": [],
        "full_attention": [],
    }


def test_a_plan_without_a_model_is_told_so(call):
    code, out, _ = call("doctor", ROOT / "pipelines/plan_only.yaml")
    assert code == 0
    assert "not asked: the file has no model" in out


def test_reasons_of_a_backend_that_cannot_serve_are_all_told(call, pipeline):
    code, report = report_of(
        call, pipeline("gdn"), "--set", "model.linear_key_dim=257", "--set", "call_plan.chunk_size=32"
    )
    assert code == 1
    reasons = "; ".join(report["serving"]["linear_attention"]["why_not"])
    assert "a key dim of 257 is not between 1 and 256" in reasons
    assert "its chunks are 64 tokens, the plan's are 32" in reasons


def test_what_full_attention_shows_on_its_forest_is_told(call, monkeypatch):
    monkeypatch.setattr(registry, "_added", {})
    registry.register("full_attention", "own_rows_alone", "tests.backends.test_build:OwnRowsAlone", "third")
    words = ("--set", "full_attention={type: own_rows_alone}")
    code, report = report_of(call, ROOT / "pipelines/quickstart.yaml", *words)
    (reason,) = report["serving"]["full_attention"]["why_not"]
    assert code == 1
    assert "row 9 does not see row 0" in reason


def test_kernels_of_bounded_gates_are_refused_to_a_model_without_a_bound(call, pipeline):
    code, report = report_of(call, pipeline("kda", safe_gate="true"))
    assert code == 1
    (reason,) = report["serving"]["linear_attention"]["why_not"]
    assert reason == "safe_gate needs log decays of at least -5.0, the model's bound is -inf"


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_a_device_that_torch_does_not_know_is_bad_usage(call, pipeline, command, tmp_path):
    more = ["--out", tmp_path / "table.json"] if command == "tune" else []
    code, out, err = call(command, pipeline("gdn"), *more, "--set", "device=nope")
    assert (code, out) == (2, "")
    assert "device: 'nope' cannot be used" in err


def test_the_model_is_not_built(call, pipeline):
    huge = ("--set", "model.layers=1000", "--set", "model.hidden_size=1000000")
    assert call("doctor", pipeline("gdn"), *huge)[0] == 0


def test_every_kernel_of_kda_passes_and_is_listed_with_its_configuration(call, pipeline):
    code, report = report_of(call, pipeline("kda", safe_gate="true"), "--gpu", "--set", "model.least_gate=-5.0")
    assert code == 0, failed(report)
    names = [check["name"] for check in report["checks"]]
    kernels = [name for name in names if name.startswith("kernel ")]
    assert len(kernels) == 10
    assert {"kernel forward_states_kernel", "kernel backward_states_kernel"} < set(kernels)
    assert names[-4:] == [f"conv kernel {name}_kernel" for name in CONV]
    assert {"operator", "prefix", "repeat"} < set(names)
    assert all(check["config"] for check in report["checks"] if check["name"] in kernels)
    assert report["configs"]["file"] == "nvidia_h200.json"
    assert len(report["configs"]["sha256"]) == 64


CONV = ("forward", "backward_mixed", "backward_rows", "backward_shared")


GDN_KERNELS = {
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": "A",
    "recompute_w_u_fwd_kernel": "w",
    "forward_states_kernel": "errors",
    "chunk_bwd_kernel_dqkwg": "dk",
}


@pytest.mark.parametrize("kernel", GDN_KERNELS)
def test_a_wrong_kernel_is_named_and_no_other(kernel, call, pipeline, monkeypatch):
    right = Launcher.run

    def wrong(self, launched, grid, **arguments):
        right(self, launched, grid, **arguments)
        if launched.__name__ == kernel:
            arguments[GDN_KERNELS[kernel]].mul_(1.05)

    monkeypatch.setattr(Launcher, "run", wrong)
    for name in ("prefix_check", "repeat_check"):
        monkeypatch.setattr(harts.train.doctor_checks, name, lambda *_: [])
    code, out, _ = call("doctor", pipeline("gdn"), "--gpu")
    assert code == 1
    lines = out.splitlines()
    assert [line.split()[1:] for line in lines if "FAILS" in line] == [["kernel", kernel], ["operator"]]
    assert "`harts tune`" in out


def test_an_output_that_is_not_finite_fails(call, pipeline, monkeypatch):
    forward = harts.backends.linear.conv_fused._forward
    monkeypatch.setattr(harts.backends.linear.conv_fused, "_forward", lambda *x: forward(*x) * torch.nan)
    monkeypatch.setattr(harts.train.doctor, "linear_checks", lambda *_: [])
    code, report = report_of(call, pipeline("gdn"), "--gpu")
    assert code == 1
    assert failed(report) == ["conv kernel forward_kernel"]
    assert report["checks"][0]["values"] == {"y": "inf"}


class _Leaking(harts.backends.linear.gdn.Gdn):
    """Later gates change earlier outputs by a rounding, and every second call by another."""

    calls = 0

    def mix(self, inputs, plan):
        type(self).calls += 1
        leak = inputs["g"].sum() * 1e-7 + (type(self).calls % 2) * 1e-7
        return super().mix(inputs, plan) * (1.0 + leak)


def test_a_leak_into_earlier_tokens_and_bits_that_change_are_found(call, pipeline, monkeypatch):
    monkeypatch.setattr(harts.backends.linear.gdn, "Gdn", _Leaking)
    for name in ("kernel_checks", "operator_check"):
        monkeypatch.setattr(harts.train.doctor_checks, name, lambda *_: [])
    monkeypatch.setattr(harts.train.doctor, "conv_checks", lambda *_: [])
    code, report = report_of(call, pipeline("gdn"), "--gpu")
    assert code == 1
    assert failed(report) == ["prefix", "repeat"]
    assert "fla-core 0.6.0 or newer" in report["checks"][0]["fix"]


def test_a_kernel_that_does_not_launch_is_named(call, pipeline, monkeypatch):
    def config(self, kernel):
        if kernel.__name__ == "chunk_fwd_kernel_o":
            raise ValueError("out of shared memory")
        return self.configs.of(kernel.__name__, self.head_dims)

    monkeypatch.setattr(Launcher, "config", config)
    monkeypatch.setattr(harts.train.doctor, "conv_checks", lambda *_: [])
    code, report = report_of(call, pipeline("gdn"), "--gpu")
    assert code == 1
    assert "ValueError: out of shared memory" in report["checks"][0]["about"]


def test_a_miscompiling_triton_is_refused_on_hopper_with_the_fix(call, pipeline, monkeypatch):
    monkeypatch.setattr(harts.backends.linear.gdn, "capability", lambda device: (9, 0))
    monkeypatch.setattr(harts.backends.linear.gdn.triton, "__version__", "3.6.0")
    code, out, _ = call("doctor", pipeline("gdn"), "--gpu")
    assert code == 1
    assert "CANNOT SERVE" in out
    assert "install triton 3.7.1 or newer" in out
    monkeypatch.setattr(harts.backends.linear.gdn.triton, "__version__", "3.7.1")
    assert call("doctor", pipeline("gdn"))[0] == 0


def test_an_unknown_gpu_is_pointed_at_tune(call, pipeline, monkeypatch):
    def fake(path):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Z1")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
        return report_of(call, path, "--set", "device=cuda")

    harts.backends.linear.tree.launch.configs_for.cache_clear()
    code, report = fake(pipeline("kda"))
    assert code == 1
    assert any(
        "none is shipped for NVIDIA Z1" in reason and "`harts tune`" in reason
        for reason in report["serving"]["linear_attention"]["why_not"]
    )


def test_a_gpu_that_torch_does_not_find_is_a_failure_told_with_the_versions(call, pipeline):
    code, report = report_of(call, pipeline("gdn"), "--gpu", "--set", "device=cuda")
    assert code == 1
    assert "its kernels need a CUDA device, torch finds no cuda" in report["serving"]["linear_attention"]["why_not"]
    assert report["checks"] == []
    assert report["versions"]["torch"] == torch.__version__


def test_kernels_are_not_checked_where_none_can_run(call, pipeline, monkeypatch):
    monkeypatch.setattr("harts.backends.linear.tree.machine.triton.knobs.runtime.interpret", False)
    code, out, err = call("doctor", pipeline("gdn"), "--gpu")
    assert (code, out) == (2, "")
    assert "--set device=cuda" in err


def test_a_file_that_cannot_be_loaded_is_told_with_the_versions(call, pipeline):
    code, out, err = call("doctor", pipeline("gdn"), "--set", "device=[]")
    assert (code, out) == (2, "")
    assert f"torch {torch.__version__}" in err


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_reference_formulas_give_what_the_recurrence_gives(rule):
    rows = {name: x.detach() for name, x in random_rows(192, rule).items()}
    value_heads = rows["v"].shape[1]
    wanted = naive().call(
        rows,
        packed_call(64, [0, 192], [(0, 192)]),
        torch.zeros(1, value_heads, rows["k"].shape[2], rows["v"].shape[2], dtype=torch.float64),
    )

    def cells(x):
        return x.repeat_interleave(value_heads // x.shape[1], 1).view(3, 64, value_heads, *x.shape[2:]).transpose(1, 2)

    q, k, v, beta = (cells(rows[name]) for name in ("q", "k", "v", "beta"))
    gates = cumulative(cells(rows["g"].view(192, value_heads, -1)), reverse=False)
    of_q, of_k = chunk_scores(q, k, gates)
    w, u = w_and_u(unit_inverse(of_k * beta[..., None]), k, v, beta, gates)
    state, outputs = torch.zeros_like(wanted.states), []
    for c in range(3):
        here = slice(c, c + 1)
        errors = u[here] - w[here] @ state
        outputs.append(from_state(q[here], gates[here], state) + of_q[here] @ errors)
        state = state_after(state, k[here], gates[here], errors)
    output = torch.cat(outputs).transpose(1, 2).flatten(0, 1) * rows["k"].shape[2] ** -0.5
    assert (output - wanted.output).abs().max() < 1e-12
    assert (state - wanted.states).abs().max() < 1e-12
