"""One global norm, whatever the layout: each logical parameter counts once."""

import math

import pytest
import torch
from fakes import FakeAxis
from torch import nn

from picotron_edu.layout import Cut, Layout, attach, describe
from picotron_edu.optim import clip_by_global_norm, global_norm, keep_main_grads


def param_with_grad(grad, *cuts: Cut, full_shape=None) -> nn.Parameter:
    grad = torch.tensor(grad, dtype=torch.float64)
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return attach(param, Layout("w", full_shape or tuple(grad.shape), cuts))


def other_ranks_hold(*others: float):
    """An all_reduce that adds (or maxes) what the other ranks would bring, and counts its calls."""

    def all_reduce(x: torch.Tensor, axis: FakeAxis, op: str) -> torch.Tensor:
        all_reduce.calls.append((axis.name, op))
        for other in others:
            x.copy_(x + other if op == "sum" else torch.maximum(x, torch.tensor(other).to(x)))
        return x

    all_reduce.calls = []
    return all_reduce


def test_one_rank_norm_is_the_norm_of_all_numbers():
    params = [param_with_grad([3.0, 0.0]), param_with_grad([[0.0], [4.0]])]
    assert global_norm(params).item() == 5.0
    assert global_norm(params, order=math.inf).item() == 4.0
    assert global_norm([]).item() == 0.0


@pytest.mark.parametrize(("index", "shard", "other"), [(0, [3.0, 0.0], 16.0), (1, [0.0, 4.0], 9.0)])
def test_shards_are_summed_over_their_axis(index, shard, other):
    """Shards (3, 0) and (0, 4): 5 on both ranks, not 3 and 4 (case 15)."""
    cut = Cut(0, FakeAxis("dp", 2, index))
    param = param_with_grad(shard, cut, full_shape=(4,))
    norm = clip_by_global_norm([param], 1.0, other_ranks_hold(other))
    assert norm.item() == 5.0
    expected = torch.tensor(shard, dtype=torch.float64) / 5  # 0.6 and 0.8
    torch.testing.assert_close(param.grad, expected, rtol=1e-12, atol=0)


def test_the_inf_norm_takes_the_largest_over_the_axis():
    param = param_with_grad([3.0, 0.0], Cut(0, FakeAxis("dp", 2, 0)), full_shape=(4,))
    reduce = other_ranks_hold(4.0)
    assert global_norm([param], reduce, order=math.inf).item() == 4.0
    assert reduce.calls == [("dp", "max")]


def test_a_replicated_gradient_counts_once_and_sends_nothing():
    """0.8 on both ranks is 0.8 and not clipped; counted twice it would be 1.131 (case 16)."""
    param = param_with_grad([0.8])
    reduce = other_ranks_hold(0.64)
    assert clip_by_global_norm([param], 1.0, reduce).item() == pytest.approx(0.8, abs=1e-15)
    assert param.grad.item() == 0.8
    assert reduce.calls == []


def test_shards_and_replicated_parameters_together():
    """Tensor-parallel shards of norm 3 and 4 and a replicated 12: 13, not 17.69 (case 16)."""
    tp = FakeAxis("tp", 2, 0)
    params = [param_with_grad([3.0], Cut(0, tp), full_shape=(2,)), param_with_grad([12.0])]
    assert global_norm(params, other_ranks_hold(16.0)).item() == 13.0


def test_a_parameter_cut_twice_is_summed_over_both_axes_in_a_fixed_order():
    tp, dp = FakeAxis("tp", 2, 0), FakeAxis("dp", 2, 0)
    param = param_with_grad([[1.0]], Cut(1, tp), Cut(0, dp), full_shape=(2, 2))
    reduce = other_ranks_hold(1.0)
    assert global_norm([param], reduce).item() == pytest.approx(math.sqrt(3))
    assert reduce.calls == [("dp", "sum"), ("tp", "sum")]


def test_a_rank_without_gradients_or_with_an_empty_shard_still_joins_the_sum():
    axis = FakeAxis("dp", 2, 1)
    empty = param_with_grad([], Cut(0, axis), full_shape=(1,))
    idle = attach(nn.Parameter(torch.zeros(1)), Layout("w", (2,), (Cut(0, axis),)))
    for params in ([empty], [idle]):
        for order in (2.0, math.inf):
            reduce = other_ranks_hold(9.0)
            assert global_norm(params, reduce, order).item() == (3.0 if order == 2.0 else 9.0)
            assert len(reduce.calls) == 1


def test_a_cut_parameter_needs_all_reduce_and_the_error_names_it():
    param = param_with_grad([3.0], Cut(0, FakeAxis("tp", 2, 0)), full_shape=(2,))
    with pytest.raises(ValueError, match="w is cut over tp: the norm needs all_reduce"):
        global_norm([param])


def test_a_parameter_without_layout_is_refused():
    with pytest.raises(ValueError, match="has no layout"):
        global_norm([nn.Parameter(torch.zeros(2))])


def test_clipping_leaves_small_and_zero_gradients_alone():
    small, zero = param_with_grad([0.3, 0.4]), param_with_grad([0.0, 0.0])
    assert clip_by_global_norm([small], 1.0).item() == pytest.approx(0.5)
    assert small.grad.tolist() == [0.3, 0.4]
    assert clip_by_global_norm([zero], 1.0).item() == 0.0
    assert zero.grad.tolist() == [0.0, 0.0]


def test_clipping_scales_the_main_gradient():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    describe(model)
    keep_main_grads(model)
    model(torch.full((1, 1), 8.0, dtype=torch.bfloat16)).sum().backward()
    assert clip_by_global_norm(model.parameters(), 2.0).item() == 8.0
    assert model.weight.main_grad.item() == 2.0
