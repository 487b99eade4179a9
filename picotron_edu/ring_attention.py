"""Ring attention, forward and backward: keys and values go round, queries stay.

    for each rank's keys, as they come by:                       backward, the same way round:
        send them on, receive the next ones                          p  = exp(q·kᵀ/√d − lse)
        (out, lse) of my queries over them                           dv += pᵀ·do
        merge with what I have                                       ds = p · (do·vᵀ − Σ do·out)
                                                                     dq += ds·k,   dk += dsᵀ·q

`lse` is the logarithm of the sum of exponentials of a query's scores. With it two attentions over
different keys merge exactly: each weighs as much as its sum. And in backward it brings the final
probabilities back from the scores at once, block by block, so no S×S table is ever kept. The
gradients of keys and values travel one step behind them, and one more hop brings them home.

Scores, sums, `lse` and gradients are float32 at least, and are rounded once, at the end: rounding
at each hop would add up with the size of the ring.

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2310.01889, section 3; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 1805.02867; Dao et al., "FlashAttention",
2205.14135, section 3.1 and appendix B (backward).
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from picotron_edu.ranks import Axis, send_recv

Order = Literal["zigzag", "contiguous"]


def chunks_of(index: int, n: int, order: Order) -> list[int]:
    """Which of the sequence's chunks rank `index` of `n` has; zig-zag: 2n chunks, else n."""
    return [index, 2 * n - 1 - index] if order == "zigzag" else [index]


