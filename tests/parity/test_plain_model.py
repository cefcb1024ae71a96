"""Compact execution against a model that knows nothing of trees: values, gradients, router statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts.train.objectives import LossTerms
from tests.parity.cases import Case, cases
from tests.parity.plain_model import PlainModel
from tests.parity.rig import build, env_of, layouts_of, model_config, objective

CASES = [case for case in cases(96) if not case.split][::2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probs_gradients_and_router_statistics_are_the_plain_models(case: Case):
    env = env_of(case, "naive")
    execute, restore = build("execute", "compact", env), build("restore", "mapped", env, entropy=True)
    module = env.model.module
    names = dict(module.named_parameters())
    parameters = {name: each.detach().clone().requires_grad_() for name, each in names.items()}
    plain = PlainModel(model_config(case), parameters | dict(module.named_buffers()))
    layouts = layouts_of(case, "min_call")
    ours, theirs = 0.0, 0.0
    for layout in layouts.items:
        restored = restore.run(execute.run(layout))
        columns = layout.plan.tree.columns
        logprobs, entropy, sums = plain_log_probs(plain, case, layout)
        assert close(restored.logprobs, logprobs)
        assert close(restored.entropy, entropy)
        ours = ours + objective(case).loss(LossTerms(restored.logprobs, restored.entropy, columns, layouts.step))
        theirs = theirs + objective(case).loss(LossTerms(logprobs, entropy, columns, layouts.step))
        if restored.outputs.router_z is not None:
            z, balance, load = router_statistics(sums, int(columns.offset[-1]), plain.config.moe)
            assert close(restored.outputs.router_z, z)
            assert close(restored.outputs.router_balance, balance)
            assert torch.equal(restored.outputs.expert_load.double(), load)
            ours = ours + 0.01 * restored.outputs.router_z + restored.outputs.router_balance
            theirs = theirs + 0.01 * z + balance
    ours.backward()
    theirs.backward()
    whole = torch.cat([each.grad.flatten() for each in parameters.values() if each.grad is not None]).norm()
    for name, each in names.items():
        wanted = parameters[name].grad
        assert (each.grad - (0 if wanted is None else wanted)).norm() <= 1e-10 * whole, name


def plain_log_probs(plain, case, layout):
    """Every trajectory by itself; the router's sums are added up per layer."""
    batch, columns = case.batch(), layout.plan.tree.columns
    temperatures = columns.per_token("temperature")
    logprobs, entropies, sums = [], [], []
    for index, key in enumerate(layout.plan.tree.key.tolist()):
        tokens = batch.tokens[batch.columns.offset[key] : batch.columns.offset[key + 1]].tolist()
        logits, found = plain.logits(tokens)
        sums.append(found)
        heat = torch.tensor(temperatures[columns.offset[index] + 1 : columns.offset[index + 1]])[:, None]
        scaled = (logits[:-1] / heat).log_softmax(-1)
        logprobs.append(scaled[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:], dtype=torch.long)])
        entropies.append(-(scaled.exp() * scaled).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), sums


def router_statistics(sums, tokens, moe):
    z, balance, loads = 0.0, 0.0, []
    for layer in zip(*sums, strict=True):
        load = sum(each.load for each in layer)
        mass = sum(each.mass for each in layer)
        z = z + sum(each.z for each in layer)
        balance = balance + moe.experts * (load / (moe.top_k * tokens) * mass / tokens).sum()
        loads.append(load)
    return z, balance, torch.stack(loads)


def close(ours, theirs):
    return float((ours - theirs).detach().norm()) <= 1e-11 * max(float(theirs.detach().norm()), 1.0)


def test_full_recomputation_keeps_less():
    saved = {}
    for recompute in ("none", "full"):
        case = Case(
            number=0, rule="kda", attention="mla", feed_forward="dense", recompute=recompute, replicas=1, split=False
        )
        execute = build("execute", "compact", env_of(case, "naive"))
        kept: dict[int, int] = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = execute.run(layouts_of(case, "min_call").items[0])
        saved[recompute] = sum(kept.values())
        assert np.isfinite(outputs.hidden.detach().numpy()).all()
    assert saved["full"] * 3 < saved["none"]
