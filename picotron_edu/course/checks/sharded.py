"""Checks of ZeRO written by hand on flat vectors: optimizers, gradients and weights in shards.

Lengths do not divide by the number of ranks, and gradients differ from rank to rank. Bytes that an
answer keeps are counted in its tensors, and what it lets go of is watched while it runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from picotron_edu.course.checks.small_models import one_thread
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    fail,
    run_each,
)
from picotron_edu.memory_watch import EachOperation
from picotron_edu.ranks import Axis

Answer = Callable[..., Any]
LENGTH, STEPS = 10, 3


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random, but coarse enough to be added exactly."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(-32, 33, shape, generator=draw) / 16).to(dtype)


def bytes_kept(owner: Any, besides: Tensor) -> int:
    """Of all tensors in the attributes of `owner`, also in its lists and dicts; memory counts once,
    single numbers (a step counter) and the memory of `besides` not at all."""
    leaves = [x for x in tree_leaves(dict(vars(owner))) if isinstance(x, Tensor) and x.dim() > 0]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves}
    storages.pop(besides.untyped_storage().data_ptr(), None)
    return sum(storages.values())


class Alive(EachOperation):
    """Counts how many large pieces of memory live at the same time."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.seen, self.most = at_least, dict[int, weakref.ref](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.nbytes() >= self.at_least:
                    self.seen[storage.data_ptr()] = weakref.ref(storage)
        self.most = max(self.most, sum(there() is not None for there in self.seen.values()))
        return result


def adam_alone(start: Tensor, gradients: Sequence[Tensor], lr: float) -> list[Tensor]:
    """Adam of a textbook, but for its large eps; the weights after each step.

    With the usual 1e-8 gradients twice as large would give the same weights.
    """
    w, m, v, seen = start.clone(), torch.zeros_like(start), torch.zeros_like(start), []
    for t, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        w = w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 0.01)
        seen.append(w.clone())
    return seen


@one_thread()
def shard_an_optimizer(Optimizer: Answer) -> str:
    def train(gradients: list[Tensor], axis: Axis) -> tuple[Tensor, int]:
        weights = numbers(0, LENGTH)
        optimizer, seen = Optimizer(weights, axis, 0.1), []
        for grad in gradients:
            optimizer.step(grad.clone())
            seen.append(weights.clone())
        return torch.stack(seen), bytes_kept(optimizer, besides=weights)

    for n in (1, 2, 4):
        inputs = [([numbers(10 * r + t + 1, LENGTH) for t in range(STEPS)],) for r in range(n)]
        run = run_each(train, inputs, "every rank sends in every step, also one with a short shard")
        summed = [torch.stack(parts).sum(0) for parts in zip(*(g for (g,) in inputs))]
        expected = torch.stack(adam_alone(numbers(0, LENGTH), summed, 0.1))
        for rank, (weights, kept) in enumerate(run.values):
            parts = [adam_alone(numbers(0, LENGTH), gradients, 0.1) for (gradients,) in inputs]
            owners = torch.arange(LENGTH) // math.ceil(LENGTH / n)
            each_its_own = torch.stack([torch.stack(part) for part in parts])
            mean = torch.stack(adam_alone(numbers(0, LENGTH), [g / n for g in summed], 0.1))
            assert_close(
                expected,
                weights,
                rank=rank,
                what=f"weights in {STEPS} steps on {n} ranks",
                mistakes={
                    "the gradients are summed over the ranks, not averaged": mean,
                    "each rank steps with its own gradient: sum them first": (
                        each_its_own[owners, :, torch.arange(LENGTH)].T
                    ),
                    "the weights have not changed: write into them in place": (
                        numbers(0, LENGTH).expand(STEPS, -1)
                    ),
                },
                hint="step on your shard, then gather all shards and put them where they belong",
            )
            length = math.ceil(LENGTH / n)
            if n > 1 and kept > 2 * 4 * length:
                fail(
                    f"right, but expected at most {8 * length} bytes of states on {n} ranks, "
                    f"got {kept} on rank {rank}",
                    "two moments of 4 bytes, and only for the shard that this rank owns"
                    if kept >= 8 * LENGTH
                    else "two moments of the shard's length are all that stays between steps",
                )
        if n > 1:
            padded = 4 * n * math.ceil(LENGTH / n)
            assert_messages(
                run,
                {"reduce_scatter": STEPS, "all_gather": STEPS},
                wire_bytes=STEPS * 2 * (n - 1) / n * padded,
                hints={
                    "all_reduce": "a rank needs the sum of its own shard only: reduce_scatter",
                    "broadcast": "all shards at once: all_gather",
                },
                hint="one reduce_scatter and one all_gather a step",
            )
        if n == 2:

            def weights_of(gradients: list[Tensor], axis: Axis) -> Tensor:
                return train(gradients, axis)[0]

            assert_keeps_to_axis(weights_of, inputs, run_each(weights_of, inputs))
    return (
        f"the same training, and {8 * math.ceil(LENGTH / 4)} bytes a rank in place of {8 * LENGTH}"
    )


