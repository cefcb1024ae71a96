"""Models of transformers with the same weights, run trajectory by trajectory: logits, router statistics, gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

pytest.importorskip("transformers", minversion="5.24", reason="transformers is not installed: pip install 'harts[hf]'")

from pydantic import ValidationError

from harts.backends.full.sdpa import Sdpa
from harts.backends.linear.naive import Naive
from harts.backends.model.huggingface.backend import HuggingFace
from harts.backends.model.megatron.backend import MegatronModel
from harts.backends.model.megatron.checkpoints.convert import config_of, weights_of
from harts.backends.model.megatron.checkpoints.folder import FAMILIES
from harts.backends.model.megatron.config import MegatronConfig
from harts.errors import ConfigError
from tests.backends.model.huggingface import models
from tests.backends.model.huggingface.runs import relative, trajectory_wise
from tests.backends.model.megatron.runs import SINGLE, Z, compact, errors, forest, policy_loss, tensors
from tests.parity.trees import rows_by_trajectory

ROOT = Path(__file__).resolve().parents[4]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ling": ("bailing_hybrid", {}),
    "ling, queries from a latent, gates without a bound": (
        "bailing_hybrid",
        {"q_lora_rank": 8, "kda_safe_gate": False, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "ling, all groups, two shared experts": (
        "bailing_hybrid",
        {"topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2, "mlp_layer_types": ["sparse"] * 3},
    ),
    "ling, dense": ("bailing_hybrid", {"mlp_layer_types": ["dense"] * 3}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next, a dense layer, half of a head rotated": (
        "qwen3_next",
        {
            "mlp_only_layers": [0],
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3-next, dense": ("qwen3_next", {"num_experts": 0, "linear_num_value_heads": 2}),
}


CALM = {"initializer_range": 0.05}
"""Of weights: with the 0.2 of other tests both sides are 1e-5 from float64, and how far depends on the processor."""


@cache
def theirs(case: str) -> HuggingFace:
    """A tiny model whose biases and norms are far from what they start at."""
    family, changes = CASES[case]
    made = models.tiny(family, changes | CALM)
    draw = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, each in sorted(made.module.state_dict().items()):
            if each.dim() == 1:
                assert each.count_nonzero() == each.numel(), name
                each.add_(0.2 * torch.randn(each.shape, generator=draw))
    return made


def _ours(case: str, **chosen: Any) -> MegatronModel:
    model = theirs(case)
    config = config_of(model.settings.to_dict(), **chosen)
    made = MegatronModel(config, Naive(Naive.Config()), Sdpa(Sdpa.Config()))
    _fill(made, weights_of(model.module.state_dict(), config, CASES[case][0]))
    return made


def _fill(model: MegatronModel, weights: dict[str, Tensor]) -> None:
    named = {name: each for name, each in model.module.state_dict().items() if isinstance(each, Tensor)}
    assert {name: each.shape for name, each in named.items()} == {name: each.shape for name, each in weights.items()}
    with torch.no_grad():
        for name, each in weights.items():
            named[name].copy_(each)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", CASES)
def test_logits_statistics_and_gradients_are_those_of_transformers(case: str, recompute: str) -> None:
    model, (family, _) = _ours(case, recompute=recompute), CASES[case]
    paths = forest(0)
    layout = compact(paths)
    out = model.forward(tensors(layout))
    logits = out.hidden @ model.head_weight().T
    ours = [logits[rows] for rows in rows_by_trajectory(layout)]
    stock = models.stock(theirs(case))
    wanted = trajectory_wise(stock, paths, family)
    assert max(relative(*both) for both in zip(ours, wanted.logits, strict=True)) <= SINGLE
    ours_loss, wanted_loss = policy_loss(ours, paths), policy_loss(wanted.logits, paths)
    if wanted.z is not None and wanted.load is not None:
        assert out.router_z is not None and out.expert_load is not None
        assert relative(out.router_z, wanted.z) <= SINGLE
        assert torch.equal(out.expert_load, wanted.load)
        ours_loss, wanted_loss = ours_loss + Z * out.router_z, wanted_loss + Z * wanted.z
    ours_loss.backward()
    wanted_loss.backward()
    grads = {name: each.grad for name, each in stock.named_parameters()}
    whole = {name: _or_zeros(grads.get(name), each) for name, each in stock.state_dict().items()}
    mapped = weights_of(whole, model.config, family)
    got = {name: _or_zeros(each.grad, each) for name, each in model.module.named_parameters()}
    assert max(errors(got, {name: mapped[name] for name in got}).values()) <= SINGLE
    assert all(each.count_nonzero() > 0 for each in got.values())


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("ling", {"rope_theta": 100.0}),
        ("ling", {"least_gate": -4.5}),
        ("ling", {"overrides": {"moe_router_num_groups": None, "moe_router_group_topk": None}}),
        ("ling", {"overrides": {"moe_router_topk_scaling_factor": 2.4}}),
        ("qwen3-next", {"rotary_percent": 0.5}),
        ("qwen3-next", {"overrides": {"layernorm_zero_centered_gamma": False}}),
        ("qwen3-next, a dense layer, half of a head rotated", {"overrides": {"layernorm_epsilon": 1e-6}}),
    ],
)
def test_what_shapes_of_tensors_do_not_tell_is_noticed(case: str, changes: dict[str, Any]) -> None:
    model, plan = _ours(case), tensors(compact(forest(3)))
    fields = model.config.model_dump()
    wrong = MegatronConfig(**fields | changes | {"overrides": fields["overrides"] | changes.get("overrides", {})})
    other = MegatronModel(wrong, Naive(Naive.Config()), Sdpa(Sdpa.Config()))
    other.module.load_state_dict(model.module.state_dict())
    assert relative(other.forward(plan).hidden, model.forward(plan).hidden) > 10 * SINGLE


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_a_checkpoint_is_used_once(case: str) -> None:
    family, _ = CASES[case]
    config = config_of(theirs(case).settings.to_dict())
    names = [name for rule in FAMILIES[family].rules_of(config) for name in rule.sources]
    assert len(set(names)) == len(names)
    state = theirs(case).module.state_dict()
    size = sum(each.numel() for each in weights_of(state, config, family).values())
    assert size == sum(each.numel() for each in state.values())


def test_missing_and_unused_tensors_are_named() -> None:
    state, config = theirs("ling").module.state_dict(), config_of(theirs("ling").settings.to_dict())
    state["model.layers.0.self_attn.extra"] = state.pop("model.layers.0.self_attn.b_proj.weight")
    state["model.norm.weight"] = state["model.norm.weight"][:5]
    with pytest.raises(ConfigError) as raised:
        weights_of(state, config, "bailing_hybrid")
    assert str(raised.value).split("\n") == [
        "model: checkpoint: it lacks model.layers.0.attention.b_proj.weight",
        "model: checkpoint: it has, but the model does not use, model.layers.0.attention.extra",
        "model: checkpoint: it has other shapes: model.norm.weight (5,), not (32,)",
    ]
    with pytest.raises(ConfigError, match=r"it lacks lm_head.weight, .*, \S+ and \d+ more$"):
        weights_of({}, config, "qwen3_next")


@pytest.mark.parametrize("case", ["ling", "qwen3-next"])
def test_a_folder_is_loaded(case: str, tmp_path: Path) -> None:
    theirs(case).module.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    more = {"expert_bias_rate": 0.01} if case == "ling" else {}
    config = MegatronConfig(checkpoint=str(tmp_path), pattern="KA", hidden_size=32, moe=more, recompute="full")
    assert config.moe is not None and config.moe.experts == 8
    loaded = MegatronModel(config, Naive(Naive.Config()), Sdpa(Sdpa.Config()))
    wanted = _ours(case).module.state_dict()
    for name, each in loaded.module.state_dict().items():
        assert not isinstance(each, Tensor) or torch.equal(each, wanted[name]), name
    assert MegatronConfig(**config.model_dump()) == config


def test_predictors_of_further_tokens_are_left_out(tmp_path: Path) -> None:
    for case, further in (("ling", "model.layers.3.mlp.gate.weight"), ("qwen3-next", "mtp.fc.weight")):
        folder = tmp_path / case
        theirs(case).module.save_pretrained(folder)
        _add(folder, further)
        config = MegatronConfig(checkpoint=str(folder))
        MegatronModel(config, Naive(Naive.Config()), Sdpa(Sdpa.Config()))
        _add(folder, "model.layers.4.mlp.gate.weight")
        with pytest.raises(ConfigError, match=r"has, but the model does not use, model\.layers\.4\.mlp\.gate\.weight$"):
            MegatronModel(config, Naive(Naive.Config()), Sdpa(Sdpa.Config()))


def _add(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(2)}, file)


def test_fields_that_disagree_with_a_checkpoint_are_named(tmp_path: Path) -> None:
    theirs("ling").module.save_pretrained(tmp_path)
    given: dict[str, Any] = {
        "layers": 4,
        "pattern": "KKA",
        "moe": {"experts": 9},
        "overrides": {"moe_router_group_topk": 2, "attention_output_gate": True},
    }
    with pytest.raises(ValidationError) as raised:
        MegatronConfig(checkpoint=str(tmp_path), **given)
    told = str(raised.value)
    for fault in (
        "layers is 4, but the checkpoint's is 3",
        "pattern is KKA, but the checkpoint's is KAK",
        "moe.experts is 9, but the checkpoint's is 8",
        "overrides.moe_router_group_topk is 2, but the checkpoint's is 1",
        "overrides.attention_output_gate is True, but the checkpoint's is False",
    ):
        assert fault in told
    with pytest.raises(ConfigError, match=r"nothing in it is for decoder.layers.1.self_attention.linear_qkv.bias$"):
        _with_bias(tmp_path / "qwen")


def _with_bias(folder: Path) -> None:
    theirs("qwen3-next").module.save_pretrained(folder)
    config = MegatronConfig(checkpoint=str(folder), overrides={"add_qkv_bias": True})
    MegatronModel(config, Naive(Naive.Config()), Sdpa(Sdpa.Config()))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("ling", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, served is 1e-06"),
        ("ling", {"hidden_act": "gelu"}, "hidden_act is gelu, served is silu"),
        ("ling", {"topk_group": 2, "num_expert_group": 4}, "2 experts a token of 2 groups, served are two a group"),
        ("ling", {"moe_renormalize": False}, "moe_renormalize is False, served is True"),
        ("ling", {"num_shared_experts": 0}, "num_shared_experts is 0, served is 1 or more"),
        ("ling", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "served are dense layers, then sparse ones"),
        ("ling", {"layer_types": ["linear_attention"]}, "layer_types has 1 layers, num_hidden_layers is 3"),
        ("ling", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is yarn, served is default"),
        ("ling", {"expert_swiglu_limit_list": [0, 0, 10]}, "experts are served without limits"),
        ("qwen3-next", {"tie_word_embeddings": True}, "tie_word_embeddings is True, served is False"),
        ("qwen3-next", {"attention_bias": True}, "attention_bias is True, served is False"),
        ("qwen3-next", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, served is 1"),
        ("qwen3-next", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], served are the first layers"),
        ("qwen3-next", {"num_experts_per_tok": 1}, "one expert a token is served without its weight being normalised"),
        ("qwen3-next", {"layer_types": ["chunked_attention"] * 3}, "layer_types has chunked_attention"),
        ("qwen3-next", {"quantization_config": {"bits": 8}}, "quantization_config is {'bits': 8}, served is None"),
        ("qwen3-next", {"model_type": "qwen3"}, "model_type is qwen3, served is bailing_hybrid or qwen3_next"),
    ],
)
def test_what_cannot_be_served_is_named(case: str, changes: dict[str, Any], message: str) -> None:
    values = theirs(case).settings.to_dict()
    config_of(values)
    with pytest.raises(ConfigError, match=message):
        config_of(values | changes)


def test_configurations_as_published_are_read() -> None:
    values = theirs("qwen3-next").settings.to_dict()
    wanted = config_of(values)
    old = {name: each for name, each in values.items() if name not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_scaling": None, "full_attention_interval": 2}
    assert config_of(old) == wanted
    del old["head_dim"]
    with pytest.raises(ConfigError, match=r"config\.json has no head_dim$"):
        config_of(old)
    values = theirs("ling").settings.to_dict()
    names = {"num_experts": "num_local_experts", "num_expert_group": "n_group"}
    old = {names.get(name, name): each for name, each in values.items() if name not in ("layer_types",)}
    assert config_of(old | {"layer_group_size": 2}) == config_of(values)


def test_a_run_starts_from_a_folder(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    family, changes = CASES["ling"]
    models.tiny(family, changes | {"vocab_size": 4096}).module.save_pretrained(tmp_path / "model")
    pipeline = yaml.safe_load((ROOT / "pipelines" / "quickstart.yaml").read_text())
    pipeline["ingest"] |= {"path": str(ROOT / "pipelines" / pipeline["ingest"]["path"]), "limit": 6}
    pipeline["model"] = {"type": "megatron", "checkpoint": str(tmp_path / "model")}
    pipeline["layout"]["conv_width"], pipeline["observe"]["verify"] = 4, "on"
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    code, out, err = call("run", file, "--json")
    assert code == 0, err
    assert json.loads(out)["comparison"]["faults"] == []
    pipeline["model"]["layers"] = 2
    file.write_text(yaml.safe_dump(pipeline))
    code, _, err = call("check", file)
    assert code == 2
    assert "layers is 2, but the checkpoint's is 3" in err


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"config\.json cannot be read: .*No such file"):
        MegatronConfig(checkpoint=str(tmp_path))
    theirs("ling").module.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: No such file"):
        MegatronModel(MegatronConfig(checkpoint=str(tmp_path)), Naive(Naive.Config()), Sdpa(Sdpa.Config()))
