"""Checks of predictions: what sequence parallelism leaves whole, and how many messages it sends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from picotron_edu import recompute, sequence_parallel, tensor_parallel
from picotron_edu.course.checking import run_on_ranks
from picotron_edu.course.comparing import assert_close, fail
from picotron_edu.memory import Kept, activations, measured_activation_bytes
from picotron_edu.model import Llama
from picotron_edu.presets import LlamaConfig
from picotron_edu.ranks import all_reduce, wire_bytes, world

LLAMA = LlamaConfig.from_preset("llama-3-8b")
TOKENS, TP = 8192, 8
OF_LLAMA: dict[str, Any] = {"dtype": torch.bfloat16, "gpu": True}
NAMES = {kept.name for kept in activations(LLAMA, 1, TOKENS, **OF_LLAMA)}


@cache
def counted(layers: int) -> tuple[int, int, int]:
    """Large messages in forward, in backward, and in backward with full recomputation, of a real
    model of so many layers; what it keeps must be what the formula says.
    """
    shape = LlamaConfig.from_preset("tiny", hidden_size=32, num_hidden_layers=layers)

    def step() -> int:
        tokens_BS = torch.zeros(1, 8, dtype=torch.int64)
        for policy in ("none", "full"):
            model = Llama(shape)
            sequence_parallel.apply(model, world())
            recompute.apply(model, policy)
            all_reduce(torch.zeros(1), world())  # a mark before each part
            loss, _ = model(tokens_BS, None, tokens_BS)
            all_reduce(torch.zeros(1), world())
            loss.backward()
        model = Llama(shape)
        sequence_parallel.apply(model, world())
        all_reduce(torch.zeros(1), world())
        return measured_activation_bytes(model, lambda: model(tokens_BS, None, tokens_BS + 0)[0])

    run = run_on_ranks(step, 2)
    formula = sum(k.total for k in sequence_parallel.rank_activations(shape, 2, 1, 8))
    assert run[0] == formula + 3 * 8 - 4  # 3 masks a token, and no weight of the labels
    parts: list[int] = []
    for event in run.trace.of(rank=0, lane="comm"):
        if event.payload_bytes == 4:
            parts.append(0)
        else:
            parts[-1] += event.payload_bytes == 8 * 32 * 4
    return parts[0], parts[1], parts[3]


def messages_of_llama(forward: Any, backward: Any, recomputed: Any, gigabytes: Any) -> str:
    L = LLAMA.num_hidden_layers
    right = [a + (b - a) * (L - 1) for a, b in zip(counted(1), counted(2))]  # a straight line
    ends = "think of the two ends: the embedding scatters, the head gathers"
    assert_close(
        right[0],
        forward,
        what="large messages in forward",
        mistakes={
            ends: 4 * L,
            "an all-reduce is two messages here": 2 * L + 1,
            "the head's output stays cut: one at each end": 4 * L + 1,
        },
        hint="two gathers and two scatters a layer; and before and behind them?",
    )
    assert_close(
        right[1],
        backward,
        what="large messages in backward",
        mistakes={
            "x is gathered once more for the weight gradients": 4 * L + 2,
            ends + ", and gathers again": 6 * L,
            "the head gathers x again, too": 6 * L + 2,
            "x is gathered again where columns begin, twice a layer": 8 * L + 3,
        },
        hint="a transpose for each message of forward, and x once more where columns begin",
    )
    assert_close(
        right[2],
        recomputed,
        what="large messages in backward with full recomputation",
        mistakes={
            "the second run stops before the last reduce-scatter": right[1] + 4 * L,
            "the blocks run once more, and their messages with them": right[1],
            "only the blocks run once more, not the ends": right[1] + 4 * L + 2,
            "the weight gradients still gather x, after the second run has": right[1] + L,
        },
        hint="what backward sends, and three of a block's four messages of forward",
    )
    large = TOKENS * LLAMA.hidden_size * 2
    sent = wire_bytes("all_gather", (right[0] + right[1]) * large, TP) / 1e9
    assert_close(
        sent,
        gigabytes,
        what="GB sent by each GPU",
        hints={
            2: "an all-gather or reduce-scatter sends (n − 1)/n of its tensor; 2(n − 1)/n is both",
            8 / 7: "(n − 1)/n: each rank has its own piece already",
            1e9: "GB, not bytes",
            right[0] / (right[0] + right[1]): "both passes",
        },
        hint="messages · (n − 1)/n · tokens · hidden size · 2 bytes",
        rtol=0.01,
    )
    share = 2 * right[0] / (right[0] + right[1])  # its all-reduces are two messages each
    messages = f"{right[0] + right[1]} messages of {large / 1e6:.0f} MB"
    return f"{messages}; tensor parallelism alone sends {share:.0%} of these bytes"


def activations_of_a_layer(whole: Any, layer_bytes: Callable[..., Any]) -> str:
    counted(1)  # the formulas below are those of a real model
    on_one = {k.name: k.total for k in activations(LLAMA, 1, TOKENS, **OF_LLAMA)}
    on_eight = sequence_parallel.rank_activations(LLAMA, TP, 1, TOKENS, **OF_LLAMA)
    asked = {"attention log-sum-exp", "weight of the labels"}  # those are not in the list
    right = {k.name for k in on_eight if k.total == on_one[k.name]} - asked
    if not isinstance(whole, set | frozenset | list | tuple):
        fail(f"whole: expected a set of names, got {whole!r}", "whole = {…, …}")
    unknown = sorted(set(whole) - NAMES)
    if unknown:
        fail(
            f"whole: expected names of the list, got {unknown[0]!r}", "write it as it stands there"
        )
    why = {
        "norm input": "a norm sees this rank's positions only",
        "norm scale": "a norm sees this rank's positions only",
        "norm output": "x is gathered again in backward: kept is this rank's piece",
        "log-probabilities": "each rank has a part of the vocabulary",
        "labels": "the head reads all positions, on every rank",
        "token numbers": "the embedding is cut by vocabulary: every rank looks at every token",
        "cosine and sine of the positions": "attention reads all positions, on every rank",
    }
    wrong = sorted(set(whole) ^ right)
    if wrong:
        found = "whole" if wrong[0] in whole else "cut"
        should = "cut" if wrong[0] in whole else "whole"
        hint = why.get(wrong[0], "each rank has some of the heads or channels")
        fail(f"{wrong[0]}: expected it to be {should}, got {found}", hint)

    def layer(n: int, regather: bool = True, table: list[Kept] | None = None) -> int:
        kept = table or sequence_parallel.rank_activations(
            LLAMA, n, 1, TOKENS, regather=regather, **OF_LLAMA
        )
        most = LLAMA.num_hidden_layers
        once = {"norm input", "norm scale", "norm output"}  # the last norm has one, too
        in_layers = [(k.count - (k.name in once), k.bytes) for k in kept if k.count >= most]
        return sum(count // most * each for count, each in in_layers)

    kv = 2 * 2 * LLAMA.num_key_value_heads * LLAMA.size_of_head
    for regather in (True, False):
        for n in (1, 2, 4, 8, 16):
            thin = tensor_parallel.rank_shape(LLAMA, n)
            by_tensor = layer(n, table=activations(thin, 1, TOKENS, **OF_LLAMA))
            best = layer(n, regather)
            assert_close(
                best,
                layer_bytes(n, regather),
                what=f"bytes of a layer on each of {n} ranks, regather={regather}",
                mistakes={
                    "with more ranks than key heads each rank keeps a whole one": (
                        best - TOKENS * (kv // 8 - kv / n)
                    ),
                    "the norms are cut now, too: each rank has some positions": by_tensor,
                    "a gathered x that is kept is whole: the norms' outputs": layer(n),
                    "x is gathered again, not kept: the norms' outputs are cut, too": (
                        layer(n, False)
                    ),
                    "the norms of this course keep a float32 scale a token": (
                        best - TOKENS * 8 // n
                    ),
                },
                hints={1 / TOKENS: "for all 8192 tokens", 1 / 2: "bfloat16 has 2 bytes"},
                hint="which tensors have all positions, and which all channels?",
            )
    again, kept = layer(1) / layer(TP), layer(1) / layer(TP, False)
    return f"a layer keeps 1/{again:.2g} of it on 8 ranks, and 1/{kept:.2g} if gathered x stay"
