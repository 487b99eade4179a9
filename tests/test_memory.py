"""Memory: the formulas equal what a real model holds, byte for byte."""

import dataclasses

import pytest
import torch

from picotron_edu.layout import describe
from picotron_edu.memory import (
    STATES,
    activation_bytes,
    activations,
    korthikanti_bytes,
    measured_activation_bytes,
)
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW, grad_of, keep_main_grads

CONFIGS = [
    LlamaConfig(),
    LlamaConfig(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
    LlamaConfig(num_hidden_layers=1, num_key_value_heads=8, tie_word_embeddings=True),
    LlamaConfig(num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1),
]


def loss_of(model: Llama, batch: int, sequence: int) -> torch.Tensor:
    tokens_BS = torch.zeros(batch, sequence, dtype=torch.int64, device=model.lm_head.weight.device)
    return token_loss_sum(model(tokens_BS), tokens_BS.roll(-1))[0]


def test_bytes_per_parameter_are_those_of_the_playbook():
    assert STATES["float32"].total == 16
    assert STATES["bfloat16, bfloat16 gradients"].total == 16
    assert STATES["bfloat16, float32 gradients"].total == 18
    assert STATES["bfloat16, both gradients"].total == 20


@pytest.mark.parametrize(
    ("dtype", "state"),
    [(torch.float32, "float32"), (torch.bfloat16, "bfloat16, float32 gradients")],
)
@pytest.mark.parametrize("config", CONFIGS)
def test_weights_gradients_and_optimizer_hold_what_the_table_says(config, dtype, state):
    model = Llama(config, dtype=dtype)
    describe(model)
    keep_main_grads(model)
    optimizer = AdamW(model.named_parameters())
    loss_of(model, 1, 8).backward()
    optimizer.step()
    params, count = list(model.parameters()), config.num_parameters()
    assert sum(p.nbytes for p in params) == STATES[state].weights * count
    assert sum(grad_of(p).nbytes for p in params) == STATES[state].gradients * count
    assert all(p.grad is None for p in params)
    rest = STATES[state].master + STATES[state].moments
    assert optimizer.state_bytes() == rest * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("batch", "sequence"), [(1, 8), (3, 32)])
@pytest.mark.parametrize("config", CONFIGS)
def test_activations_are_exactly_those_of_the_formula(config, batch, sequence, dtype):
    model = Llama(config, dtype=dtype)
    measured = measured_activation_bytes(model, lambda: loss_of(model, batch, sequence))
    assert measured == activation_bytes(config, batch, sequence, dtype)


@pytest.mark.gpu
def test_activations_on_a_gpu_are_those_of_the_formula_up_to_small_change():
    config = dataclasses.replace(CONFIGS[0], hidden_size=256, num_attention_heads=4)
    model = Llama(config, dtype=torch.bfloat16, device="cuda")
    measured = measured_activation_bytes(model, lambda: loss_of(model, 4, 256))
    assert measured == pytest.approx(
        activation_bytes(config, 4, 256, torch.bfloat16, gpu=True), 0.01
    )


def test_activations_grow_in_a_line_with_batch_and_sequence():
    """Fused attention: no term in the square of the sequence."""
    one = activation_bytes(CONFIGS[0], 1, 64)
    small = 2 * 4 * 16 * 64  # cosines, the same for each batch: not doubled with it
    assert activation_bytes(CONFIGS[0], 2, 64) == pytest.approx(2 * one, abs=small)
    assert activation_bytes(CONFIGS[0], 1, 128) == pytest.approx(2 * one, abs=8)


def test_the_table_names_each_tensor_once_and_adds_up():
    table = activations(CONFIGS[0], 2, 64)
    assert len({kept.name for kept in table}) == len(table)
    assert sum(kept.total for kept in table) == activation_bytes(CONFIGS[0], 2, 64)


def test_korthikantis_formula_for_gpt_3():
    """GPT-3 175B, s 2048, b 1: 34 + 5as/h = 34 + 80; selective recomputation saves 70 %."""
    full = korthikanti_bytes(12_288, 96, 96, batch=1, sequence=2048)
    kept = korthikanti_bytes(12_288, 96, 96, batch=1, sequence=2048, selective=True)
    assert full == 2048 * 12_288 * 96 * (34 + 80)
    assert 1 - kept / full == pytest.approx(0.70, abs=0.005)
