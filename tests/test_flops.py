"""FLOPs: the published numbers, and torch's own count of the real matmuls."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from picotron_edu.flops import (
    OperationCounter,
    Peak,
    forward_flops,
    hardware_flops,
    matmul_parameters,
    measured_peak,
    model_flops,
    peak_of,
)
from picotron_edu.model import PRESETS, Llama, LlamaConfig, token_loss_sum

GROUPED = LlamaConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
)


def test_llama_2_7b_on_four_sequences_of_8192():
    """Weights 1299.0 TFLOP, attention 422.2 in full or 211.1 causal (case 77)."""
    full = model_flops(PRESETS["llama-2-7b"], batch=4, sequence=8192, causal=False)
    causal = model_flops(PRESETS["llama-2-7b"], batch=4, sequence=8192)
    assert round(full.weights / 1e12, 1) == round(causal.weights / 1e12, 1) == 1299.0
    assert round(full.attention / 1e12, 1) == 422.2
    assert round(causal.attention / 1e12, 1) == 211.1
    assert causal.total == causal.weights + causal.attention


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_the_formula_equals_a_count_of_the_real_matmuls(tied, kv_heads):
    """The counter sees unfused attention in full, so the causal half is not taken off."""
    config = dataclasses.replace(GROUPED, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    model, tokens_BS = Llama(config), torch.zeros(2, 16, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss, _ = token_loss_sum(model(tokens_BS), tokens_BS)
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == forward_flops(config, 2, 16, causal=False).total
    # the embedding's input has no gradient to compute, and no matmul either: 3 × forward it is
    assert counter.get_total_flops() == model_flops(config, 2, 16, causal=False).total


def test_the_output_head_counts_and_the_embedding_and_norms_do_not():
    weights = GROUPED.num_parameters()
    embedding, norms = 40 * 24, 24 * (2 * 3 + 1)
    assert matmul_parameters(GROUPED) == weights - embedding - norms
    tied = dataclasses.replace(GROUPED, tie_word_embeddings=True)
    assert matmul_parameters(tied) == matmul_parameters(GROUPED)


def test_grouped_queries_save_projections_but_not_scores():
    every = dataclasses.replace(GROUPED, num_key_value_heads=6)
    few, many = forward_flops(GROUPED, 1, 64), forward_flops(every, 1, 64)
    assert few.attention == many.attention
    assert few.weights < many.weights


def test_recompute_raises_hardware_flops_and_never_model_flops():
    model = model_flops(GROUPED, 2, 64)
    none, selective, full = (
        hardware_flops(GROUPED, 2, 64, recompute) for recompute in ("none", "selective", "full")
    )
    assert none == model
    assert selective.weights == model.weights
    assert selective.attention == pytest.approx(model.attention * 4 / 3)
    assert full.total == pytest.approx(model.total * 4 / 3)


def test_utilization_is_needed_work_over_possible_work():
    assert Peak(100e12, "made up").utilization(flops=80e12, seconds=2.0) == pytest.approx(0.4)


def test_the_peak_names_its_source(monkeypatch):
    peak = measured_peak(torch.device("cpu"), torch.float32)
    assert peak.flops > 1e8
    assert peak.source == "measured here: float32 matmul of 512 x 512"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    peak = peak_of(torch.device("cuda"), torch.bfloat16)
    assert (peak.flops, peak.source) == (989e12, "data sheet of H100, dense bfloat16")


def test_fused_attention_on_the_cpu_is_counted():
    """5 products in backward, for it computes the scores once more: 7/2 of forward, not 3."""
    tokens_BS = torch.zeros(2, 32, dtype=torch.int64)
    once = forward_flops(GROUPED, batch=2, sequence=32, causal=False)
    with OperationCounter() as forward:
        loss, _ = token_loss_sum(Llama(GROUPED)(tokens_BS), tokens_BS)
    with OperationCounter() as backward:
        loss.backward()
    assert forward.total == once.total
    assert backward.total == 2 * once.weights + 2.5 * once.attention