@one_thread()
def accumulate_in_shards(accumulate: Answer) -> str:
    length = 12

    def run_backwards(gradients: list[Tensor], axis: Axis) -> Tensor:
        handed_out: list[weakref.ref] = []

        def backward(grad: Tensor) -> Tensor:
            alive = sum(there() is not None for there in handed_out)
            if alive > 1:
                fail(
                    f"expected 1 whole gradient in memory at one time, got {alive + 1}",
                    "reduce each one at once, and let it go",
                )
            handed_out.append(weakref.ref(fresh := grad.clone()))
            return fresh

        backwards = [lambda grad=grad: backward(grad) for grad in gradients]
        with Alive(2 * length) as alive:
            result = accumulate(backwards, axis)
        if alive.most > 6:  # 3 or 4, and what threads that talk let go of a moment later
            fail(
                f"expected 1 whole gradient in memory at one time, and what is sent, "
                f"got {alive.most}",
                "reduce each one at once, and let it go",
            )
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= 4 * length > (
            4 * length // axis.size
        ):
            fail(
                f"expected a shard of {4 * length // axis.size} bytes, "
                f"got one that keeps {result.untyped_storage().nbytes()} bytes alive",
                "a slice of a whole gradient keeps all of it in memory",
            )
        return result

    for n, m in ((2, 1), (2, 3), (4, 10)):
        narrow = torch.bfloat16
        inputs = [
            ([numbers(100 * n + 10 * r + i, length, dtype=narrow) for i in range(m)],)
            for r in range(n)
        ]
        for (gradients,) in inputs:
            gradients[0] += 256  # beside which bfloat16 loses what comes later
        run = run_each(run_backwards, inputs, "as many messages on each rank")
        micro = [torch.stack([g[i].float() for (g,) in inputs]).sum(0) for i in range(m)]
        whole = torch.stack(micro).sum(0)
        narrow_sum = torch.zeros(length, dtype=narrow)
        for part in micro:
            narrow_sum = narrow_sum + part.to(narrow)
        for rank in range(n):
            own = slice(rank * length // n, (rank + 1) * length // n)
            assert_close(
                whole[own],
                run[rank],
                rank=rank,
                dtype=torch.float32,
                what=f"shard of the sum of {m} micro-batches on {n} ranks",
                mistakes={
                    "only the last micro-batch is left: add to the shard": micro[-1][own],
                    "only the first micro-batch was reduced: each backward must": micro[0][own],
                    "that is the whole gradient, not this rank's shard": whole,
                    "that is the sum of this rank's own micro-batches: reduce them": (
                        torch.stack(inputs[rank][0]).float().sum(0)[own]
                    ),
                },
                hints={1 / m: "sums, not means", 1 / n: "sums, not means"},
                hint="256 + 1 is 256 in bfloat16: make it float32 before you add or send",
            )
        assert_messages(
            run,
            {"reduce_scatter": m},
            wire_bytes=m * (n - 1) / n * 4 * length,
            hints={
                "all_reduce": "a rank needs its shard only: reduce_scatter sends half as much",
                0.5: "in bfloat16 the ranks' sum loses small terms: send float32",
            },
            hint="each micro-batch is reduced at once: whole gradients are not kept for later",
        )
        if n == 2 and m == 3:
            assert_keeps_to_axis(run_backwards, inputs, run)
    return "every micro-batch in the shard, one whole gradient in memory at a time"
