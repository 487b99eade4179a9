"""Check of the merge of two attentions over different keys, a query of each kind at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import assert_close, fail

HEADS, KEYS, SIZE, PARTS = 2, 6, 3, 8
QUERIES = {  # the kinds of queries: a hint for whoever is wrong there first
    "a query with ordinary scores": (
        "each weighs as much as its sum of exponentials: exp(lse) over the sum of both"
    ),
    "scores of 1000": "exp(1000) is inf: only differences of logarithms can be exponents",
    "scores of −1000": "exp(−1000) is 0, and 0/0 is NaN: take the larger logarithm off first",
    "a first block that sees nothing": "its lse is −inf, so its weight is exp(−inf) = 0",
    "a second block that sees nothing": "its lse is −inf, so its weight is exp(−inf) = 0",
    "two blocks that see nothing": "−inf − (−inf) is NaN: out is 0 and lse is −inf",
}


class Part(NamedTuple):
    """Attention over some keys: an output, and the logarithm of its sum of exponentials."""

    out: Tensor
    lse: Tensor


def attention(scores: Tensor, values: Tensor) -> Part:
    """0 and −inf where nothing is seen."""
    return Part(scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1))


def blocks() -> tuple[Part, Part, Part]:
    """For each kind of query: its attention over some keys, over the others, and over all."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(HEADS, len(QUERIES), 2 * KEYS, generator=draw, dtype=torch.float64)
    values = torch.randn(HEADS, 2 * KEYS, SIZE, generator=draw, dtype=torch.float64)
    scores[:, 1] += 1000
    scores[:, 2] -= 1000
    scores[:, 3, :KEYS] = scores[:, 4, KEYS:] = scores[:, 5] = -math.inf
    return (
        attention(scores[..., :KEYS], values[:, :KEYS]),
        attention(scores[..., KEYS:], values[:, KEYS:]),
        attention(scores, values),
    )


def call(merge: Callable[..., Any], first: Part, second: Part) -> Part:
    """`merge` of copies; fails unless it gives two tensors of the right shapes."""
    result = merge(*(x.clone() for x in (*first, *second)))
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        fail(f"expected two tensors, out and lse, got {type(result).__name__}", "return out, lse")
    for name, got, like in zip(("out", "lse"), result, first):
        if not isinstance(got, Tensor) or got.shape != like.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            fail(f"{name}: expected shape {tuple(like.shape)}, got {shape}", "…×d and …")
    return Part(*result)


@one_thread()
def merge_two_attentions(merge: Callable[..., Any]) -> str:
    first, second, both = blocks()
    got = call(merge, first, second)
    for i, (what, hint) in enumerate(QUERIES.items()):
        a, b = (Part(part.out[:, i], part.lse[:, i]) for part in (first, second))
        ratio = (a.lse / (a.lse + b.lse)).nan_to_num(0.5)[:, None]
        assert_close(
            both.out[:, i],
            got.out[:, i],
            what=f"out, {what}",
            mistakes={
                "the mean of two outs: the one with larger scores weighs more": (
                    (a.out + b.out) / 2
                ),
                "each out is divided by its own sum already: multiply that back first": (
                    a.out + b.out
                ),
                "lse is a logarithm: exp(lse) is the weight": ratio * a.out + (1 - ratio) * b.out,
            },
            hint=hint,
            rtol=1e-10,
        )
        assert_close(
            both.lse[:, i],
            got.lse[:, i],
            what=f"lse, {what}",
            mistakes={
                "sums of exponentials are added, not their logarithms": a.lse + b.lse,
                "the larger logarithm alone: the other's sum is missing": (
                    torch.maximum(a.lse, b.lse)
                ),
                "that is the first lse: out is complete, and its lse must be, too": a.lse,
            },
            hint="ln(exp(lse) + exp(more_lse)), without an overflow",
            rtol=1e-10,
        )
    assert_float32(merge)
    return "attention over all keys, from two halves that never met"


def assert_float32(merge: Callable[..., Any]) -> None:
    """Eight blocks in bfloat16, merged one after the other, are rounded no more than they were."""
    draw = torch.Generator().manual_seed(1)
    outs = torch.randn(PARTS, HEADS, 4, SIZE, generator=draw).bfloat16()
    lses = torch.randn(PARTS, HEADS, 4, generator=draw)
    so_far = Part(outs[0], lses[0])
    for out, lse in zip(outs[1:], lses[1:]):
        so_far = call(merge, so_far, Part(out, lse))
    for name, x in zip(("out", "lse"), so_far):
        if x.dtype != torch.float32:
            fail(
                f"out in bfloat16, lse in float32: expected {name} in float32, got {x.dtype}",
                "it is merged at every step of the ring: a rounding at each would add up",
            )
    weights = lses.double().softmax(0)[..., None]
    assert_close(
        (weights * outs.double()).sum(0),
        so_far.out,
        what="eight blocks in bfloat16",
        hint="multiply and add in float32: a bfloat16 weight has three digits",
        rtol=1e-4,
        atol=1e-6,
    )
