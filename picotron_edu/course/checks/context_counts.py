"""Check of a prediction: what attention of one layer sends, in a ring, gathered, or by heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from picotron_edu.context_parallel import KINDS
from picotron_edu.course.checking import run_on_ranks
from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import assert_close, brief, fail
from picotron_edu.presets import LlamaConfig
from picotron_edu.ranks import world

LLAMA = LlamaConfig.from_preset("llama-3-8b")
HEADS = LLAMA.num_attention_heads, LLAMA.num_key_value_heads, LLAMA.size_of_head
LONG = 1, 131_072, *HEADS  # B, S, H, K, d
SMALL = 2, 16, 8, 4, 2
KIND_OF = {
    "send_recv": "ring",
    "all_gather": "all_gather",
    "reduce_scatter": "all_gather",
    "all_to_all": "ulysses",
}


@cache
def counted(n: int) -> dict[str, float]:
    """Bytes by kind, each run forward and backward on n ranks."""
    B, S, H, K, d = SMALL

    def layer() -> None:
        for attend in KINDS.values():
            q, k, v = (
                torch.randn(B, heads, S // n, d, dtype=torch.bfloat16, requires_grad=True)
                for heads in (H, K, K)
            )
            attend(world(), "zigzag", True, q, k, v).sum().backward()

    bytes_of: Counter[str] = Counter()
    for event in run_on_ranks(layer, n).trace.of(rank=0, lane="comm"):
        bytes_of[KIND_OF[event.name]] += int(event.wire_bytes)
    return dict(bytes_of)


def by_formula(kind: str, n: int, B: int, S: int, H: int, K: int, d: int) -> float:
    kv, q_and_out = (2 * B * heads * S / n * d for heads in (K, H))
    return {
        "ring": 2 * (n - 1) * kv * 2 + n * kv * 4,
        "all_gather": 2 * (n - 1) * kv * 2,
        "ulysses": 2 * (n - 1) / n * (kv + q_and_out) * 2,
    }[kind]


def mistakes(kind: str, n: int, shape: tuple[int, ...]) -> dict[str, float]:
    B, S, H, K, d = shape
    right = by_formula(kind, n, *shape)
    kv, q_and_out = (2 * B * heads * S / n * d for heads in (K, H))
    some = {
        "keys and values have K heads, not H": by_formula(kind, n, B, S, H, H, d),
        "each rank has S/n tokens": n * right,
        "forward only: there is a backward pass": right / 2,
        "bfloat16 has 2 bytes": 2 * right,
    }
    if kind == "ring":
        some |= {
            "gradients of keys and values travel as float32: 4 bytes": (
                2 * (n - 1) * kv * 2 + n * kv * 2
            ),
            "the gradients need one more hop to come home: n, not n − 1": (
                2 * (n - 1) * kv * 2 + (n - 1) * kv * 4
            ),
            "in the last step nobody needs the keys: n − 1 hops": 2 * n * kv * 2 + n * kv * 4,
            "forward only: there is a backward pass": (n - 1) * kv * 2,
            "in backward the keys go round once more, ahead of their gradients": (
                (n - 1) * kv * 2 + n * kv * 4
            ),
        }
    if kind == "ulysses":
        some |= {
            "queries and outputs travel, too": 2 * (n - 1) / n * kv * 2,
            "the output goes back to its tokens: an all-to-all, too": (
                2 * (n - 1) / n * (kv + q_and_out / 2) * 2
            ),
            "an all-to-all sends (n − 1)/n of this rank's part, not n − 1 times it": n * right,
            "a part of (n − 1)/n: what is for this rank stays": right * n / (n - 1),
        }
    return some


@one_thread()
def bytes_of_a_layer(sent: Callable[..., Any], times: Any) -> str:
    if not callable(sent):
        fail(f"expected a function, got {brief(sent)}", "give its name alone, without calling it")
    for kind in KINDS:
        for n in (2, 4):
            assert counted(n)[kind] == by_formula(kind, n, *SMALL)
        for n, shape in ((4, SMALL), (2, SMALL), (8, LONG)):
            assert_close(
                by_formula(kind, n, *shape),
                sent(kind, n, *shape),
                what=f"bytes of {kind} on {n} ranks, B, S, H, K, d = {', '.join(map(str, shape))}",
                mistakes=mistakes(kind, n, shape),
                hint="which tensors, how many heads, how many tokens, how many hops?",
            )
    assert_close(
        15 / 7,  # (4·(n − 1) + 4·n) / (4·(n − 1)): nothing of the shape is left
        times,
        what="times",
        mistakes={
            "that is the forward pass: in backward the ring sends gradients, too": 1.0,
            "the gradients need n hops, not n − 1, to come home": 2.0,
            "in the ring gradients travel as float32": 11 / 7,
            "the ring over the all-gather, not the other way round": 7 / 15,
        },
        hint='divide sent("ring", 8, …) by sent("all_gather", 8, …), for any shape',
        rtol=0.01,
    )
    megabytes = [by_formula(kind, 8, *LONG) / 1e6 for kind in KINDS]
    return "8 ranks: " + ", ".join(f"{kind} {mb:,.0f} MB" for kind, mb in zip(KINDS, megabytes))