def grouped(x_BHS: Tensor, k_BKTd: Tensor) -> Tensor:
    """The heads that share a key head, one behind the other: BKR, R = H/K·S rows for each."""
    B, H, S, *d = x_BHS.shape
    return x_BHS.reshape(B, k_BKTd.shape[1], H // k_BKTd.shape[1] * S, *d)


def scores(q_BHSd: Tensor, k_BKTd: Tensor, diagonal: bool) -> Tensor:
    """q·kᵀ/√d in float32 at least, as BKRT: the R rows of the queries that share a key head.

    diagonal: the queries and keys are the same tokens, so that each sees none behind itself.
    """
    exact = torch.promote_types(q_BHSd.dtype, torch.float32)
    s_BKRT = grouped(q_BHSd, k_BKTd).to(exact) @ k_BKTd.mT.to(exact)
    s_BKRT /= math.sqrt(q_BHSd.shape[-1])
    if diagonal:
        S = q_BHSd.shape[2]
        future_ST = torch.ones(S, S, dtype=torch.bool, device=s_BKRT.device).triu(1)
        s_BKRT.unflatten(2, (-1, S)).masked_fill_(future_ST, -math.inf)
    return s_BKRT


def blocks_of(
    queries: list[int], keys: list[int], length: int, causal: bool
) -> list[tuple[slice, slice, bool]]:
    """Which parts of this rank's queries see which parts of these keys: rows, columns, diagonal.

    queries, keys: numbers of the chunks on the two sides, `length` tokens each. A block that is
    masked as a whole is left out: nothing is computed for it.
    """

    def part(i: int) -> slice:
        return slice(i * length, (i + 1) * length)

    return [
        (part(i), part(j), causal and query == key)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if key <= query or not causal
    ]


def pass_on(axis: Axis, x: Tensor) -> Any:
    """Send `x` to the right, and receive the left neighbour's: a Handle."""
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    return send_recv(axis, [(x, right)], [(torch.empty_like(x), left)], async_op=True)


def around(axis: Axis, order: Order, causal: bool, kv: Tensor) -> Iterator[tuple[list, Tensor]]:
    """The keys and values of all ranks, one after the other, with the blocks to compute.

    While the caller computes with one rank's, they are sent on and the next ones arrive.
    """
    mine = chunks_of(axis.index, axis.size, order)
    length = kv.shape[3] // len(mine)
    for step in range(axis.size):
        theirs = chunks_of((axis.index - step) % axis.size, axis.size, order)
        message = pass_on(axis, kv) if step < axis.size - 1 else None
        yield blocks_of(mine, theirs, length, causal), kv
        if message:
            (kv,) = message.wait()


class RingAttention(Function):
    """Attention of this rank's queries over the keys of all ranks, as they come round."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, order: Order, causal: bool, q_BHSd: Tensor, kv_2BKSd: Tensor
    ) -> Tensor:
        exact = torch.promote_types(q_BHSd.dtype, torch.float32)
        out_BHSd = q_BHSd.new_zeros(q_BHSd.shape, dtype=exact)
        lse_BHS = q_BHSd.new_full(q_BHSd.shape[:3], -math.inf, dtype=exact)
        for blocks, (k_BKSd, v_BKSd) in around(axis, order, causal, kv_2BKSd):
            for rows, columns, diagonal in blocks:
                q, k, v = q_BHSd[:, :, rows], k_BKSd[:, :, columns], v_BKSd[:, :, columns]
                s_BKRT = scores(q, k, diagonal)
                block_lse = s_BKRT.logsumexp(dim=-1)
                block_out = (s_BKRT - block_lse[..., None]).exp() @ v.to(exact)
                merge(out_BHSd[:, :, rows], lse_BHS[:, :, rows], block_out, block_lse)
        ctx.axis, ctx.order, ctx.causal = axis, order, causal
        rounded_BHSd = out_BHSd.to(q_BHSd.dtype)  # once, at the end
        ctx.save_for_backward(q_BHSd, kv_2BKSd, rounded_BHSd, lse_BHS)
        return rounded_BHSd

    @staticmethod
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSd, kv_2BKSd, out_BHSd, lse_BHS = ctx.saved_tensors
        grad_BHSd = grad_BHSd.to(lse_BHS.dtype)
        delta_BHS = (grad_BHSd * out_BHSd).sum(dim=-1)
        dq_BHSd, message = torch.zeros_like(grad_BHSd), None
        for blocks, (k_BKSd, v_BKSd) in around(ctx.axis, ctx.order, ctx.causal, kv_2BKSd):
            dkv_2BKSd = torch.zeros_like(kv_2BKSd, dtype=lse_BHS.dtype)
            for rows, columns, diagonal in blocks:
                q, k, v = q_BHSd[:, :, rows], k_BKSd[:, :, columns], v_BKSd[:, :, columns]
                do, lse, delta = (
                    grouped(x[:, :, rows], k) for x in (grad_BHSd, lse_BHS, delta_BHS)
                )
                p_BKRT = (scores(q, k, diagonal) - lse[..., None]).exp()
                ds_BKRT = p_BKRT * (do @ v.mT.to(do) - delta[..., None]) / math.sqrt(q.shape[-1])
                dq_BHSd[:, :, rows] += (ds_BKRT @ k.to(do)).view(q.shape)
                dkv_2BKSd[0][:, :, columns] += ds_BKRT.mT @ grouped(q, k).to(do)
                dkv_2BKSd[1][:, :, columns] += p_BKRT.mT @ do
            if message:  # what other ranks have found for these keys comes behind them
                dkv_2BKSd += message.wait()[0]
            message = pass_on(ctx.axis, dkv_2BKSd) if ctx.axis.size > 1 else None
        if message:
            (dkv_2BKSd,) = message.wait()  # one more hop, and they are home
        return None, None, None, dq_BHSd.to(q_BHSd.dtype), dkv_2BKSd.to(kv_2BKSd.dtype)


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Attention over some keys (out, lse: changed in place) and over some more, exactly.

    Each weighs as much as its sum of exponentials, of which `lse` is the logarithm.
    """
    both = torch.logaddexp(lse, more_lse.view(lse.shape))
    out *= (lse - both).exp()[..., None]
    out += (more_lse.view(lse.shape) - both).exp()[..., None] * more_out.view(out.shape)
    lse.copy_(both)


def ring_attention(
    axis: Axis, order: Order, causal: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention of this rank's q_BHSd over all ranks' k_BKSd and v_BKSd -> BHSd."""
    return RingAttention.apply(axis, order, causal, q, torch.stack([k, v]))
