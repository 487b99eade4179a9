"""Checks of predictions: how many messages tensor parallelism sends, and what it leaves whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from picotron_edu import tensor_parallel
from picotron_edu.course.checking import run_on_ranks
from picotron_edu.course.comparing import assert_close
from picotron_edu.memory import activations
from picotron_edu.model import Llama
from picotron_edu.presets import LlamaConfig
from picotron_edu.ranks import all_reduce, wire_bytes, world

LLAMA = LlamaConfig.from_preset("llama-3-8b")
TOKENS, TP = 8192, 8


@cache
def counted(layers: int) -> tuple[int, int]:
    """Large all-reduces in forward and in backward of a real model of so many layers."""

    def step() -> None:
        model = Llama(LlamaConfig.from_preset("tiny", hidden_size=32, num_hidden_layers=layers))
        tensor_parallel.apply(model, world())
        tokens_BS = torch.zeros(1, 8, dtype=torch.int64)
        loss, _ = model(tokens_BS, None, tokens_BS)
        all_reduce(torch.zeros(1), world())  # a mark between the two
        loss.backward()

    events = list(run_on_ranks(step, 2).trace.of(rank=0, name="all_reduce"))
    mark = next(i for i, event in enumerate(events) if event.payload_bytes == 4)
    large = [event.payload_bytes == 8 * 32 * 4 for event in events]
    return sum(large[:mark]), sum(large[mark:])


def messages_of_llama(forward: Any, backward: Any, unshared: Any, gigabytes: Any) -> str:
    L = LLAMA.num_hidden_layers
    one, two = counted(1), counted(2)
    right = [a + (b - a) * (L - 1) for a, b in zip(one, two)]  # a straight line through the counts
    embedding = "the embedding sums over the ranks, too"
    head = "the head is a linear cut by columns: its input needs one"
    assert_close(
        right[0],
        forward,
        what="large all-reduces in forward",
        mistakes={embedding: 2 * L, "the head's output stays cut: no sum": 2 * L + 2},
        hint="one behind attention, one behind the feed-forward, in each layer; and before them?",
    )
    assert_close(
        right[1],
        backward,
        what="large all-reduces in backward",
        mistakes={
            head: 2 * L,
            "q, k and v share one, gate and up share one": 5 * L + 1,
            "tokens have no gradient: the embedding needs none in backward": 2 * L + 2,
        },
        hint="where does a whole x enter linears that are cut by columns?",
    )
    assert_close(
        5 * L + 1,
        unshared,
        what="large all-reduces in backward, one for each linear",
        mistakes={head: 5 * L, "q, k, v, gate and up: five a layer": 3 * L + 1},
        hint="one for each linear cut by columns, and the head is one",
    )
    large = TOKENS * LLAMA.hidden_size * 2
    sent = wire_bytes("all_reduce", sum(right) * large, TP) / 1e9
    assert_close(
        sent,
        gigabytes,
        what="GB sent by each GPU",
        hints={
            1 / 2: "both passes; and an all-reduce sends 2(n − 1)/n of its tensor",
            8 / 7: "2(n − 1)/n: each rank has its own piece already",
            4 / 7: "2(n − 1)/n times B·S·D·2 bytes for each message",
            2: "bfloat16 has 2 bytes",
            1e9: "GB, not bytes",
        },
        hint="messages · 2(n − 1)/n · tokens · hidden size · 2 bytes",
        rtol=0.01,
    )
    return f"{sum(right)} messages of {large / 1e6:.0f} MB in place of {right[0] + 5 * L + 1}"


def activations_of_a_layer(layer_bytes: Callable[..., Any], share: Any) -> str:
    def layer(n: int, tokens: int = TOKENS) -> int:
        shape = tensor_parallel.rank_shape(LLAMA, n)
        kept = activations(shape, 1, tokens, torch.bfloat16, gpu=True)
        most = LLAMA.num_hidden_layers
        once = {"norm input", "norm scale", "norm output"}  # the last norm has one, too
        in_layers = [(k.count - (k.name in once), k.bytes) for k in kept if k.count >= most]
        return sum(count // most * each for count, each in in_layers)

    D, F = LLAMA.hidden_size, LLAMA.intermediate_size
    whole = 4 * 2 * D + 2 * 4  # two norms: input and output in 2 bytes, a scale in 4
    for n in (1, 2, 4, 8, 16):
        right = layer(n)
        kv = 2 * 2 * LLAMA.num_key_value_heads * LLAMA.size_of_head
        mistakes = {
            "the norms' inputs and outputs are whole on every rank": layer(1) / n,
            "with more ranks than key heads each rank keeps a whole one": (
                right - TOKENS * (kv // 8 - kv / n)
            ),
            "four tensors of the feed-forward size": right - TOKENS * 2 * F / n,
            "the norms of this course keep a float32 scale a token": right - TOKENS * 8,
        }
        assert_close(
            right,
            layer_bytes(n),
            what=f"bytes of a layer on each of {n} ranks",
            mistakes=mistakes,
            hints={1 / TOKENS: "for all 8192 tokens", 1 / 2: "bfloat16 has 2 bytes"},
            hint="which of the tensors are as wide as D, and which as the heads or F?",
        )
    assert_close(
        100 * TOKENS * whole / layer(TP),
        share,
        what=f"percent of a layer that is whole, tp = {TP}",
        hints={
            0.01: "in percent",
            layer(TP) / layer(1): "of what a rank of 8 keeps, not of one rank's layer",
        },
        hint="the norms' part, over what layer_bytes(8) says",
        rtol=0.02,
    )
    return f"tp = {TP} keeps {layer(TP) / layer(1):.1%} of a layer's bytes, not {1 / TP:.1%}"
