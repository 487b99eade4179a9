"""Check of a ring of keys and values: what comes out, what is sent, and what runs beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    fail,
    run_each,
)
from picotron_edu.ranks import Axis, Run, span

HEADS, LENGTH, SIZE = 2, 3, 4  # LENGTH: tokens a rank


def attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q over one block of keys, and the log of its sum of exponentials.

    diagonal: q and k are the same tokens; each sees itself and those before it.
    """
    with span("attend"):
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if diagonal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1)


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over both sets of keys."""
    both = torch.logaddexp(lse, more_lse)
    safe = both.masked_fill(both == -math.inf, 0)
    out = (lse - safe).exp()[..., None] * out + (more_lse - safe).exp()[..., None] * more_out
    return out, both


def whole_sequence(n: int) -> tuple[Tensor, Tensor]:
    """q and kv of n ranks' tokens, one behind the other."""
    draw = torch.Generator().manual_seed(n)
    shape = 3, HEADS, n * LENGTH, SIZE
    q, k, v = torch.randn(shape, generator=draw, dtype=torch.float64) * 2
    return q, torch.stack([k, v])


def cut(n: int) -> list[tuple[Tensor, Tensor]]:
    """Each rank's q and kv."""
    q, kv = whole_sequence(n)
    parts = zip(q.chunk(n, 1), kv.chunk(n, 2), strict=True)
    return [(q_part.clone(), kv_part.clone()) for q_part, kv_part in parts]


def by_blocks(rank: int, blocks: list[tuple[int, bool]], n: int) -> Tensor:
    """What a rank gets if it merges these blocks, (whose keys, diagonal), in this order."""
    pieces, so_far = cut(n), None
    for owner, diagonal in blocks:
        k, v = pieces[owner][1]
        more = attend(pieces[rank][0], k, v, diagonal)
        so_far = merge(*so_far, *more) if so_far else more
    assert so_far
    return so_far[0]


def mistakes(rank: int, n: int) -> dict[str, Tensor]:
    owners = [(rank - step) % n for step in range(n)]
    seen = [owner for owner in owners if owner <= rank]
    return {
        "every key is seen: those of later ranks are in the future": (
            by_blocks(rank, [(j, j == rank) for j in owners], n)
        ),
        "without a mask a query sees what comes after it: diagonal where owner is the rank": (
            by_blocks(rank, [(j, False) for j in seen], n)
        ),
        "keys of earlier ranks are seen by every query: no mask there": (
            by_blocks(rank, [(j, True) for j in seen], n)
        ),
        "these are this rank's own keys each time: take what wait() returns": (
            by_blocks(rank, [(rank, j == rank) for j in seen], n)
        ),
        "own keys, masked, each time: take what wait() returns": (
            by_blocks(rank, [(rank, True) for _ in seen], n)
        ),
        "only this rank's own keys are there": by_blocks(rank, [(rank, True)], n),
        "only the last block is there: merge it with those before": (
            by_blocks(rank, [(seen[-1], seen[-1] == rank)], n)
        ),
        "in step s the keys are those of rank (i − s) % n: is your owner one step ahead?": (
            by_blocks(
                rank,
                [(j, (j - 1) % n == rank) for j in owners if (j - 1) % n <= rank],
                n,
            )
        ),
        "keys come from the left: in step s they are those of rank (i − s) % n": (
            by_blocks(
                rank,
                [((rank - step) % n, step == 0) for step in range(n) if (rank + step) % n <= rank],
                n,
            )
        ),
    }


@one_thread()
def attention_in_a_ring(ring: Callable[..., Any]) -> str:
    def on_rank(q: Tensor, kv: Tensor, axis: Axis) -> Tensor:
        return ring(q, kv, axis, attend, merge)

    for n in (2, 4):
        q, (k, v) = whole_sequence(n)
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        inputs = cut(n)
        run = run_each(on_rank, inputs, "n − 1 messages on every rank, also where nothing is seen")
        for rank in range(n):
            assert_close(
                right.chunk(n, 1)[rank],
                run[rank],
                rank=rank,
                what=f"out on {n} ranks",
                mistakes=mistakes(rank, n),
                hint="own keys with diagonal=True, those of earlier ranks without, later ones not",
                rtol=1e-9,
            )
        assert_messages(
            run,
            {"send_recv": n - 1},
            wire_bytes=(n - 1) * inputs[0][1].nbytes,
            hints={
                "all_gather": "a ring: no rank has all keys at one time",
                "send": "send_recv, so that no order of ranks can deadlock",
                0.5: "keys and values both travel",
                2.0: "is something sent that nobody needs?",
            },
            hint="in the last step nobody needs the keys any more: n − 1 hops, not n",
        )
        assert_computes_beside_messages(run)
        if n == 2:
            assert_keeps_to_axis(on_rank, inputs, run)
    return "n − 1 hops, each beside a computation, and nothing computed that is masked"


def assert_computes_beside_messages(run: Run) -> None:
    """Rank i attends i + 1 times; each time a message is under way, unless all have come."""
    n = run.world_size
    for rank in range(n):
        computing = run.trace.of(rank=rank, lane="compute")
        attended = [event for event in computing if event.name == "attend"]
        messages = run.trace.of(rank=rank, lane="comm")
        if len(attended) != rank + 1:
            fail(
                f"right, but expected attend {rank + 1}×, got it {len(attended)}× on rank "
                f"{rank} of {n}",
                "keys of later ranks are masked as a whole: pass them on, compute nothing",
            )
        over = [call for call in attended if all(m.end < call.start for m in messages)]
        for call in attended:
            beside = any(m.start < call.start and call.end < m.end for m in messages)
            if not (beside or over == [call]):  # in the last step nothing is left to be sent
                late = any(call.end < m.start for m in messages)
                fail(
                    f"right, but rank {rank} of {n} computes while no message is under way",
                    "send the keys on before you compute with them"
                    if late and not any(m.end < call.start for m in messages)
                    else "async_op=True, compute, and only then wait()",
                )
