"""Checks of layers whose weights are cut: outputs, gradients, and the messages of both passes.

Everything is float64, inputs are whole on each rank, and no rank's piece is equal to another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from picotron_edu.ranks import Axis

Answer = Callable[..., Any]
T, D, CHANNELS, HEADS = 3, 4, 8, 4


def random(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def with_gradients(fn: Answer, inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """`fn(*inputs)`, and for each input the gradient of the output's sum, weighted."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = fn(*leaves)
    if not isinstance(y, Tensor) or y.shape != weight.shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        fail(
            f"expected an output of shape {tuple(weight.shape)}, got {got}",
            "y is whole on each rank: as many features as b2 has numbers",
        )
    if not y.requires_grad:
        fail(
            "expected an output with a history, got one that autograd knows nothing of",
            "reduce_from is the all-reduce that gradients can pass",
        )
    (y * weight).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [y.detach(), *grads]


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def plain(x: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, W1, b1)), W2, b2)


@one_thread()
def feed_forward_on_ranks(feed_forward: Answer) -> str:
    x, weight = random(0, T, D), random(1, T, D)
    W1, b1, W2, b2 = (
        random(2, CHANNELS, D),
        random(3, CHANNELS),
        random(4, D, CHANNELS),
        random(5, D),
    )
    y, grad_x, grad_W1, grad_b1, grad_W2, grad_b2 = with_gradients(
        plain, (x, W1, b1, W2, b2), weight
    )

    def on_rank(*args: Any) -> Tensor:
        *inputs, axis = args
        return flat(with_gradients(lambda *leaves: feed_forward(*leaves, axis), inputs, weight))

    for n in (2, 4):
        pieces = [
            (x, *each, b2) for each in zip(W1.chunk(n), b1.chunk(n), W2.chunk(n, 1), strict=True)
        ]
        run = run_each(on_rank, pieces, "every rank sends in forward, and every rank in backward")
        for rank, inputs in enumerate(pieces):
            alone = with_gradients(plain, inputs, weight)
            partial_y = alone[0] - b2
            expected = {
                "y": y,
                "gradient of x": grad_x,
                "gradient of W1": grad_W1.chunk(n)[rank],
                "gradient of b1": grad_b1.chunk(n)[rank],
                "gradient of W2": grad_W2.chunk(n, 1)[rank],
                "gradient of b2": grad_b2,
            }
            mistakes = {
                f"b2 is counted {n} times: add it after the sum": y + (n - 1) * b2,
                "that is this rank's part of a sum: add up the ranks' parts": alone[0],
                "where is b2?": y - b2,
                "where is b2, and where is the sum over the ranks?": partial_y,
            }
            of_x = {"that is what this rank's columns give: copy_to sums the ranks'": alone[1]}
            got = run[rank].split([part.numel() for part in expected.values()])
            for (what, right), mine in zip(expected.items(), got):
                assert_close(
                    right,
                    mine.view(right.shape),
                    rank=rank,
                    what=f"{what} on {n} ranks",
                    mistakes={"y": mistakes, "gradient of x": of_x}.get(what, {}),
                    hints={
                        1 / n: "b2 divided by the ranks gives the right y and a wrong gradient",
                        n: "a gradient is summed where it is complete already",
                    },
                    hint="columns of W1, relu, rows of W2, the sum over the ranks, then b2",
                )
        assert_messages(
            run,
            {"all_reduce": 2},
            wire_bytes=2 * 2 * (n - 1) / n * T * D * 8,
            hints={
                "all_gather": "nobody needs the other ranks' channels: relu works on each alone",
                "reduce_scatter": "y is to be whole on each rank",
            },
            hint="one all-reduce in forward (of y), one in backward (of the gradient of x)",
        )
        if n == 2:
            assert_keeps_to_axis(on_rank, pieces, run)
    return "two matrices, one message in forward and one in backward, and gradients of one rank"


def attention(qkv: Tensor, d: int) -> Tensor:
    q, k, v = (part.unflatten(-1, (-1, d)).transpose(0, 1) for part in qkv.chunk(3, dim=-1))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


@one_thread()
def find_the_bugs(cut_fused: Answer, output: Answer) -> str:
    width, d = 8, 8 // HEADS
    x, weight, fused = random(0, T, width), random(1, T, width), random(2, 3 * width, width)
    W, b = random(3, width, width), random(4, width)

    def whole(W: Tensor, b: Tensor) -> Tensor:
        return F.linear(attention(F.linear(x, fused), d), W, b)

    y, _, grad_b = with_gradients(whole, (W, b), weight)

    def on_rank(fused: Tensor, W: Tensor, b: Tensor, axis: Axis) -> Tensor:
        own = cut_fused(fused, axis)
        if not isinstance(own, Tensor) or own.shape != (3 * width // axis.size, width):
            got = tuple(own.shape) if isinstance(own, Tensor) else type(own).__name__
            fail(
                f"cut_fused: expected shape {(3 * width // axis.size, width)}, got {got}",
                "an n-th of the rows, all columns",
            )
        heads = attention(F.linear(x, own), d)
        y, _, grad_b = with_gradients(lambda W, b: output(heads, W, b, axis), (W, b), weight)
        return flat([own, y, grad_b])

    for n in (2, 4):
        inputs = [(fused, piece.contiguous(), b) for piece in W.chunk(n, 1)]
        run = run_each(on_rank, inputs)
        for rank in range(n):
            own = torch.cat([part.chunk(n)[rank] for part in fused.chunk(3)])
            got = run[rank].split([own.numel(), y.numel(), grad_b.numel()])
            assert_close(
                own,
                got[0].view_as(own),
                rank=rank,
                what=f"cut_fused on {n} ranks",
                mistakes={"rows in one piece: is there a q, a k and a v?": fused.chunk(n)[rank]},
                hint="this rank's heads of q, below them those of k, below them those of v",
            )
            assert_close(
                y,
                got[1].view_as(y),
                rank=rank,
                what=f"output on {n} ranks",
                mistakes={f"the bias is counted {n} times": y + (n - 1) * b, "the bias?": y - b},
                hint="the sum over the ranks, then the bias, once",
            )
            assert_close(
                grad_b,
                got[2],
                rank=rank,
                what=f"gradient of the bias on {n} ranks",
                hints={1 / n: "an n-th of the bias on each rank gives it an n-th of the gradient"},
            )
    return "whole heads on each rank, and one bias"
