"""Check of a cross-entropy whose logits are cut over the ranks and stay where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import assert_close, assert_keeps_to_axis, fail, run_each
from picotron_edu.ranks import Axis

LABELS_T = torch.tensor([0, 3, 4, 6, -100, 1, 5, -100])  # borders of two and of four pieces
COUNTED_T = LABELS_T != -100
V = 7


def wrong_losses(logits_TV: Tensor, pieces: list[Tensor]) -> dict[str, Tensor]:
    """What a loss gets that does one thing otherwise."""
    label_T = logits_TV.gather(1, LABELS_T.clamp(min=0)[:, None])[:, 0] * COUNTED_T
    lse_T, top_T = logits_TV.logsumexp(1), logits_TV.amax(1)
    own_tops = [piece.amax(1) for piece in pieces]
    sums = [(piece - top[:, None]).exp().sum(1) for piece, top in zip(pieces, own_tops)]
    each_with_all = [(piece - top_T[:, None]).exp().sum(1) for piece in pieces]
    owner_T, clamped_T, first = torch.zeros(()), torch.zeros(()), 0
    for piece, top in zip(pieces, own_tops):
        column_T = (LABELS_T - first).clamp(0, piece.shape[1] - 1)
        clamped_T = clamped_T + piece.gather(1, column_T[:, None])[:, 0]
        owner_T = owner_T + top * (column_T + first == LABELS_T)
        first += piece.shape[1]
    everyone = "a label of −100 is not counted"
    lonely = "only one rank has the label's logit: the others must add 0"
    return {
        everyone: (lse_T - label_T).sum(),
        everyone + ": its loss is 0": (lse_T - top_T - (label_T - top_T) * COUNTED_T).sum(),
        "each rank has taken off its own largest logit: it must be that of all": (
            (sum(sums).log() - label_T + owner_T)[COUNTED_T].sum()  # type: ignore[union-attr]
        ),
        "sum over the ranks first, then take the logarithm": (
            (sum(each.log() for each in each_with_all) + top_T - label_T)[COUNTED_T].sum()
        ),
        lonely: (lse_T - clamped_T)[COUNTED_T].sum(),
        lonely + ", also after the shift": (
            (lse_T - top_T - clamped_T + len(pieces) * top_T)[COUNTED_T].sum()
        ),
        "exp(1000) is inf: take the largest logit off first, that of all ranks": torch.tensor(
            math.inf
        ),
    }


@one_thread()
def loss_of_vocabulary_pieces(loss: Callable[..., Any]) -> str:
    draw = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(len(LABELS_T), V, generator=draw, dtype=torch.float64)
    logits_TV += 1000  # for whom exp overflows
    whole = logits_TV.clone().requires_grad_()
    right = F.cross_entropy(whole, LABELS_T, ignore_index=-100, reduction="sum")
    right.backward()
    counted = int(COUNTED_T.sum())

    def on_rank(logits_Tv: Tensor, labels_T: Tensor, first: int, axis: Axis) -> Tensor:
        mine = logits_Tv.clone().requires_grad_()
        value = loss(mine, labels_T, first, axis)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            fail(
                f"expected one number (a tensor of shape ()), got {got}", "the sum over the tokens"
            )
        if value.requires_grad:
            value.backward()
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        return torch.cat([value.detach()[None], F.pad(grad, (0, V - mine.shape[1])).flatten()])

    for n in (2, 4):
        pieces = list(logits_TV.tensor_split(n, 1))
        firsts = [int(part[0]) for part in torch.arange(V).tensor_split(n)]
        inputs = [(piece.contiguous(), LABELS_T, first) for piece, first in zip(pieces, firsts)]
        run = run_each(on_rank, inputs, "every rank sends the same messages")
        for rank in range(n):
            value = run[rank][0]
            assert_close(
                right,
                value,
                rank=rank,
                what=f"loss on {n} ranks",
                mistakes=wrong_losses(logits_TV, pieces),
                hints={1 / counted: "the sum of the losses, not their mean"},
                hint="log of the sum of exponentials of all ranks, minus the label's logit",
            )
        for event in run.trace.of(lane="comm"):
            if event.name != "all_reduce":
                fail(f"right, but got a message {event.name}", "the logits stay where they are")
        sent = sum(e.payload_bytes for e in run.trace.of(rank=0, lane="comm"))
        most = 3 * 8 * len(LABELS_T)
        if sent > most:
            fail(
                f"right, but expected all-reduces of at most {most} bytes in all, got {sent}",
                "three numbers a token: the largest logit, the sum, the label's logit",
            )
        for rank, piece in enumerate(pieces):
            grad = run[rank][1:].view(len(LABELS_T), V)[:, : piece.shape[1]]
            hint = "the loss is right; is there a sum that gradients cannot pass? reduce_from can"
            assert_close(
                whole.grad.tensor_split(n, 1)[rank],  # type: ignore[union-attr]
                grad,
                rank=rank,
                what=f"gradient of the logits on {n} ranks",
                hints={n: "backward must not sum over the ranks again"},
                hint=hint,
            )
        if n == 2:
            assert_keeps_to_axis(on_rank, inputs, run)
    return f"3 numbers a token on the wire, whatever the vocabulary; here {V}, in practice 128,256"
