"""Index arrays reach a device as they are, and nobody waits for the device meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts.backends.model.config import ReferenceConfig
from harts.backends.model.reference import Reference
from harts.backends.placing import place
from harts.backends.plan_tensors import build_plan_tensors
from harts.registry import resolve
from tests.forests import Spec, paths_of
from tests.parity.trees import layout_of

FORESTS: tuple[Spec, ...] = (
    [(-1, 300), (0, 130), (0, 30), (1, 1), (2, 64)],
    [(-1, 200), (0, 65), (0, 3), (1, 40), (-1, 128), (4, 70), (4, 2)],
)


def test_an_array_is_copied() -> None:
    array = np.arange(5)
    found = place(array, "cpu")
    array[0] = 7
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert place(torch.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("full", ["tree", "flash_attention_4"])
def test_the_host_does_not_wait_within_a_microbatch(full: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("fla")
    pytest.importorskip("flash_attn.cute.interface")
    linear, attention = resolve("linear_attention", "kda"), resolve("full_attention", full)
    fields = {"vocab_size": 512, "hidden_size": 256, "layers": 2, "pattern": "KA", "rule": "kda", "conv_width": 4}
    fields |= {"linear_heads": 2, "linear_value_heads": 2, "linear_key_dim": 128, "linear_value_dim": 128}
    fields |= {"attention": "gqa", "heads": 2, "kv_heads": 2, "head_dim": 128, "intermediate_size": 256}
    config = ReferenceConfig(**fields, dtype="bfloat16", seed=0)
    model = Reference(config, linear(linear.Config()), attention(attention.Config()), "cuda")
    layouts = [layout_of(paths_of(forest), 64) for forest in FORESTS]

    def run(layout: object) -> None:
        plan = build_plan_tensors(layout, "cuda", torch.float32)  # type: ignore[arg-type]
        model.forward(plan).hidden.square().sum().backward()

    for layout in layouts:  # compiles, and takes memory that is pinned
        run(layout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layout in layouts:
            run(layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
