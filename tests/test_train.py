"""The loop: the same training however the batch is cut, records that add up, and clear flags."""

import dataclasses
import math

import pytest
import torch
from oracle import CONFIG, make_batches

from picotron_edu.flags import parse_flags
from picotron_edu.layout import describe
from picotron_edu.model import Llama
from picotron_edu.optim import AdamW, grad_of, keep_main_grads
from picotron_edu.report import Progress, in_units
from picotron_edu.train import (
    Diverged,
    TrainConfig,
    build_model,
    evaluate,
    sample_text,
    train,
    train_step,
)

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


def test_training_stops_where_the_loss_is_no_number():
    with pytest.raises(Diverged, match=r"gradient norm nan at step \d: try a lower lr \(1e\+30\)"):
        train(dataclasses.replace(TINY_RUN, lr=1e30), progress=False)


def test_an_infinite_gradient_leaves_the_weights_alone():
    model = Llama(CONFIG)
    describe(model)
    optimizer = AdamW(model.named_parameters())
    before = model.lm_head.weight.detach().clone()
    model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(Diverged, match=r"gradient norm (inf|nan)"):
        train_step(model, make_batches(CONFIG, rows=4)[0], optimizer, 2, lr=0.01, max_grad_norm=1.0)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": ""}, "prompt must hold at least one character"),
        ({"temperature": 0}, "temperature must be a number above 0 and finite, got 0"),
        ({"temperature": -1.0}, "temperature must be a number above 0"),
    ],
)
def test_a_sample_needs_a_prompt_and_a_temperature(settings, reason):
    model, data = build_model(TINY_RUN, vocab_size=256), TINY_RUN.text()
    with pytest.raises(ValueError, match=reason):
        sample_text(model, data, **{"prompt": "The "} | settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"steps": 2.5}, r"steps must be a whole number, got 2\.5"),
        ({"steps": "5"}, "steps must be a whole number, got '5'"),
        ({"lr": "fast"}, "lr must be a number above 0 and finite, got 'fast'"),
        ({"precision": "float16"}, "precision must be one of 'float32', 'bfloat16', got 'float16'"),
        ({"device": "tpu"}, "device must be one of 'auto', .*, got 'tpu'"),
        ({"data": ""}, "data '' does not exist"),
        ({"tokenizer": "gone.json"}, r"tokenizer 'gone\.json' does not exist"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_notebook_too(settings, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        TrainConfig(**settings)


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, ", 0.2 s on"), (30.0, ", 120 s on")])
def test_a_short_run_shows_tenths_of_a_second(seconds, shown):
    history = train(TINY_RUN, progress=False)
    history.records = [dataclasses.replace(record, seconds=seconds) for record in history]
    assert shown in history.summary()


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
        ("--lr 0", "--lr must be a number above 0 and finite, got 0.0"),
        ("--lr nan", "--lr must be a number above 0 and finite, got nan"),
        ("--seed -1", "--seed must be at least 0, got -1"),
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
