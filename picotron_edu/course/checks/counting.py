"""Checks of answers that count a Llama's memory and FLOPs.

The right numbers come from a model that is built and makes a step. The wrong ones that people get
are computed beside them, each under the hint that helps, so that a check can name the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from picotron_edu.course.checks.small_models import SMALL, make_batch, one_thread
from picotron_edu.course.comparing import assert_close, brief, fail
from picotron_edu.flops import matmul_parameters, model_flops
from picotron_edu.layout import describe
from picotron_edu.model import Llama, LlamaConfig, token_loss_sum
from picotron_edu.optim import AdamW, grad_of, keep_main_grads

SHAPES = (  # one trap more each time, so that the first mistake is met alone
    SMALL,
    replace(SMALL, num_key_value_heads=1),
    replace(SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    replace(SMALL, num_key_value_heads=2, head_dim=10),
)
SIZES = ("size_of_head", "tie_word_embeddings", *(f.name for f in fields(LlamaConfig)[:7]))


class SizesOnly:
    """A configuration that tells its sizes, and will not count parameters or build a model."""

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name not in SIZES:
            fail(
                f"expected a calculation from sizes, got a use of config.{name}",
                "all it takes are the numbers of layers and heads, hidden_size, size_of_head, "
                "intermediate_size, vocab_size, tie_word_embeddings",
            )
        return getattr(self._config, name)


def in_words(config: LlamaConfig) -> str:
    """LlamaConfig(…) with what differs from its defaults, for the learner to copy."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    changed = (f"{f.name}={values[f.name]}" for f in fields(config) if values[f.name] != f.default)
    return f"LlamaConfig({', '.join(changed)})"


