from __future__ import annotations

from dataclasses import replace

import torch

from tests.backends.linear.calls import HV, K, error, naive, random_call, recurrent


def test_one_token_by_hand() -> None:
    call = random_call([1], 4, "kda")
    q, k, v, g, beta = (call.rows[name][0].detach() for name in ("q", "k", "v", "g", "beta"))
    found = call.run(recurrent())
    for head in range(HV):
        group = head // 2
        decayed = g[head].exp()[:, None] * call.initial_state[0, head].detach()
        state = decayed + beta[head] * torch.outer(k[group], v[head] - k[group] @ decayed)
        assert error(found.states[0, head], state) < 1e-15
        assert error(found.output[0, head], q[group] @ state / K**0.5) < 1e-15


def test_a_full_write_is_read_back() -> None:
    call = random_call([3], 4, "gdn")
    rows = {**call.rows, "beta": torch.ones_like(call.rows["beta"]), "q": call.rows["k"]}
    found = replace(call, rows=rows).run(recurrent())
    assert error(found.output * K**0.5, call.rows["v"]) < 1e-14


def test_gdn_is_kda_with_one_gate_for_all_channels() -> None:
    call = random_call([21, 6], 8, "gdn")
    spread = replace(call, rows={**call.rows, "g": call.rows["g"][..., None].expand(-1, -1, K)})
    for backend in (recurrent(), naive()):
        assert error(call.run(backend).output, spread.run(backend).output) < 1e-14
