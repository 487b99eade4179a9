"""Check of three planted faults: labels at a border, positions of a rank, keys out of date."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_edu.course.checks.ringing import LENGTH, SIZE, cut, whole_sequence
from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    brief,
    fail,
    run_each,
)
from picotron_edu.ranks import Axis

Answer = Callable[..., Any]
LAST_HOP = "those are of the right neighbour's keys: one more hop, and they are home"
FREQUENCY = torch.tensor([1.0, 0.25, 0.01], dtype=torch.float64)


def positions(rank: int, n: int, length: int) -> Tensor:
    chunks = torch.arange(length).view(2 * n, -1)
    return chunks[[rank, 2 * n - 1 - rank]].flatten()


@one_thread()
def find_the_bugs(cut_text: Answer, angles: Answer, ring_backward: Answer) -> str:
    for n in (2, 4):
        check_labels(cut_text, n)
        check_angles(angles, n)
        check_gradients(ring_backward, n)
    return "the right labels, the right places, and keys that are up to date"


def check_labels(cut_text: Answer, n: int) -> None:
    length = 4 * n
    tokens = torch.arange(length) + 10  # so that no token is its own place
    labels = F.pad(tokens[1:], (0, 1), value=-100)

    def on_rank(tokens: Tensor, axis: Axis) -> Tensor:
        result = cut_text(tokens, axis)
        if not (isinstance(result, tuple) and len(result) == 2):
            fail(f"cut_text: expected inputs and labels, got {brief(result)}", "two tensors")
        if any(not isinstance(x, Tensor) or x.shape != (4,) for x in result):
            fail(f"cut_text: expected 4 inputs and 4 labels, got {brief(list(result))}")
        return torch.stack(result)

    run = run_each(on_rank, [(tokens,)] * n)
    for rank in range(n):
        here = positions(rank, n, length)
        shifted_here = F.pad(tokens[here][1:], (0, 1), value=-100)
        inputs, got = run[rank]
        what = f"on {n} ranks"
        assert_close(
            tokens[here], inputs, rank=rank, what=f"inputs {what}", hint="in zig-zag order"
        )
        assert_close(
            labels[here],
            got,
            rank=rank,
            what=f"labels {what}",
            mistakes={
                "neighbours in this rank's part are not neighbours in the text": shifted_here,
                "the last token of the text has no label: −100": tokens.roll(-1)[here],
                "a label lost at each border of two chunks": torch.where(
                    (here + 1) % 2 == 0, -100, labels[here]
                ),
            },
            hint="the token after it in the whole text",
        )
    if n == 2:
        assert_keeps_to_axis(on_rank, [(tokens,)] * n, run)


def check_angles(angles: Answer, n: int) -> None:
    length = 4 * n

    def on_rank(frequency: Tensor, axis: Axis) -> Tensor:
        return angles(length, axis, frequency)

    run = run_each(on_rank, [(FREQUENCY,)] * n)
    for rank in reversed(range(n)):  # rank 0 begins at 0 in any order
        first = rank * length // n
        assert_close(
            positions(rank, n, length)[:, None] * FREQUENCY,
            run[rank],
            rank=rank,
            what=f"angles on {n} ranks",
            mistakes={
                "these are positions 0, 1, 2, …: where in the text do this rank's tokens stand?": (
                    torch.arange(length // n)[:, None] * FREQUENCY
                ),
                "that is the contiguous order; the tokens are in zig-zag order": (
                    torch.arange(first, first + length // n)[:, None] * FREQUENCY
                ),
            },
            hint="position in the whole text × frequency",
        )
    if n == 2:
        assert_keeps_to_axis(on_rank, [(FREQUENCY,)] * n, run)


def gradients_of_block(
    do: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, diagonal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block of keys adds to dq, dk and dv; lse and delta are those over all keys."""
    s = q @ k.mT / math.sqrt(SIZE)
    if diagonal:
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
    p = (s - lse).exp()
    ds = p * (do @ v.mT - delta) / math.sqrt(SIZE)
    return ds @ k, ds.mT @ q, p.mT @ do


def with_own_keys(rank: int, inputs: list[Any], gradients: Sequence[Answer]) -> list[Tensor]:
    """dq, dk, dv of a rank if every rank computes with its own keys in all steps."""

    def block(i: int, owner: int) -> tuple[Tensor, Tensor, Tensor]:
        q, (k, v) = inputs[i]
        return gradients[i](q, k, v, owner == i)

    dq = sum((block(rank, owner)[0] for owner in range(rank)), block(rank, rank)[0])
    dkv = sum(
        (torch.stack(block(i, rank)[1:]) for i in range(rank + 1, len(inputs))),
        torch.stack(block(rank, rank)[1:]),
    )
    return [dq, *dkv]


def check_gradients(ring_backward: Answer, n: int) -> None:
    leaves = [x.requires_grad_() for x in whole_sequence(n)]
    q, kv = leaves
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out = F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=True)
    out.backward(do)
    assert q.grad is not None and kv.grad is not None
    with torch.no_grad():
        future = torch.ones(n * LENGTH, n * LENGTH).triu(1).bool()
        scores = (q @ kv[0].mT / math.sqrt(SIZE)).masked_fill(future, -math.inf)
        lse, delta = scores.logsumexp(-1, keepdim=True), (do * out).sum(-1, keepdim=True)
    parts = zip(do.chunk(n, 1), lse.chunk(n, 1), delta.chunk(n, 1), strict=True)
    gradients = [partial(gradients_of_block, *part) for part in parts]

    def on_rank(q: Tensor, kv: Tensor, axis: Axis) -> Tensor:
        result = ring_backward(q, kv, axis, gradients[axis.index])
        if not (isinstance(result, tuple) and len(result) == 2):
            fail(f"ring_backward: expected dq and dkv, got {brief(result)}", "two tensors")
        dq, dkv = result
        return torch.cat([dq[None], dkv])

    inputs = cut(n)
    run = run_each(on_rank, inputs, "every rank sends as often as it receives")
    for rank in range(n):
        right = torch.cat([q.grad[None], kv.grad]).chunk(n, 2)[rank]
        wrong = with_own_keys(rank, inputs, gradients)
        of_neighbour = [q.grad, *kv.grad.chunk(n, 2)[(rank + 1) % n]]
        for i, what in enumerate(("dq", "dk", "dv")):
            assert_close(
                right[i],
                run[rank][i],
                rank=rank,
                what=f"{what} on {n} ranks",
                mistakes={"own keys in every step: which ones have come?": wrong[i]}
                | ({LAST_HOP: of_neighbour[i]} if i else {}),
                hint="in step s these must be the keys of rank (i − s) % n",
                rtol=1e-9,
            )
    assert_messages(
        run,
        {"send_recv": 2 * n - 1},
        wire_bytes=(2 * n - 1) * inputs[0][1].nbytes,
        hint="n − 1 hops of keys, and n of their gradients: the last one brings them home",
    )
    if n == 2:
        assert_keeps_to_axis(on_rank, inputs, run)
