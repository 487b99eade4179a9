"""The loop: the same training however the batch is cut, records that add up, and clear flags."""

import dataclasses
import math

import pytest
import torch
from oracle import CONFIG, Rank, assert_same_training, make_batches
from torch import nn

from picotron_edu.data import Batch
from picotron_edu.flags import parse_flags
from picotron_edu.layout import describe
from picotron_edu.model import Llama
from picotron_edu.optim import AdamW, global_norm, grad_of, keep_main_grads
from picotron_edu.ranks import all_reduce, world
from picotron_edu.report import Progress, in_units
from picotron_edu.train import TrainConfig, accumulate, build_model, evaluate, train, train_step

TINY_RUN = TrainConfig(
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=48,
    sequence_length=32,
    micro_batch_size=2,
    accumulation=2,
    steps=4,
    warmup=1,
    device="cpu",
)


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


def test_tokens_of_short_micro_batches_weigh_no_more_than_others(monkeypatch):
    """y = w·x, x = (1, 1, 1) and (4): the gradient is 7/4; the mean of means is 2.5 (case 1)."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x_BS: torch.Tensor) -> torch.Tensor:
            return self.w * x_BS

    def sum_of_outputs(y_BS: torch.Tensor, labels_BS: torch.Tensor):
        counted = labels_BS != -100
        return y_BS[counted].sum(), counted.sum()

    monkeypatch.setattr("picotron_edu.train.token_loss_sum", sum_of_outputs)
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


# The step and the loop


def test_a_step_clips_updates_and_clears():
    batch = make_batches(CONFIG, rows=4)[0]
    model = Llama(CONFIG)
    describe(model)
    keep_main_grads(model)
    before = model.lm_head.weight.detach().clone()
    optimizer = AdamW(model.named_parameters())
    loss, norm = train_step(model, batch, optimizer, 2, lr=0.01, max_grad_norm=0.1)
    assert loss.item() > 0 and norm.item() > 0.1  # the norm before clipping
    moved = (model.lm_head.weight - before).abs().max().item()
    assert 0.005 < moved < 0.02  # Adam's first step is about lr
    total = math.sqrt(sum(m.square().sum().item() for m, _ in optimizer.moments.values()))
    assert total == pytest.approx(0.1 * 0.1, rel=1e-3)  # (1 − β₁) × the clipped norm
    assert all(grad_of(param) is None for param in model.parameters())


def test_evaluation_weighs_tokens_and_not_batches():
    model = Llama(CONFIG, dtype=torch.float64)
    whole = make_batches(CONFIG, rows=6)[0]
    in_parts = evaluate(model, whole.split(4), torch.device("cpu"))
    at_once = evaluate(model, [whole], torch.device("cpu"))
    assert in_parts == pytest.approx(at_once, rel=1e-6)
    assert all(param.grad is None for param in model.parameters())


def test_training_twice_gives_the_same_losses_and_another_seed_does_not():
    one, two = train(TINY_RUN, progress=False), train(TINY_RUN, progress=False)
    assert one.losses == two.losses
    assert train(dataclasses.replace(TINY_RUN, seed=1), progress=False).losses != one.losses


def test_the_cut_into_micro_batches_does_not_change_the_losses():
    losses = [
        train(dataclasses.replace(TINY_RUN, micro_batch_size=m, accumulation=4 // m), False).losses
        for m in (4, 2, 1)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_falls_in_both_precisions(precision):
    config = dataclasses.replace(TINY_RUN, precision=precision, steps=30, lr=0.01)
    history = train(config, progress=False)
    assert history.losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert history.losses[-1] < 4.0
    assert history.model.lm_head.weight.dtype == getattr(torch, precision)


def test_records_add_up():
    history = train(TINY_RUN, progress=False)
    assert [record.step for record in history] == [0, 1, 2, 3]
    for record in history:
        assert record.tokens == 2 * 2 * 32
        assert record.tokens_per_second == pytest.approx(record.tokens / record.seconds)
        assert 0 < record.mfu < 1.2
        assert record.peak_memory > 50e6  # a process that has loaded torch
    assert history[0].lr == TINY_RUN.lr
    assert history[3].lr < history[1].lr


def test_the_summary_states_its_conventions():
    text = train(TINY_RUN, progress=False).summary()
    assert "4 steps, 512 tokens" in text
    assert "6 x matmul weights x tokens + causal attention; no recompute" in text
    assert "measured here: float32 matmul" in text
    assert "largest resident set of this process" in text


def test_progress_prints_about_ten_lines_where_there_is_no_terminal(capsys):
    config = dataclasses.replace(TINY_RUN, steps=25)
    train(config)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert 10 <= len(printed.out.splitlines()) <= 14
    assert printed.out.splitlines()[-1].startswith("step    24   loss")
    train(config, progress=False)
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    train(TINY_RUN)
    printed = capsys.readouterr()
    assert printed.out == "" and "4/4" in printed.err and "loss" in printed.err


def test_sizes_are_written_in_units():
    assert [in_units(n) for n in (12, 12_345, 1.5e6, 2.34e9)] == [
        "12 B",
        "12 kB",
        "2 MB",
        "2.34 GB",
    ]
    assert Progress(1, shown=False).bar.disable


# Flags


def test_sizes_replace_those_of_the_preset():
    model = build_model(TINY_RUN, vocab_size=300)
    assert model.config.vocab_size == 300
    assert model.config.hidden_size == 32 and model.config.num_attention_heads == 8
    assert len(model.model.layers) == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--model huge", "preset 'huge' is unknown; there are tiny, llama-2-7b"),
        ("--precision fp8", "'float32', 'bfloat16'"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--micro-batch-size -2", "--micro-batch-size must be at least 1, got -2"),
        ("--lr 0", "--lr must be above 0 and finite, got 0.0"),
        ("--lr nan", "--lr must be above 0 and finite, got nan"),
        ("--seed -1", "--seed must be 0 or more, got -1"),
        (
            "--hidden-size 100",
            "--hidden-size (100) must be a multiple of --num-attention-heads (8)",
        ),
        ("--sequence-length 9999", "--sequence-length (9999) is above the model's"),
        ("--data gone.txt", "--data 'gone.txt' does not exist; allowed are 'manual', a .txt"),
        ("--device tpu", "'cpu', 'cuda', 'mps'"),
    ],
)
def test_a_wrong_flag_says_what_is_allowed(capsys, argv, reason):
    with pytest.raises(SystemExit) as stopped:
        parse_flags(TrainConfig, argv.split())
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert all(part in message for part in reason.split(", ")), message
