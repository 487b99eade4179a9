"""Checks of ZeRO by hand: weights that are there only while they are used, and a planted bug."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from picotron_edu.course.checking import run_on_ranks
from picotron_edu.course.checks.sharded import LENGTH, Alive, Answer, numbers
from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    brief,
    fail,
    run_each,
)
from picotron_edu.ranks import Axis, world


@one_thread()
def gather_compute_free(forward_backward: Answer) -> str:
    D, L, B = 8, 6, 2

    def matrices(seed: int) -> list[Tensor]:
        return [numbers(seed + i, D, D) / 2 for i in range(L)]

    def work(x: Tensor, grad: Tensor, axis: Axis) -> tuple[Tensor, list[Tensor], int]:
        length = D * D // axis.size
        own = slice(axis.index * length, (axis.index + 1) * length)
        shards = [w.flatten()[own].clone() for w in matrices(7)]
        with Alive(4 * D * D) as alive:
            result = forward_backward(shards, x, grad, axis)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            fail(f"expected (y, gradients), got {brief(result)}", "return y, shard_gradients")
        y, gradients = result
        if not isinstance(gradients, (tuple, list)) or len(gradients) != L:
            fail(f"expected a list of {L} shard gradients, got {brief(gradients)}")
        return y, list(gradients), alive.most

    for n in (2, 4):
        inputs = [(numbers(50 + r, B, D), numbers(60 + r, B, D) / 4) for r in range(n)]
        run = run_each(work, inputs)
        whole = [w.requires_grad_() for w in matrices(7)]
        outputs = []
        for x, grad in inputs:
            y = x
            for w in whole:
                y = y @ w
            outputs.append(y.detach())
            y.backward(grad)
        length = D * D // n
        for rank, (y, gradients, most) in enumerate(run.values):
            assert_close(outputs[rank], y, rank=rank, what=f"y on {n} ranks", rtol=1e-4)
            for layer, (w, gradient) in enumerate(zip(whole, gradients)):
                assert w.grad is not None
                assert_close(
                    w.grad.flatten()[rank * length : (rank + 1) * length],
                    gradient,
                    rank=rank,
                    what=f"gradient of layer {layer} on {n} ranks",
                    mistakes={
                        "that is the whole gradient: each rank keeps its shard": w.grad,
                        "that is the whole gradient, flat: reduce_scatter": w.grad.flatten(),
                    },
                    hints={1 / n: "sums over the ranks, not means"},
                    hint="for y = x·W, W's gradient is xᵀ·g, and x's is g·Wᵀ",
                    rtol=1e-4,
                    atol=1e-5,
                )
            if most > 5:  # 2 or 3, and what threads that talk let go of a moment later
                fail(
                    f"right, but expected at most 5 tensors of a matrix's size at one time, "
                    f"got {most} on rank {rank}",
                    "forget W after forward (`del`), and gather it again in backward",
                )
        assert_messages(
            run,
            {"all_gather": 2 * L, "reduce_scatter": L},
            wire_bytes=3 * (n - 1) / n * 4 * D * D * L,
            hints={"all_reduce": "each rank needs its shard of the gradient only: reduce_scatter"},
            hint="a matrix is gathered for its forward, and again for its backward",
        )
        if n == 2:

            def in_one_row(x: Tensor, grad: Tensor, axis: Axis) -> Tensor:
                y, gradients, _ = work(x, grad, axis)
                return torch.cat([y.flatten(), *(g.flatten() for g in gradients)])

            assert_keeps_to_axis(in_one_row, inputs, run_each(in_one_row, inputs))
    return "3Ψ on the wire, and never more than one whole layer in memory"


@one_thread()
def find_the_bugs(Zero2: Answer) -> str:
    def train(gradients: list[list[Tensor]], axis: Axis) -> tuple[Tensor, Tensor]:
        weights = numbers(0, LENGTH)
        optimizer, seen = Zero2(weights, axis, 0.25, 0.5), []
        for step in gradients:
            for grad in step:
                optimizer.add(grad.clone())
            optimizer.step()
            seen.append(weights.clone())
        return torch.stack(seen), optimizer.velocity

    for n, m in ((2, 1), (4, 1), (2, 3), (4, 3)):
        by_rank = [
            [[numbers(100 * r + 10 * t + i, LENGTH) for i in range(m)] for t in range(2)]
            for r in range(n)
        ]

        def trained(
            keep: Callable[[list[Tensor]], Tensor], reset: bool = True, by_rank: Any = by_rank
        ) -> Tensor:
            """As one rank does it, of each step's micro-batches only what `keep` keeps."""
            w, v, g, seen = numbers(0, LENGTH), *torch.zeros(2, LENGTH), []
            for t in range(2):
                g = sum((keep(steps[t]) for steps in by_rank), torch.zeros(LENGTH) if reset else g)
                v = 0.5 * v + g
                w = w - 0.25 * v
                seen.append(w.clone())
            return torch.stack(seen)

        def everything(step: list[Tensor]) -> Tensor:
            return torch.stack(step).sum(0)

        run = run_on_ranks(lambda: train(by_rank[world().index], world()), n)  # noqa: B023
        for rank, (weights, velocity) in enumerate(run.values):
            assert_close(
                trained(everything),
                weights,
                rank=rank,
                what=f"weights in 2 steps of {m} micro-batches on {n} ranks",
                mistakes={
                    "only the last micro-batch of a step is left": trained(lambda step: step[-1]),
                    "only the first micro-batch of a step is left": trained(lambda step: step[0]),
                    "what the step before has left in self.grad is still there": (
                        trained(everything, reset=False)
                    ),
                },
                hint="shards of gradients and shards of weights must have the same borders",
            )
            if velocity.numel() > math.ceil(LENGTH / n):
                fail(
                    f"expected a velocity of at most {math.ceil(LENGTH / n)} numbers on {n} ranks, "
                    f"got {velocity.numel()}",
                    "each rank keeps the states of its shard only",
                )
        assert_messages(
            run,
            {"reduce_scatter": 2 * m, "all_gather": 2},
            hints={"all_reduce": "nobody keeps a whole sum of gradients in stage 2"},
            hint="each micro-batch is reduced at once; the weights are gathered once a step",
        )

    def weights_of(gradients: list[list[Tensor]], axis: Axis) -> Tensor:
        return train(gradients, axis)[0]

    two = [([[numbers(r + 3, LENGTH)]],) for r in range(2)]
    assert_keeps_to_axis(weights_of, two, run_each(weights_of, two))
    return "no micro-batch is lost, and no state is shifted by the padding"
