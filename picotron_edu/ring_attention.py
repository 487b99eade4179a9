"""Ring attention, forward and backward: keys and values go round, queries stay.

    for each rank's keys, as they come by:                       backward, the same way round:
        send them on, receive the next ones                          p  = exp(q·kᵀ/√d − lse)
        (out, lse) of my queries over them                           dv += pᵀ·do
        merge with what I have                                       ds = p · (do·vᵀ − Σ do·out)
                                                                     dq += ds·k,   dk += dsᵀ·q

`lse` is the logarithm of the sum of exponentials of a query's scores. With it two attentions over
different keys merge exactly: each weighs as much as its sum. And in backward it brings the final
probabilities back from the scores at once, tile by tile, so no S×S table is ever kept. The
gradients of keys and values travel one step behind them, and one more hop brings them home.

Scores are made in tiles of ROWS × WIDTH, which stay in the cache while everything is done with
them, and of a triangle little is computed that is masked afterwards.

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
from torch.autograd.function import once_differentiable

from picotron_edu.ranks import Axis, send_recv

Order = Literal["zigzag", "contiguous"]
ROWS, WIDTH = 128, 512  # of a tile, in tokens; WIDTH is at least ROWS


def chunks_of(index: int, n: int, order: Order) -> list[int]:
    """Which of the sequence's chunks rank `index` of `n` has; zig-zag: 2n chunks, else n."""
    return [index, 2 * n - 1 - index] if order == "zigzag" else [index]


def grouped(x_BHS: Tensor, key_heads: int) -> Tensor:
    """The rows of all query heads that share a key head, one behind the other.

    BHS… -> GR…, G = B·K key heads and R = H/K·S rows of queries. So one product does for them all,
    and keys (GT…, T of them) are never repeated.
    """
    B, H, S, *d = x_BHS.shape
    return x_BHS.reshape(B * key_heads, H // key_heads * S, *d)


def scores(q_GRd: Tensor, k_GTd: Tensor, own: int) -> Tensor:
    """q·kᵀ as GRT. The last `own` keys are the queries' own tokens: none sees a later one."""
    s_GRT = q_GRd @ k_GTd.mT
    if own:
        future = torch.ones(own, own, dtype=torch.bool, device=s_GRT.device).triu(1)
        # a tile on the diagonal has `own` queries, so R is H/K heads of `own` rows each
        s_GRT[..., -own:].unflatten(1, (-1, own)).masked_fill_(future, -math.inf)
    return s_GRT


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


def tiles_of(blocks: list[tuple[slice, slice, bool]]) -> Iterator[tuple[slice, slice, int]]:
    """Blocks cut into tiles of at most ROWS × WIDTH; what lies behind a diagonal is left out.

    Yields rows, columns, own: the last `own` columns are the same tokens as the rows.
    """
    for rows, columns, diagonal in blocks:
        for start in range(rows.start, rows.stop, ROWS):
            stop = min(start + ROWS, rows.stop)
            end = columns.start + stop - rows.start if diagonal else columns.stop
            for last in range(end, columns.start, -WIDTH):
                first = max(last - WIDTH, columns.start)
                own = stop - start if diagonal and last == end else 0
                yield slice(start, stop), slice(first, last), own


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
        scaled_BHSd, K = q_BHSd.to(exact) / math.sqrt(q_BHSd.shape[-1]), kv_2BKSd.shape[2]
        for blocks, here_2BKSd in around(axis, order, causal, kv_2BKSd):
            k_GSd, v_GSd = here_2BKSd.to(exact).flatten(1, 2)
            for rows, columns, own in tiles_of(blocks):
                k, v, q = k_GSd[:, columns], v_GSd[:, columns], grouped(scaled_BHSd[:, :, rows], K)
                p_GRT = scores(q, k, own)
                top = p_GRT.amax(dim=-1, keepdim=True)
                total = p_GRT.sub_(top).exp_().sum(dim=-1, keepdim=True)
                so_far = out_BHSd[:, :, rows], lse_BHS[:, :, rows]
                merge(*so_far, p_GRT @ v / total, top + total.log())
        ctx.axis, ctx.order, ctx.causal = axis, order, causal
        rounded_BHSd = out_BHSd.to(q_BHSd.dtype)  # once, at the end
        ctx.save_for_backward(q_BHSd, kv_2BKSd, rounded_BHSd, lse_BHS)
        return rounded_BHSd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSd, kv_2BKSd, out_BHSd, lse_BHS = ctx.saved_tensors
        exact, K, root = lse_BHS.dtype, kv_2BKSd.shape[2], math.sqrt(q_BHSd.shape[-1])
        grad_BHSd, scaled_BHSd = grad_BHSd.to(exact), q_BHSd.to(exact) / root
        delta_BHS = (grad_BHSd * out_BHSd).sum(dim=-1)
        dq_BHSd, message = torch.zeros_like(grad_BHSd), None
        for blocks, here_2BKSd in around(ctx.axis, ctx.order, ctx.causal, kv_2BKSd):
            k_GSd, v_GSd = here_2BKSd.to(exact).flatten(1, 2)
            dkv_2BKSd = kv_2BKSd.new_zeros(kv_2BKSd.shape, dtype=exact)  # contiguous: parts of it
            dk_GSd, dv_GSd = dkv_2BKSd.flatten(1, 2)  # are views
            for rows, columns, own in tiles_of(blocks):
                k, v = k_GSd[:, columns], v_GSd[:, columns]
                q, do, lse, delta = (
                    grouped(x[:, :, rows], K) for x in (scaled_BHSd, grad_BHSd, lse_BHS, delta_BHS)
                )
                p_GRT = scores(q, k, own).sub_(lse[..., None]).exp_()
                ds_GRT = (do @ v.mT).sub_(delta[..., None]).mul_(p_GRT)
                dq_BHSd[:, :, rows] += (ds_GRT @ k).view_as(dq_BHSd[:, :, rows])
                dk_GSd[:, columns].baddbmm_(ds_GRT.mT, q)  # += dsᵀ·q, without a tensor in between
                dv_GSd[:, columns].baddbmm_(p_GRT.mT, do)
            if message:  # the left neighbour had these keys a step ago, and sent what it then had
                dkv_2BKSd += message.wait()[0]  # found for them: its part and that of those before
            message = pass_on(ctx.axis, dkv_2BKSd) if ctx.axis.size > 1 else None
        if message:
            (dkv_2BKSd,) = message.wait()  # one more hop, and they are home
        dq_BHSd /= root
        return None, None, None, dq_BHSd.to(q_BHSd.dtype), dkv_2BKSd.to(kv_2BKSd.dtype)


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Attention over some keys (out, lse: changed in place) and over some more, exactly.

    Each weighs as much as its sum of exponentials, of which `lse` is the logarithm. At least one of
    the two must have seen a key: in the ring each query sees one in every tile.
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