def real_bytes(config: LlamaConfig, dtype: torch.dtype) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of a model that is built and makes a step."""
    model, batch = Llama(config, dtype=dtype), make_batch(6, seed=0)
    describe(model)
    keep_main_grads(model)
    optimizer = AdamW(model.named_parameters())
    token_loss_sum(model(batch.inputs_BS), batch.labels_BS)[0].backward()
    optimizer.step()
    grads = [grad for param in model.parameters() if (grad := grad_of(param)) is not None]
    weights = sum(param.nbytes for param in model.parameters())
    return weights, sum(grad.nbytes for grad in grads), optimizer.state_bytes()


def miscounted_parameters(config: LlamaConfig) -> dict[str, int]:
    D, L, N = config.hidden_size, config.num_hidden_layers, config.num_parameters()

    def changed(**change: Any) -> int:
        return replace(config, **change).num_parameters()

    return {
        "k_proj and v_proj have num_key_value_heads heads": changed(
            num_key_value_heads=config.num_attention_heads
        ),
        "a tied head is the embedding: one matrix, counted once": changed(
            tie_word_embeddings=False
        ),
        "an untied head is a matrix of its own, as large as the embedding": changed(
            tie_word_embeddings=True
        ),
        "a head has config.size_of_head numbers, not always hidden_size / heads": changed(
            head_dim=None
        ),
        "SwiGLU has three matrices: gate, up, down": N - L * D * config.intermediate_size,
        "the norms have weights too: two in a layer and a last one": N - (2 * L + 1) * D,
        "there is one more norm, after the last layer": N - D,
        "each layer has two norms": N - L * D,
    }


def real_flops(config: LlamaConfig, batch: int, sequence: int) -> tuple[int, int]:
    """What torch counts in the matmuls of a real step: weights, and causal attention."""
    model = Llama(config, device="meta")
    tokens_BS = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        token_loss_sum(model(tokens_BS), tokens_BS)[0].backward()
    by_operation = counter.get_flop_counts()["Global"]
    attention = by_operation.pop(torch.ops.aten.bmm)
    return sum(by_operation.values()), attention // 2  # unfused: it computed the masked half too


def miscounted_matmul_parameters(config: LlamaConfig) -> dict[str, int]:
    """Weights that a token is multiplied with."""
    N, norms = matmul_parameters(config), (2 * config.num_hidden_layers + 1) * config.hidden_size
    table = config.hidden_size * config.vocab_size
    every_head = replace(config, num_key_value_heads=config.num_attention_heads)
    return {
        "the embedding is a look-up, and a norm no matmul: neither counts": N + table + norms,
        "the embedding is a look-up, without arithmetic": N + table,
        "a norm is no matmul": N + norms,
        "the output head is a matmul, also when it shares its weights": N - table,
        "the output head is a matmul, a norm is none": N - table + norms,
        "k_proj and v_proj have num_key_value_heads heads": matmul_parameters(every_head),
        "a head has config.size_of_head numbers, not always hidden_size / heads": (
            matmul_parameters(replace(config, head_dim=None))
        ),
        "SwiGLU has three matrices: gate, up, down": (
            N - config.num_hidden_layers * config.hidden_size * config.intermediate_size
        ),
    }


def miscounted_attention(config: LlamaConfig, batch: int, sequence: int) -> dict[str, float]:
    H, K, Hd = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_attention_heads * config.size_of_head,
    )
    right = 6 * config.num_hidden_layers * Hd * sequence**2 * batch
    return {
        "all query heads have scores: sharing keys saves projections, no scores": right * K / H,
        "heads times size_of_head is not always hidden_size": right * config.hidden_size / Hd,
        "by convention causal is half of S², not S·(S + 1)/2": right * (sequence + 1) / sequence,
    }


def numbers_from(names: Sequence[str], answer: Callable[..., Any], *args: Any) -> Sequence[float]:
    """What the answer returns, if it is as many numbers as there are names."""
    result = answer(*args)
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        fail(f"expected {len(names)} numbers, got {brief(result)}", f"return {', '.join(names)}")
    return result


@one_thread()
def memory_of_a_model(memory_of: Callable[..., Any]) -> str:
    names = ("weights", "gradients", "optimizer")
    hints: Sequence[Mapping[float, str]] = (
        {
            1 / 4: "bytes, not parameters",
            1 / 2: "a number has 2 bytes in bfloat16, 4 in float32",
            2: "a number has 2 bytes in bfloat16, 4 in float32",
            1e-9: "bytes, not GB",
        },
        {
            1 / 2: "they are summed in float32: in bfloat16 256 + 1 is 256",
            3 / 2: "a bfloat16 gradient is gone as soon as it is added to the float32 one",
        },
        {
            1 / 2: "AdamW keeps two moments of each gradient",
            3 / 2: "a float32 weight is its own master: no copy is kept",
            2 / 3: "two float32 moments, 8 bytes, and for bfloat16 weights a float32 master, 4",
            1 / 3: "two moments and a master weight, each in float32",
        },
    )
    for config in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            said = numbers_from(names, memory_of, SizesOnly(config), dtype)
            for i, real in enumerate(real_bytes(config, dtype)):
                each = real // config.num_parameters()
                wrong = miscounted_parameters(config)
                assert_close(
                    real,
                    said[i],
                    what=f"{names[i]} in {str(dtype)[6:]} of {in_words(config)}",
                    mistakes={hint: each * count for hint, count in wrong.items()},
                    hints=hints[i],
                    hint="count one layer's weights with a pencil, norms included",
                    rtol=0,
                )
    for preset in ("llama-2-7b", "llama-3-8b", "llama-3.2-1b"):
        config = LlamaConfig.from_preset(preset)
        said = numbers_from(names, memory_of, SizesOnly(config), torch.bfloat16)
        assert_close(18 * config.num_parameters(), sum(said), what=f"all of {preset}", rtol=0)
    return "to the byte: Llama-3-8B takes 144.5 GB before it reads its first token"


def flops_of_a_step(flops_of: Callable[..., Any]) -> str:
    B, S, names = 7, 16, ("weights", "attention")
    common = {
        1 / 3: "backward costs twice as much as forward, for two gradients; a step is both",
        2 / 3: "a step is forward as well",
        4 / 3: "nothing is recomputed here: forward once, backward twice that",
        1 / B: "that is one sequence: the step has `batch` of them",
        1 / SMALL.num_hidden_layers: "that is one layer",
    }
    hints = (
        common
        | {
            1 / 2: "a matmul of m×k by k×n takes 2·m·k·n: multiplications and additions",
            1 / (B * S): "that is one token: the step has batch · sequence of them",
        },
        common
        | {
            2: "causal: half of the scores are masked",
            1 / 2: "two matmuls, the scores and the mix, of 2·S²·d each; causal takes half once",
            1 / S: "S queries times S keys",
        },
    )
    for config in SHAPES:
        said = numbers_from(names, flops_of, SizesOnly(config), B, S)
        wrong_weights = {
            hint: 6 * B * S * count for hint, count in miscounted_matmul_parameters(config).items()
        }
        mistakes = (wrong_weights, miscounted_attention(config, B, S))
        for i, real in enumerate(real_flops(config, B, S)):
            assert_close(
                real,
                said[i],
                what=f"{names[i]}, batch {B}, sequence {S}, {in_words(config)}",
                mistakes=mistakes[i],
                hints=hints[i],
                hint=("6 for each weight and token", "two matmuls: scores, and their mix of v")[i],
                rtol=0,
            )
    llama = LlamaConfig.from_preset("llama-2-7b")
    published, said = model_flops(llama, 4, 8192), flops_of(SizesOnly(llama), 4, 8192)
    assert_close(published.weights, said[0], what="weights of Llama-2-7B", rtol=1e-9)
    assert_close(published.attention, said[1], what="attention of Llama-2-7B", rtol=1e-9)
    return "as torch counts: Llama-2-7B, 4 x 8192 tokens, takes 1299.0 + 211.1 TFLOP"
