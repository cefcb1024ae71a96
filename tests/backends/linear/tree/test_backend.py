"""What the GPU backends refuse, and why; which kernel configurations they take. No kernel runs."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from harts.backends.base import Need
from harts.backends.linear.tree import backend as tree_backend
from harts.backends.linear.tree import launch
from harts.backends.linear.tree.gdn_chunks import KERNELS as GDN_KERNELS
from harts.backends.linear.tree.kda_chunks import KERNELS as KDA_KERNELS
from harts.backends.linear.tree.machine import version
from harts.backends.linear.tree.state_kernels import backward_states_kernel, forward_states_kernel
from harts.errors import ConfigError
from tests.backends.linear.tree.cases import Shape, as_given, backend, layout_of_spec, plan_of, random_inputs

H200 = "NVIDIA H200"
NEED = Need("cuda", torch.bfloat16, "kda", 64, 4, (2, 4), (128, 128), (4, 2), (32, 32))
GDN_NEED = replace(NEED, rule="gdn")
Gpu = Callable[..., None]


@pytest.fixture(autouse=True)
def no_tables_are_kept() -> Iterator[None]:
    launch.configs_for.cache_clear()
    yield
    launch.configs_for.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    def pretend(name: str = H200, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(triton, "__version__", "3.7.1")

    return pretend


def table(path: Path, device: str = H200) -> str:
    """A table of all kernels with the values of the one that is shipped."""
    shipped = json.loads(launch.shipped()[H200].read_text(encoding="utf-8"))
    path.write_text(json.dumps({**shipped, "device": device}), encoding="utf-8")
    return str(path)


def test_an_ordinary_need_is_served_on_a_known_gpu(gpu):
    gpu()
    assert backend("kda").why_not(NEED) == []
    assert backend("gdn").why_not(GDN_NEED) == []


def test_every_reason_is_told_at_once(gpu):
    gpu("A GPU")
    need = replace(NEED, dtype=torch.float32, rule="gdn", chunk_size=32, linear_heads=(3, 4), linear_head_dims=(257, 0))
    assert backend("kda").why_not(need) == [
        "kernel_configs: none is shipped for A GPU (shipped: NVIDIA H200); "
        "make one with `harts tune` and name it in kernel_configs",
        "it computes kda, the model's rule is gdn",
        "the dtype torch.float32 is not one of torch.bfloat16, torch.float16 on cuda",
        "its chunks are 64 tokens, the plan's are 32",
        "4 value heads are not a multiple of 3 query heads",
        "a key dim of 257 is not between 1 and 256",
        "a value dim of 0 is not positive",
        "the head dims (257, 0) are not even, as the kernels need for 16-bit types",
    ]


@pytest.mark.parametrize("heads", [(2, 3), (0, 0), (2, 0)], ids=str)
def test_value_heads_that_are_no_multiple_of_the_query_heads_are_refused(heads, gpu):
    gpu()
    reasons = backend("kda").why_not(replace(NEED, linear_heads=heads))
    assert reasons == [f"{heads[1]} value heads are not a multiple of {heads[0]} query heads"]


@pytest.mark.parametrize("dims", [(63, 64), (64, 63)], ids=str)
def test_odd_head_dims_are_refused(dims, gpu):
    gpu()
    assert backend("gdn").why_not(replace(GDN_NEED, linear_head_dims=dims)) == [
        f"the head dims {dims} are not even, as the kernels need for 16-bit types"
    ]


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 192), (256, 256), (64, 128), (2, 2), (128, 64)], ids=str)
def test_even_head_dims_up_to_256_are_served(dims, gpu):
    gpu()
    assert backend("kda").why_not(replace(NEED, linear_head_dims=dims)) == []
    assert backend("gdn").why_not(replace(GDN_NEED, linear_head_dims=dims)) == []


def test_rows_whose_spans_do_not_fit_32_bits_are_refused(gpu):
    gpu()
    most = tree_backend.MAX_ROW
    assert (most + 1) * launch_rows() == 2**31
    heads = most // 128
    assert backend("gdn").why_not(replace(GDN_NEED, linear_heads=(1, heads))) == []
    reasons = backend("gdn").why_not(replace(GDN_NEED, linear_heads=(1, heads + 1)))
    assert reasons == [f"{heads + 1} value heads of 128 channels are more than {most}"]


def launch_rows() -> int:
    """Rows of the longest span."""
    return tree_backend.MAX_CHUNKS * tree_backend.CHUNK


def test_a_host_without_a_gpu_serves_only_in_the_interpreter(monkeypatch):
    need = replace(NEED, device="cpu", dtype=torch.float32)
    monkeypatch.setattr(tree_backend, "interpreted", lambda: True)
    assert backend("kda").why_not(need) == []
    assert backend("kda").why_not(replace(need, dtype=torch.bfloat16)) == [
        "the dtype torch.bfloat16 is not one of torch.float16, torch.float32 on cpu"
    ]
    monkeypatch.setattr(tree_backend, "interpreted", lambda: False)
    assert backend("kda").why_not(need) == ["its kernels need a CUDA device, the pipeline runs on cpu"]


def test_a_pipeline_on_a_gpu_that_torch_does_not_find_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend("kda").why_not(NEED) == ["its kernels need a CUDA device, torch finds no cuda"]
    assert backend("gdn").why_not(GDN_NEED) == ["its kernels need a CUDA device, torch finds no cuda"]


@pytest.mark.parametrize(
    ("installed", "capability", "refused"),
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.6.0", (9, 0), True),
        ("3.7.0+git12", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.7.1+git12", (9, 0), False),
        ("3.10.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_gdn_is_refused_where_triton_miscompiles_its_gradients(installed, capability, refused, gpu, monkeypatch):
    gpu(capability=capability)
    monkeypatch.setattr(triton, "__version__", installed)
    reasons = backend("gdn").why_not(GDN_NEED)
    assert len(reasons) == refused
    assert not refused or (installed in reasons[0] and "install triton 3.7.1 or newer" in reasons[0])
    assert backend("kda").why_not(NEED) == []


def test_versions_are_compared_by_their_numbers():
    assert version("3.10.0") > version("3.7.1+git3f2a") == (3, 7, 1)


def test_a_table_of_ones_own_serves_a_gpu_that_none_is_shipped_for(gpu, tmp_path):
    gpu("A GPU")
    path = table(tmp_path / "own.json", "A GPU")
    assert backend("kda", kernel_configs=path).why_not(NEED) == []


def test_a_table_of_another_gpu_is_refused(gpu, tmp_path):
    gpu()
    path = table(tmp_path / "own.json", "A GPU")
    assert backend("kda", kernel_configs=path).why_not(NEED) == [
        f"kernel_configs: {path} was made on A GPU, this GPU is NVIDIA H200"
    ]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"device": "d"}', '{"device": "d", "kernels": {"k": 1}}', '{"kernels": {}}', "\x00"],
)
def test_a_file_that_is_no_table_is_refused_by_name(text, gpu, tmp_path):
    gpu()
    path = tmp_path / "own.json"
    path.write_text(text, encoding="utf-8")
    (reason,) = backend("kda", kernel_configs=str(path)).why_not(NEED)
    assert reason.startswith(f"kernel_configs: {path} cannot be read: ")


def test_a_file_that_is_not_there_or_not_text_is_refused_by_name(gpu, tmp_path):
    gpu()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, fault in (("none.json", "FileNotFoundError"), ("bytes.json", "UnicodeDecodeError")):
        path = str(tmp_path / name)
        (reason,) = backend("kda", kernel_configs=path).why_not(NEED)
        assert reason.startswith(f"kernel_configs: {path} cannot be read: {fault}")


def test_a_kernel_without_a_default_configuration_is_named(gpu, tmp_path):
    gpu()
    path = tmp_path / "own.json"
    kernels = {"b": {"64x64": {"BV": 16}}, "a": {}, "c": {"default": {"BV": 16}}}
    path.write_text(json.dumps({"device": H200, "kernels": kernels}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own\.json has no default configuration of a, b$"):
        launch.read_configs(path)


def test_shipped_tables_hold_every_kernel():
    names = {kernel.__name__ for kernel in (*KDA_KERNELS, *GDN_KERNELS, forward_states_kernel, backward_states_kernel)}
    for path in launch.shipped().values():
        assert names == set(launch.read_configs(path).kernels)


def test_head_dims_have_a_configuration_of_their_own_or_of_their_key_dim_or_the_default():
    own, any_value_dim, default = {"BV": 16}, {"BV": 64}, {"BV": 32}
    configs = launch.KernelConfigs("d", {"k": {"128x64": own, "128xany": any_value_dim, "default": default}})
    assert configs.of("k", (128, 64)) == own
    assert configs.of("k", (96, 33)) == own
    assert configs.of("k", (128, 128)) == any_value_dim
    assert configs.of("k", (64, 128)) == default


def test_a_table_without_a_kernel_is_refused_by_name(gpu, tmp_path):
    gpu()
    path = Path(table(tmp_path / "table.json"))
    kept = json.loads(path.read_text(encoding="utf-8"))
    del kept["kernels"]["forward_states_kernel"]
    path.write_text(json.dumps(kept), encoding="utf-8")
    (reason,) = backend("gdn", kernel_configs=str(path)).why_not(GDN_NEED)
    assert "forward_states_kernel" in reason


def test_a_table_that_says_too_little_of_a_kernel_is_refused(gpu, tmp_path):
    gpu()
    path = Path(table(tmp_path / "table.json"))
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["kernels"]["forward_states_kernel"]["128x128"] = {"num_warps": 4}
    path.write_text(json.dumps(kept), encoding="utf-8")
    (reason,) = backend("gdn", kernel_configs=str(path)).why_not(GDN_NEED)
    assert reason.endswith("forward_states_kernel for 128x128 lacks BV")


def test_kernels_of_bounded_gates_need_the_models_bound(gpu):
    gpu()
    bounded = backend("kda", safe_gate=True)
    assert bounded.why_not(replace(NEED, least_gate=-5.0)) == []
    (reason,) = bounded.why_not(replace(NEED, least_gate=-6.0))
    assert "at least -5.0" in reason
    assert len(bounded.why_not(NEED)) == 1


def changed(rows: int, rule: str, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return as_given(random_inputs(rows, rule, Shape(2, 2, 16, 16)) | changes, torch.float32, "cpu")


WRONG_INPUTS = {
    "fewer heads of q": {"q": torch.zeros(10, 1, 16)},
    "beta of one head": {"beta": torch.zeros(10, 1)},
    "gates of the other rule": {"g": torch.zeros(10, 2, 16)},
    "value heads that do not fit": {"v": torch.zeros(10, 3, 16)},
}


@pytest.mark.parametrize("execution", ["fused", "rounds"])
@pytest.mark.parametrize("fault", WRONG_INPUTS)
def test_inputs_of_other_shapes_are_refused(fault, execution):
    layout = layout_of_spec([(-1, 10)])
    inputs = changed(10, "gdn", **WRONG_INPUTS[fault])
    with pytest.raises(ValueError, match=r"(shape|heads)"):
        backend("gdn", execution=execution).mix(inputs, plan_of(layout, "cpu"))


def test_rows_of_two_dtypes_are_refused():
    layout = layout_of_spec([(-1, 10)])
    inputs = changed(10, "gdn")
    inputs["v"] = inputs["v"].half()
    with pytest.raises(ValueError, match="one dtype"):
        backend("gdn").mix(inputs, plan_of(layout, "cpu"))


def test_a_plan_of_other_chunks_is_refused():
    plan = plan_of(layout_of_spec([(-1, 10)]), "cpu")
    with pytest.raises(ValueError, match="is 32, the kernels' is 64"):
        backend("gdn").mix(changed(10, "gdn"), replace(plan, chunk_size=32))
