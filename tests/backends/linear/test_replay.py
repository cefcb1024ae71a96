import pytest
import torch

from harts.backends.linear.replay import gather_rows
from harts.backends.plan_tensors import build_plan_tensors
from tests.backends.linear.trees import DEEP, layout_of, plan_of, random_layout


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_gradients_equal_a_plain_gather(seed):
    plan = plan_of(random_layout(seed))
    gather = torch.cat([each.gather for each in plan.rounds])
    x = torch.randn(len(plan.input_ids), 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(gather), 2, 3, dtype=torch.float64)
    ours, plain = gather_rows(x, plan), x.index_select(0, gather)
    assert torch.equal(ours, plain)
    (mine,), (wanted,) = (torch.autograd.grad((rows * weight).sum(), x) for rows in (ours, plain))
    assert torch.allclose(mine, wanted, rtol=1e-14, atol=1e-14)


def test_padding_rows_get_no_gradient():
    plan = plan_of(layout_of(DEEP, row_multiple=64))
    assert plan.rows < len(plan.input_ids)
    x = torch.ones(len(plan.input_ids), 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(gather_rows(x, plan).sum(), x)
    assert gradient[: plan.rows].all()
    assert not gradient[plan.rows :].any()


def test_replays_are_summed_wider_than_they_are_stored():
    layout = layout_of([[1] * 5 + [2 + branch] for branch in range(40)])
    plan = plan_of(layout)
    gather = torch.cat([each.gather for each in plan.rounds])
    x = torch.zeros(len(plan.input_ids), 1, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(gather_rows(x, plan).sum(), x, retain_graph=True)
    counts = torch.bincount(gather, minlength=len(x))
    assert counts.max() == 40
    assert torch.equal(gradient[:, 0].long(), counts)
    small = torch.full((len(gather), 1), 1 / 512, dtype=torch.bfloat16)  # lost one by one beside a 1 in bfloat16
    small[plan.rounds[0].own[4]] = 1.0
    (gradient,) = torch.autograd.grad(gather_rows(x, plan), x, small)
    assert float(gradient[4, 0]) == pytest.approx(1 + 39 / 512, rel=1 / 256)


@pytest.mark.gpu
def test_gradients_repeat_their_bits_on_a_gpu():
    layout = layout_of([[1] * 63 + [2 + branch] for branch in range(500)])
    plan = build_plan_tensors(layout, "cuda", torch.float32)
    gather = torch.cat([each.gather for each in plan.rounds])
    x = torch.zeros(len(plan.input_ids), 16, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    upstream = torch.randn(len(gather), 16, 128, device="cuda").bfloat16()
    first, *others = [torch.autograd.grad(gather_rows(x, plan), x, upstream)[0] for _ in range(10)]
    assert all(torch.equal(first, other) for other in others)
    wanted = torch.zeros(x.shape, dtype=torch.float64, device="cuda").index_add_(0, gather.cuda(), upstream.double())
    assert float((first.double() - wanted).norm() / wanted.norm()) < 3e-3
