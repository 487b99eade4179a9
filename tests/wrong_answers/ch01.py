"""Chapter 01, counting memory and FLOPs: the mistakes people make, and the words that tell them."""

from __future__ import annotations

import torch

from picotron_edu.model import Llama, LlamaConfig

# ---- 1.1 memory_of(config, dtype) ----


def parameters(config, kv_heads=None, head=None, matrices=3, norms=2, last_norm=1, tables=None):
    """Right, but for what is said otherwise."""
    D, d = config.hidden_size, head or config.size_of_head
    kv_heads = kv_heads or config.num_key_value_heads
    attention = 2 * D * d * (config.num_attention_heads + kv_heads)
    layer = attention + matrices * D * config.intermediate_size + norms * D
    tables = tables or (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * layer + last_norm * D + tables * D * config.vocab_size


def in_bytes(count, dtype):
    master = 4 if dtype == torch.bfloat16 else 0
    return count * dtype.itemsize, count * 4, count * (8 + master)


def as_many_key_heads_as_query_heads(config, dtype):
    return in_bytes(parameters(config, kv_heads=config.num_attention_heads), dtype)


def two_matrices_in_the_feed_forward(config, dtype):
    return in_bytes(parameters(config, matrices=2), dtype)


def tied_head_counted_twice(config, dtype):
    return in_bytes(parameters(config, tables=2), dtype)


def head_forgotten(config, dtype):
    return in_bytes(parameters(config, tables=1), dtype)


def norms_forgotten(config, dtype):
    return in_bytes(parameters(config, norms=0, last_norm=0), dtype)


def last_norm_forgotten(config, dtype):
    return in_bytes(parameters(config, last_norm=0), dtype)


def head_size_from_hidden_size(config, dtype):
    return in_bytes(
        parameters(config, head=config.hidden_size // config.num_attention_heads), dtype
    )


def twelve_squares(config, dtype):
    """The rule of thumb for GPT: V·D + L·(12·D² + 13·D) + 2·D."""
    D = config.hidden_size
    layers = config.num_hidden_layers * (12 * D**2 + 13 * D)
    return in_bytes(config.vocab_size * D + layers + 2 * D, dtype)


def parameters_in_place_of_bytes(config, dtype):
    return (parameters(config),) * 3


def always_four_bytes(config, dtype):
    return in_bytes(parameters(config), torch.float32)


def gradients_in_bfloat16(config, dtype):
    weights, _, optimizer = in_bytes(parameters(config), dtype)
    return weights, weights, optimizer


def both_gradients(config, dtype):
    weights, gradients, optimizer = in_bytes(parameters(config), dtype)
    return weights, gradients + (weights if dtype == torch.bfloat16 else 0), optimizer


def gigabytes(config, dtype):
    return tuple(count / 1e9 for count in in_bytes(parameters(config), dtype))


def no_master_weights(config, dtype):
    weights, gradients, _ = in_bytes(parameters(config), dtype)
    return weights, gradients, 8 * parameters(config)


def master_beside_float32(config, dtype):
    weights, gradients, _ = in_bytes(parameters(config), dtype)
    return weights, gradients, 12 * parameters(config)


def one_moment(config, dtype):
    weights, gradients, optimizer = in_bytes(parameters(config), dtype)
    return weights, gradients, optimizer - 4 * parameters(config)


def all_in_one_number(config, dtype):
    return sum(in_bytes(parameters(config), dtype))


def lets_the_package_count(config, dtype):
    return in_bytes(config.num_parameters(), dtype)


def builds_the_model(config, dtype):
    model = Llama(config, device="meta")
    return in_bytes(sum(param.numel() for param in model.parameters()), dtype)


# ---- 1.4 flops_of(config, batch, sequence) ----


def flops(config, batch, sequence, count=None, heads=None, width=None):
    """Right, but for what is said otherwise."""
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    count = count or parameters(config, tables=1) - norms
    width = width or (heads or config.num_attention_heads) * config.size_of_head
    attention = 6 * config.num_hidden_layers * width * sequence**2 * batch
    return 6 * count * batch * sequence, attention


def six_times_all_parameters(config, batch, sequence):
    return flops(config, batch, sequence, count=parameters(config))


def six_times_all_but_the_norms(config, batch, sequence):
    return flops(config, batch, sequence, count=parameters(config, norms=0, last_norm=0))


def six_times_all_but_the_embedding(config, batch, sequence):
    table = config.vocab_size * config.hidden_size
    return flops(config, batch, sequence, count=parameters(config) - table)


def no_work_for_a_tied_head(config, batch, sequence):
    table = config.vocab_size * config.hidden_size
    matrices = parameters(config, norms=0, last_norm=0)
    return flops(config, batch, sequence, count=matrices - table)


def forward_only(config, batch, sequence):
    return tuple(count // 3 for count in flops(config, batch, sequence))


def backward_only(config, batch, sequence):
    return tuple(2 * count // 3 for count in flops(config, batch, sequence))


def multiplications_only(config, batch, sequence):
    return tuple(count // 2 for count in flops(config, batch, sequence))


def one_sequence(config, batch, sequence):
    return flops(config, 1, sequence)


def attention_of_one_sequence(config, batch, sequence):
    weights, attention = flops(config, batch, sequence)
    return weights, attention / batch


def recomputed(config, batch, sequence):
    return tuple(4 * count // 3 for count in flops(config, batch, sequence))


def attention_in_full(config, batch, sequence):
    weights, attention = flops(config, batch, sequence)
    return weights, 2 * attention


def attention_with_the_diagonal(config, batch, sequence):
    weights, attention = flops(config, batch, sequence)
    return weights, attention * (sequence + 1) / sequence


def scores_of_key_heads(config, batch, sequence):
    return flops(config, batch, sequence, heads=config.num_key_value_heads)


def scores_of_hidden_size(config, batch, sequence):
    return flops(config, batch, sequence, width=config.hidden_size)


def scores_without_the_mix(config, batch, sequence):
    weights, attention = flops(config, batch, sequence)
    return weights, attention // 2


def attention_linear_in_length(config, batch, sequence):
    weights, attention = flops(config, batch, sequence)
    return weights, attention // sequence


def their_sum(config, batch, sequence):
    return sum(flops(config, batch, sequence))


WRONG_ANSWERS = (
    ("1.1", as_many_key_heads_as_query_heads, "Hint: k_proj and v_proj have num_key_value_heads"),
    ("1.1", two_matrices_in_the_feed_forward, "Hint: SwiGLU has three matrices"),
    ("1.1", tied_head_counted_twice, "tie_word_embeddings=True): expected"),
    ("1.1", tied_head_counted_twice, "Hint: a tied head is the embedding"),
    ("1.1", head_forgotten, "Hint: an untied head is a matrix of its own"),
    ("1.1", norms_forgotten, "Hint: the norms have weights too"),
    ("1.1", last_norm_forgotten, "Hint: there is one more norm"),
    ("1.1", head_size_from_hidden_size, "Hint: a head has config.size_of_head numbers"),
    ("1.1", twelve_squares, "weights in float32 of LlamaConfig(vocab_size=13, hidden_size=24"),
    ("1.1", parameters_in_place_of_bytes, "4 times too small. Hint: bytes, not parameters"),
    ("1.1", always_four_bytes, "weights in bfloat16 of"),
    ("1.1", always_four_bytes, "2 times too large. Hint: a number has 2 bytes in bfloat16"),
    ("1.1", gradients_in_bfloat16, "2 times too small. Hint: they are summed in float32"),
    ("1.1", both_gradients, "Hint: a bfloat16 gradient is gone as soon as it is added"),
    ("1.1", gigabytes, "Hint: bytes, not GB"),
    ("1.1", no_master_weights, "optimizer in bfloat16 of"),
    ("1.1", no_master_weights, "and for bfloat16 weights a float32 master"),
    ("1.1", master_beside_float32, "Hint: a float32 weight is its own master"),
    ("1.1", one_moment, "2 times too small. Hint: AdamW keeps two moments"),
    ("1.1", all_in_one_number, "expected 3 numbers, got"),
    ("1.1", lets_the_package_count, "got a use of config.num_parameters"),
    ("1.1", builds_the_model, "expected a calculation from sizes, got a use of config."),
    ("1.1", lambda config, dtype: LlamaConfig().size_of_head, "expected 3 numbers, got 16"),
    ("1.4", six_times_all_parameters, "Hint: the embedding is a look-up, and a norm no matmul"),
    ("1.4", six_times_all_but_the_norms, "Hint: the embedding is a look-up, without arithmetic"),
    ("1.4", six_times_all_but_the_embedding, "Hint: a norm is no matmul"),
    ("1.4", no_work_for_a_tied_head, "Hint: the output head is a matmul, also when it shares"),
    ("1.4", forward_only, "3 times too small. Hint: backward costs twice as much as forward"),
    ("1.4", backward_only, "Hint: a step is forward as well"),
    ("1.4", multiplications_only, "2 times too small. Hint: a matmul of m×k by k×n takes 2·m·k·n"),
    ("1.4", one_sequence, "7 times too small. Hint: that is one sequence"),
    ("1.4", attention_of_one_sequence, "attention, batch 7"),
    ("1.4", attention_of_one_sequence, "Hint: that is one sequence"),
    ("1.4", recomputed, "Hint: nothing is recomputed here"),
    ("1.4", attention_in_full, "2 times too large. Hint: causal: half of the scores are masked"),
    ("1.4", attention_with_the_diagonal, "Hint: by convention causal is half of S²"),
    ("1.4", scores_of_key_heads, "Hint: all query heads have scores"),
    ("1.4", scores_of_hidden_size, "Hint: heads times size_of_head is not always hidden_size"),
    ("1.4", scores_without_the_mix, "2 times too small. Hint: two matmuls"),
    ("1.4", attention_linear_in_length, "16 times too small. Hint: S queries times S keys"),
    ("1.4", their_sum, "expected 2 numbers, got"),
)
