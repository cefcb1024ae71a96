"""The state kernels, compiled for Hopper without a GPU: what the shipped configurations take of shared memory."""

import json
import os
import subprocess
import sys

import pytest

MOST = 232_448
"""Bytes of shared memory that one program can have on Hopper."""
HEAD_DIMS = ((64, 128), (128, 128), (256, 16), (256, 32), (256, 128), (256, 256))
"""Key and value dims; key dims are rounded up to 64, 128 or 256."""

PROGRAM = """
import json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from harts.backends.linear.tree import launch
from harts.backends.linear.tree.states import KERNELS

key_dim, value_dim = map(int, sys.argv[1:])
configs = launch.read_configs(next(iter(launch.shipped().values())))
floats = {"g", "g_head", "bank", "dbank", "dsource"}
indices = {"sequences", "spans", "consumers"}
found = {}
for kernel in KERNELS:
    for scalar in (False, True):
        config = dict(configs.of(kernel.__name__, (key_dim, value_dim)))
        options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
        constants = config | {"H": 8, "HV": 8, "K": key_dim, "V": value_dim, "BK": key_dim}
        constants |= {"SCALAR_GATE": scalar, "WRITE": True}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {
            name: "constexpr" if name in constants
            else "*fp32" if name in floats
            else "*i64" if name in indices
            else {"done": "*i32", "given": "i32", "scale": "fp32"}.get(name, "*bf16")
            for name in kernel.arg_names
        }
        places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
        aligned = {places[name]: [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
        values = {places[name]: value for name, value in constants.items()}
        made = compile(ASTSource(kernel, types, values, aligned), GPUTarget("cuda", 90, 32), options)
        found[f"{kernel.__name__} scalar={scalar}"] = made.metadata.shared
print(json.dumps(found))
"""


@pytest.mark.parametrize(("key_dim", "value_dim"), HEAD_DIMS)
def test_shipped_configurations_fit(key_dim, value_dim):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(key_dim), str(value_dim)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert len(taken) == 4
    assert max(taken.values()) <= MOST, taken
