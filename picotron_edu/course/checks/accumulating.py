"""Checks of training steps that add up the gradients of micro-batches.

Micro-batches hold unequal numbers of counted tokens. The gradient of each one alone is known, so
the wrong sums that people get can be computed and named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from picotron_edu.course.checking import run_on_ranks
from picotron_edu.course.checks.small_models import (
    Recorder,
    each_alone,
    grad_in_one_row,
    make_batches,
    make_model,
    most_bytes_kept,
    one_thread,
)
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    brief,
    fail,
    run_each,
)
from picotron_edu.data import Batch
from picotron_edu.ranks import Axis, world

Answer = Callable[..., Any]


@one_thread()
def accumulation(accumulate: Answer) -> str:
    model = make_model()  # each rank gets a copy

    def loss_and_grad(batches: list[Batch], axis: Axis) -> tuple[Any, Tensor]:
        loss = accumulate(model, batches, axis)
        return loss.detach() if isinstance(loss, Tensor) else loss, grad_in_one_row(model)

    def in_one_row(batches: list[Batch], axis: Axis) -> Tensor:
        loss, grad = loss_and_grad(batches, axis)
        return torch.cat([torch.as_tensor(loss).double().view(1), grad])

    hang = (
        "ranks may have other numbers of micro-batches, or no counted token: "
        "send outside the loop, on every rank"
    )
    for counts in ([[12, 1, 5]], [[12, 1, 5], [7]], [[12, 1, 5], [7, 0], [0], [2, 9]]):
        n, inputs = len(counts), [(make_batches(c, seed),) for seed, c in enumerate(counts)]
        run = run_each(loss_and_grad, inputs, hang)
        for event in run.trace.of(lane="comm"):
            if event.payload_bytes > 16:
                fail(
                    f"expected messages of one number, got {event.name} of {event.payload_bytes:,} "
                    f"bytes on rank {event.rank} of {n}",
                    "only the count and the loss travel; gradients stay parts until chapter 03",
                )
        losses, grads = zip(*(each_alone(batches) for (batches,) in inputs))
        assert_gradient(counts, grads, [grad for _, grad in run.values])
        total, labels = sum(map(sum, counts)), sum(map(len, counts)) * 12
        for rank, (loss, _) in enumerate(run.values):
            assert_close(
                torch.cat(losses).sum() / total,
                loss,
                rank=rank,
                what="loss",
                mistakes={
                    "add up the losses of all ranks: that is this rank's part": (
                        losses[rank].sum() / total
                    ),
                    "that is the sum: divide by the number of counted tokens": (
                        torch.cat(losses).sum()
                    ),
                    "labels of −100 are not counted": torch.cat(losses).sum() / labels,
                },
                hint="return the loss of the global batch, the same on all ranks",
            )
        if n > 1:
            calls = len(run.trace.of(rank=0, lane="comm"))
            hint = "add up over the micro-batches first, then once over the ranks"
            assert_messages(run, {"all_reduce": 1 if calls == 1 else 2}, hint=hint)
        if n == 2:
            assert_keeps_to_axis(in_one_row, inputs, run_each(in_one_row, inputs))

    def activations_at_once() -> float:
        batches = make_batches([4, 5, 6, 7])
        one = most_bytes_kept(model, lambda: accumulate(model, batches[:1], world()))
        return most_bytes_kept(model, lambda: accumulate(model, batches, world())) / one

    at_once = run_on_ranks(activations_at_once, 1)[0]
    if at_once > 1.5:
        fail(
            "right, but expected the activations of 1 micro-batch in memory at one time, "
            f"got those of {at_once:.0f}",
            "call backward for each micro-batch: it frees them before the next forward",
        )
    return "one large batch, in small pieces, on 1, 2 and 4 ranks"


def assert_gradient(
    counts: list[list[int]], grads: Sequence[Tensor], got: Sequence[Tensor]
) -> None:
    """That the ranks' gradients `got` add up to the global batch's.

    counts[r][i], grads[r][i]: of micro-batch i of rank r, its counted tokens and the gradient of
    the sum of their losses.
    """
    n, total = len(counts), sum(map(sum, counts))
    whole = torch.cat(tuple(grads)).sum(0)
    own = sum(g.sum(0) / max(1, sum(c)) for c, g in zip(counts, grads))
    micro = [g / torch.tensor(c).clamp(min=1)[:, None] for c, g in zip(counts, grads)]
    means = sum(g.mean(0) for g in micro)
    assert_close(
        whole / total,
        sum(got),
        what=f"sum of the gradients of {n} rank{'s' * (n > 1)}",
        mistakes={
            "a mean of means: a token in a short micro-batch must not weigh more": means,
            "a mean of means, over micro-batches and over ranks": means / n,
            "divide by the counted tokens of all ranks, not by those of this rank": own,
            "a mean over ranks is a mean of means: divide by the tokens of all ranks": own / n,
            "divide by the tokens of all micro-batches, counted before the first": (
                sum(g.sum(0) for g in micro)
            ),
            "only the last micro-batch is left: backward adds to what is in param.grad": (
                sum(g[-1] for g in grads) / total
            ),
            "labels of −100 are not counted: divide by the sum of batch.counted": (
                whole / (12 * sum(map(len, counts)))
            ),
        },
        hints={
            1 / 3: "did you divide by the micro-batches as well? Divide once, by the tokens",
            total: "that is the gradient of the sum: divide by the number of counted tokens",
            n: "the ranks' gradients are parts that add up: divide by the sum of all counts",
            0: "call backward in the loop: it adds to param.grad",
        },
        hint="the sum of all token losses over the number of all counted tokens",
    )


def one_step(train_step: Answer, batches: list[Batch], recorder: Recorder, *args: Any) -> Any:
    """What the step returns; it must call the optimizer once."""
    before = len(recorder.seen)
    result = train_step(recorder.model, batches, recorder, *args)
    calls = len(recorder.seen) - before
    if calls != 1:
        hint = "one step, with the gradient of all micro-batches"
        fail(f"expected 1 call of optimizer.step(), got {calls}", hint)
    return result


@one_thread()
def clipping(train_step: Answer) -> str:
    batches = make_batches([12, 1, 5])
    losses, grads = each_alone(batches, scale=1 / 18)
    grad = grads.sum(0)
    norm = grad.norm()

    def clip(x: Tensor, max_norm: float) -> Tensor:
        return x * (max_norm / (x.norm() + 1e-6)).clamp(max=1.0)  # as torch does it

    for max_norm in (1e9, float(norm / 2)):
        recorder = Recorder(make_model(), lambda param: param.grad)
        as_planted = torch.zeros_like(grad)
        for part in grads:
            as_planted = clip(as_planted + part, max_norm)
        for step in (1, 2):  # the second one must not see what the first has left
            result = one_step(train_step, batches, recorder, max_norm)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                fail(f"expected a loss and a norm, got {brief(result)}", "return loss, norm")
            assert_close(
                clip(grad, max_norm),
                recorder.seen[-1],
                what=f"gradient in step {step}, max_norm {max_norm:.3g}",
                mistakes={
                    "what is clipped is not complete yet, so the cut of the batch matters": (
                        as_planted
                    ),
                    "the norms of the parts say nothing about the norm of their sum": (
                        sum(clip(part, max_norm) for part in grads)
                    ),
                    "it is not clipped when optimizer.step() comes": grad,
                    "only the last micro-batch is left": clip(grads[-1], max_norm),
                    "what the step before has left is still there": clip(2 * grad, max_norm),
                },
                hint="clip the complete gradient, all parameters by one factor",
                rtol=1e-4,  # others leave out the 1e-6
            )
            assert_close(losses.sum(), result[0], what="loss", hint="it was right: leave it")
            assert_close(
                norm,
                result[1],
                what=f"norm, max_norm {max_norm:.3g}",
                mistakes={"that is the norm after clipping": max_norm},
                hint="the norm of the complete gradient, before it is clipped",
            )
    return "clipped once, when it is complete: however the batch is cut"


def main_grad_of(param: Any) -> Tensor:
    found = getattr(param, "main_grad", None)
    return torch.zeros(param.shape) if found is None else found


@one_thread()
def main_gradients(train_step: Answer) -> str:
    for counts in ([8], [9, 1, 4, 2]):  # to divide by 8 or by 16 rounds nothing
        batches, model = make_batches(counts), make_model(torch.bfloat16)
        losses, grads = each_alone(batches, torch.bfloat16, scale=1 / sum(counts))
        exact, in_bfloat16 = grads.float().sum(0), torch.zeros_like(grads[0])
        as_planted = torch.zeros_like(exact)
        for part in grads:
            in_bfloat16 = in_bfloat16 + part
            as_planted += in_bfloat16
        recorder = Recorder(model, main_grad_of)
        for step in (1, 2):
            loss = one_step(train_step, batches, recorder)
            main_grad = recorder.seen[-1]
            if main_grad.dtype != torch.float32:
                hint = "in bfloat16 256 + 1 is 256: what adds up must be wider"
                fail(f"expected main_grad in torch.float32, got {main_grad.dtype}", hint)
            assert_close(
                exact,
                main_grad,
                what=f"main_grad in step {step}, micro-batches of {counts} tokens",
                mistakes={
                    "early micro-batches count more often than late ones": as_planted,
                    "it was added up in bfloat16, where small parts are lost": in_bfloat16,
                    "only the last micro-batch is left": grads[-1],
                    "what the step before has left is still there": 2 * exact,
                },
                hints={
                    1 / len(counts): "each micro-batch counts once, and in full",
                    0: "nothing is in main_grad when optimizer.step() comes",
                },
                hint="each micro-batch counts once, added in float32",
            )
            assert_close(losses.sum(), loss, what="loss", hint="it was right: leave it", rtol=1e-3)
    return "each micro-batch once, added in float32"
