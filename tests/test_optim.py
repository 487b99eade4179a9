"""Sums in float32, AdamW as torch's, and the learning rate's way up and down."""

import math
from itertools import pairwise

import pytest
import torch
from fakes import FakeAxis
from torch import nn

from picotron_edu.layout import Cut, Layout, attach, describe
from picotron_edu.optim import (
    AdamW,
    cosine_lr,
    grad_of,
    keep_main_grads,
    zero_grads,
)

# Main gradients


@pytest.mark.parametrize("micro_grads", [[256.0, 1.0], [1.0] * 1024])
def test_micro_batch_gradients_add_up_in_float32(micro_grads):
    """In bfloat16, 256 + 1 is 256, and 1024 ones are 256 (case 21)."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    keep_main_grads(model)
    for grad in micro_grads:
        model(torch.full((1, 1), grad, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.main_grad.dtype == torch.float32
    assert grad_of(model.weight).item() == sum(micro_grads)
    assert model.weight.grad is None  # else the first micro-batch would count twice


def test_wide_gradients_are_kept_as_they_are_without_a_copy():
    model = nn.Linear(3, 2, dtype=torch.float64)
    keep_main_grads(model)
    keep_main_grads(model)  # asking twice does not count twice
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    first = model.weight.main_grad
    assert first.dtype == torch.float64 and torch.equal(first, torch.ones(2, 3))
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert model.weight.main_grad is first and (first == 2).all()
    zero_grads(model.parameters())
    assert grad_of(model.weight) is None


def test_a_weight_used_twice_gets_the_sum_of_both_uses():
    model = nn.Linear(2, 2, bias=False)
    keep_main_grads(model)
    model(model(torch.ones(1, 2))).sum().backward()
    got = grad_of(model.weight)
    weight = model.weight.detach().clone().requires_grad_()
    (torch.ones(1, 2) @ weight.T @ weight.T).sum().backward()
    torch.testing.assert_close(got, weight.grad)


# AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torchs_with_decay_for_matrices_only(dtype):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3, dtype=dtype), nn.Linear(5, 3, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    describe(ours)
    keep_main_grads(ours)
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    optimizer = AdamW(ours.named_parameters(), weight_decay=0.3, **settings)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.3},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, **settings)
    for step in range(5):
        x = torch.randn(4, 5, dtype=dtype)
        for model in (ours, theirs):
            model(x).square().sum().backward()
        optimizer.step(lr=0.1 / (step + 1))
        for group in reference.param_groups:
            group["lr"] = 0.1 / (step + 1)
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_single_row_of_a_matrix_decays_and_a_vector_does_not():
    row = nn.Parameter(torch.ones(1, 3))
    attach(row, Layout("w", (2, 3), (Cut(0, FakeAxis("tp", 2, 1)),)))
    vector = attach(nn.Parameter(torch.ones(3)), Layout("norm", (3,)))
    optimizer = AdamW([("w", row), ("norm", vector)], weight_decay=0.5)
    assert (optimizer.decay_of(row), optimizer.decay_of(vector)) == (0.5, 0.0)


def test_small_steps_add_up_in_bfloat16_thanks_to_master_weights():
    """A step of 0.001 is lost on a bfloat16 weight of 1: without master weights it stands still."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert model.weight - 0.001 == 1.0
    describe(model)
    keep_main_grads(model)
    optimizer = AdamW(model.named_parameters(), lr=0.001, weight_decay=0.0)
    for _ in range(100):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(optimizer.masters["weight"].item() - 0.9) < 1e-4
    assert abs(model.weight.item() - 0.9) < 0.004  # the master weight, rounded


@pytest.mark.parametrize(
    ("dtype", "after_construction", "after_a_step"),
    [(torch.float32, 0, 8), (torch.bfloat16, 4, 12), (torch.float64, 0, 16)],
)
def test_state_bytes_per_parameter(dtype, after_construction, after_a_step):
    model = nn.Linear(10, 10, bias=False, dtype=dtype)
    describe(model)
    optimizer = AdamW(model.named_parameters())
    assert optimizer.state_bytes() == 100 * after_construction
    model(torch.ones(1, 10, dtype=dtype)).sum().backward()
    optimizer.step()
    assert optimizer.state_bytes() == 100 * after_a_step


def test_a_parameter_without_gradient_keeps_its_value_and_gets_no_state():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    describe(model)
    keep_main_grads(model)
    before = model[1].weight.detach().clone()
    optimizer = AdamW(model.named_parameters(), weight_decay=0.1)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    assert set(optimizer.moments) == {"0.weight", "0.bias"}


# The learning rate


def test_the_learning_rate_warms_up_in_a_line_and_falls_along_a_cosine():
    rates = [cosine_lr(step, peak=1.0, warmup=4, total=24, floor=0.1) for step in range(30)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(0.55)  # half-way between peak and floor
    assert rates[24:] == pytest.approx([0.1] * 6)
    assert all(a >= b for a, b in pairwise(rates[4:]))
    assert cosine_lr(0, peak=1.0, warmup=0, total=10) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1}, "lr must be a number 0 or more, and finite, got -1"),
        ({"lr": "1e-3"}, "lr must be a number 0 or more, and finite, got '1e-3'"),
        ({"eps": math.nan}, "eps must be a number 0 or more, and finite, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must lie from 0 up to below 1, got \(0.9, 1.0\)"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW(nn.Linear(1, 1).named_parameters(), **settings)


def test_parameters_without_names_are_refused():
    with pytest.raises(ValueError, match=r"give it model\.named_parameters\(\)"):
        AdamW(nn.Linear(1, 1).parameters())
