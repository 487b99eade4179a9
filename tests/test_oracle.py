"""Equal training: accumulation equals one large batch, and the oracle catches what is not equal."""

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training, make_batches
from torch import nn

from picotron_edu.data import Batch
from picotron_edu.layout import describe
from picotron_edu.model import Llama
from picotron_edu.optim import global_norm, grad_of, keep_main_grads
from picotron_edu.ranks import all_reduce, world
from picotron_edu.train import accumulate


def plain(model: Llama) -> Rank:
    return Rank(model)


def naive_data_parallel(model: Llama) -> Rank:
    """Each rank takes its rows; gradients are summed at the end."""
    axis = world()

    def finish() -> None:
        for param in model.parameters():
            all_reduce(grad_of(param), axis)

    return Rank(model, axis.index, axis.size, lambda x: all_reduce(x, axis), finish)


# Accumulation


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_accumulation_equals_the_whole_batch_at_once(micro_batch_size, rows):
    """(micro 8, acc 1), (4, 2), (2, 4), (1, 8); of 7 rows the last window is ragged (case 3)."""
    assert_same_training(plain, micro_batch_size=micro_batch_size, rows=rows)


def test_accumulation_in_float32():
    assert_same_training(plain, dtype=torch.float32)


def test_norms_and_losses_do_not_move_with_the_cut():
    batch = make_batches(CONFIG, rows=8)[0]
    seen = []
    for micro_batch_size in (8, 4, 2, 1):
        model = Llama(CONFIG, dtype=torch.float64)
        describe(model)
        keep_main_grads(model)
        loss = accumulate(model, batch, micro_batch_size)
        seen.append((loss.item(), global_norm(model.parameters()).item()))
    for loss, norm in seen[1:]:
        assert abs(loss / seen[0][0] - 1) < 1e-10
        assert abs(norm / seen[0][1] - 1) < 1e-10


def test_tokens_of_short_micro_batches_weigh_no_more_than_others():
    """y = w·x, x = (1, 1, 1) and (4): the gradient is 7/4; the mean of means is 2.5 (case 1)."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x_BS: torch.Tensor, _: None, labels_BS: torch.Tensor):
            counted = labels_BS != -100
            return (self.w * x_BS)[counted].sum(), counted.sum()

    model = Scalar()
    keep_main_grads(model)
    inputs_BS = torch.tensor([[1, 1, 1], [4, 9, 9]])
    labels_BS = torch.tensor([[0, 0, 0], [0, -100, -100]])
    loss = accumulate(model, Batch(inputs_BS, labels_BS), micro_batch_size=1)
    assert loss.item() == 1.75
    assert grad_of(model.w).item() == 1.75


def test_a_batch_without_any_counted_token_has_loss_and_gradients_zero():
    model = Llama(CONFIG)
    describe(model)
    keep_main_grads(model)
    batch = make_batches(CONFIG, rows=4)[0]
    loss = accumulate(model, Batch(batch.inputs_BS, torch.full_like(batch.labels_BS, -100)), 2)
    assert loss.item() == 0
    assert global_norm(model.parameters()).item() == 0


# The oracle itself, and ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_oracle_accepts_data_parallel_ranks_with_unequal_rows_and_tokens(world_size):
    assert_same_training(naive_data_parallel, world_size, rows=7)


def test_the_oracle_catches_ranks_that_each_divide_by_their_own_count():
    """Mean over ranks of means over their tokens: right only for equal counts (case 2)."""

    def mean_of_means(model: Llama) -> Rank:
        axis = world()

        def finish() -> None:
            for param in model.parameters():
                all_reduce(grad_of(param), axis, "avg")

        return Rank(model, axis.index, axis.size, finish=finish)

    with pytest.raises(AssertionError, match="rank 0, step 0: loss"):
        assert_same_training(mean_of_means, 2)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_the_oracle_catches_a_constant_factor_and_tells_it(factor):
    def scaled(model: Llama) -> Rank:
        def finish() -> None:
            for param in model.parameters():
                grad_of(param).mul_(factor)

        return Rank(model, finish=finish)

    with pytest.raises(AssertionError, match=f"gradients of .* it is {factor:g} times as large"):
        assert_same_training(scaled)


def test_the_oracle_catches_a_single_parameter_that_is_forgotten():
    def one_forgotten(model: Llama) -> Rank:
        axis = world()

        def finish() -> None:
            for name, param in model.named_parameters():
                if "layers.1.input_layernorm" not in name:
                    all_reduce(grad_of(param), axis)

        return Rank(model, axis.index, axis.size, lambda x: all_reduce(x, axis), finish)

    with pytest.raises(AssertionError, match=r"gradients of model\.layers\.1\.input_layernorm"):
        assert_same_training(one_forgotten, 2)
