"""Checks of what a rank does with its piece of a sequence: outputs, gradients, and messages.

Everything is float64, there are two sequences, and no rank's piece is equal to another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.checks.tensor_linears import flat, random
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    fail,
    run_each,
)

B, PART, D, CHANNELS = 2, 3, 4, 8


def with_gradients(
    fn: Callable[..., Any], inputs: Sequence[Tensor], weight: Tensor, what: str
) -> list[Tensor]:
    """`fn(*inputs)`, and for each input the gradient of the output's sum, weighted."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = fn(*leaves)
    if not isinstance(y, Tensor) or y.shape != weight.shape:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        fail(
            f"{what}: expected an output of shape {tuple(weight.shape)}, got {got}",
            "the sequence is dim 1 of a tensor of shape (B, S, D)",
        )
    if not y.requires_grad:
        fail(
            f"{what}: expected an output with a history, got one that autograd knows nothing of",
            "gather and scatter_sum are the messages that gradients can pass",
        )
    (y * weight).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [y.detach(), *grads]


@one_thread()
def messages_with_gradients(Gather: Any, Scatter: Any) -> str:
    for name, answer in (("GatherSequence", Gather), ("ScatterSequence", Scatter)):
        if not (isinstance(answer, type) and issubclass(answer, torch.autograd.Function)):
            fail(f"expected the class {name}, got {answer!r}", "give its name, without calling it")

    def on_rank(*args: Any) -> Tensor:
        piece_BsD, weight_BSD, x_BSD, weight_BsD, axis = args
        gathered = with_gradients(
            lambda x: Gather.apply(x, axis), [piece_BsD], weight_BSD, "GatherSequence"
        )
        scattered = with_gradients(
            lambda x: Scatter.apply(x, axis), [x_BSD], weight_BsD, "ScatterSequence"
        )
        return flat([*gathered, *scattered])

    for n in (2, 4):
        S = n * PART
        pieces = [random(10 + rank, B, PART, D) for rank in range(n)]
        weights_BSD = [random(20 + rank, B, S, D) for rank in range(n)]
        whole = [random(30 + rank, B, S, D) for rank in range(n)]
        weights_BsD = [random(40 + rank, B, PART, D) for rank in range(n)]
        inputs = list(zip(pieces, weights_BSD, whole, weights_BsD))
        run = run_each(on_rank, inputs, "every rank sends in forward, and every rank in backward")
        for rank in range(n):
            mine = slice(rank * PART, (rank + 1) * PART)
            own = weights_BSD[rank][:, mine]
            alone = torch.zeros_like(whole[rank])
            alone[:, mine] = weights_BsD[rank]
            expected = {
                "GatherSequence": torch.cat(pieces, 1),
                "gradient of GatherSequence's x": sum(weights_BSD)[:, mine],  # type: ignore[index]
                "ScatterSequence": sum(whole)[:, mine],  # type: ignore[index]
                "gradient of ScatterSequence's x": torch.cat(weights_BsD, 1),
            }
            mistakes = {
                "gradient of GatherSequence's x": {
                    "only what this rank made of x: the others have read it, too": own,
                    "the sum is needed at this rank's positions": sum(weights_BSD)[:, :PART],  # type: ignore[index]
                },
                "ScatterSequence": {
                    "that is this rank's part of a sum: add up the ranks' parts": (
                        whole[rank][:, mine]
                    ),
                },
                "gradient of ScatterSequence's x": {
                    "only what this rank kept: it has brought something to all others, too": alone,
                },
            }
            got = run[rank].split([right.numel() for right in expected.values()])
            for (what, right), found in zip(expected.items(), got):
                assert_close(
                    right,
                    found.view(right.shape),
                    rank=rank,
                    what=f"{what} on {n} ranks",
                    mistakes=mistakes.get(what, {}),
                    hints={1 / n: "the sum over the ranks, not their mean"},
                    hint="pieces lie along dim 1, in the order of the axis",
                )
        assert_messages(
            run,
            {"all_gather": 2, "reduce_scatter": 2},
            wire_bytes=4 * (n - 1) / n * B * S * D * 8,
            hints={
                "all_reduce": "right, with twice the bytes: no rank needs the sum everywhere",
                "all_to_all": "reduce_scatter sums on the way",
            },
            hint="each forward and each backward is one message: all_gather or reduce_scatter",
        )
        if n == 2:
            assert_keeps_to_axis(on_rank, inputs, run)
    return (
        "each is the other one's transpose, and four messages are as many bytes as two all-reduces"
    )


def plain(x_BSD: Tensor, W1: Tensor, W2: Tensor) -> Tensor:
    return x_BSD + F.linear(F.relu(F.linear(x_BSD, W1)), W2)


@one_thread()
def find_the_bugs(feed_forward: Callable[..., Any]) -> str:
    W1, W2 = random(2, CHANNELS, D), random(3, D, CHANNELS)

    def on_rank(*args: Any) -> Tensor:
        x_BsD, W1, W2, weight_BsD, axis = args
        fn: Callable[..., Any] = lambda *leaves: feed_forward(*leaves, axis)  # noqa: E731
        return flat(with_gradients(fn, [x_BsD, W1, W2], weight_BsD, "feed_forward"))

    for n in (2, 4):
        x_BSD, weight_BSD = random(4, B, n * PART, D), random(5, B, n * PART, D)
        y, grad_x, grad_W1, grad_W2 = with_gradients(plain, [x_BSD, W1, W2], weight_BSD, "")
        inputs = [
            tuple(piece.contiguous() for piece in pieces)
            for pieces in zip(
                x_BSD.chunk(n, 1), W1.chunk(n), W2.chunk(n, 1), weight_BSD.chunk(n, 1)
            )
        ]
        run = run_each(on_rank, inputs)
        joined_BSD = torch.cat(x_BSD.chunk(n, 1)).view(B, -1, D)
        joined = plain(joined_BSD, W1, W2)  # along the batch, read as if along the sequence
        order = "pieces of the sequence are joined along dim 1: with two sequences they are mixed"
        residual = f"x is counted {n} times: each rank brings all of it into the sum"
        wrong = {
            residual: y + (n - 1) * x_BSD,
            order: joined,
            order + ", though this rank's x is right": joined - joined_BSD + x_BSD,
            order + f"; and x is counted {n} times": joined + (n - 1) * joined_BSD,
            "where is x itself?": y - x_BSD,
        }
        for rank in range(n):
            mine = slice(rank * PART, (rank + 1) * PART)
            expected = {
                "y": y[:, mine],
                "gradient of x": grad_x[:, mine],
                "gradient of W1": grad_W1.chunk(n)[rank],
                "gradient of W2": grad_W2.chunk(n, 1)[rank],
            }
            mistakes = {
                "y": {text: value[:, mine] for text, value in wrong.items()},
                "gradient of x": {
                    "only the residual's: all_gather has no gradient, gather has one": (
                        weight_BSD[:, mine]
                    )
                },
            }
            got = run[rank].split([right.numel() for right in expected.values()])
            for (what, right), found in zip(expected.items(), got):
                assert_close(
                    right,
                    found.view(right.shape),
                    rank=rank,
                    what=f"{what} on {n} ranks",
                    mistakes=mistakes.get(what, {}),
                    hint="gather along the sequence, columns, relu, rows, scatter_sum, and then x",
                )
        if n == 2:
            assert_keeps_to_axis(on_rank, inputs, run)
    return "x counts once, and every position stays in its sequence"
