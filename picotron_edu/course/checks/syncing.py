"""Checks of when gradients are summed: once a window of micro-batches, in its last backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.course.checks.bucketing import mark_when_ready, split_by_finish
from picotron_edu.course.checks.small_models import (
    each_alone,
    grad_in_one_row,
    make_batches,
    make_model,
    one_thread,
)
from picotron_edu.course.comparing import assert_close, assert_keeps_to_axis, fail, run_each
from picotron_edu.data import Batch
from picotron_edu.ranks import Axis, span
from picotron_edu.ranks.trace import Event

Answer = Callable[..., Any]

ON_FOUR = ([3], [9], [2], [5])
WINDOWS = (  # counted tokens, [rank][micro-batch]; the second window was cut short
    ([12, 1, 5], [7, 2, 4]),
    ([3], [9]),
    ([6, 6], [1, 8]),
)


@one_thread()
def no_sync(Overlap: Answer, run_window: Answer) -> str:
    def all_windows(index: int, axis: Axis) -> Tensor:
        model, rows = make_model(), []
        parallel = Overlap(model, axis)
        mark_when_ready(model)
        for window in WINDOWS:
            model.zero_grad()
            counted = sum(map(sum, window))
            run_window(parallel, model, iter(make_batches(window[index], index)), counted)
            with span("finish"):
                parallel.finish()
            rows.append(grad_in_one_row(model))
        return torch.stack(rows)

    inputs = [(0,), (1,)]
    run = run_each(all_windows, inputs, "each rank has as many micro-batches: send in the last one")
    for number, (window, events) in enumerate(zip(WINDOWS, split_by_finish(run))):
        k = len(window[0])
        where = f"in window {number + 1}, of {k} micro-batch{'es' * (k > 1)}: "
        assert_last_backward_sends(where, k, events)
    for rank in (0, 1):
        for window, got in zip(WINDOWS, run[rank]):
            assert_window(window, rank, got)
    assert_keeps_to_axis(all_windows, inputs, run)
    assert_survives_an_error(Overlap)
    return "one sum a window, in its last backward, also where the data end early"


def assert_last_backward_sends(where: str, k: int, events: Sequence[Event]) -> None:
    """A message a parameter, all of them during backward k of k."""
    sent = [e for e in events if e.lane == "comm"]
    expected = len([*make_model().parameters()])
    if len(sent) != expected:
        fail(
            f"{where}expected {expected} messages, one a parameter, got {len(sent)}",
            "only the last backward of a window sends: no_sync for the others"
            if sent
            else "the data may end early: know the last one by looking for the next",
        )
    marks = sorted(e.start for e in events if e.name.startswith("ready "))
    finish = next(e for e in events if e.name == "finish")
    if any(e.start > finish.start for e in sent):
        fail(
            f"{where}messages begin in finish()",
            "leave no_sync for the last micro-batch, so that its backward overlaps them",
        )
    if k > 1 and any(e.start < marks[(k - 1) * expected - 1] for e in sent):
        fail(
            f"{where}messages begin before the last backward",
            "what later micro-batches add would stay on its rank, or race with the message",
        )


def window_gradients(window: tuple[list[int], ...]) -> list[Tensor]:
    """For each rank: a row for each micro-batch, of the gradient of its share of the loss."""
    total = sum(map(sum, window))
    return [each_alone(make_batches(c, r), scale=1 / total)[1] for r, c in enumerate(window)]


def assert_window(window: tuple[list[int], ...], rank: int, got: Tensor) -> None:
    grads = torch.stack(window_gradients(window))  # by rank and micro-batch
    each_time = torch.zeros(grads.shape[-1], dtype=grads.dtype)
    for of_all_ranks in grads.sum(0):
        each_time = len(window) * each_time + of_all_ranks  # the sum so far is on every rank
    assert_close(
        grads.sum((0, 1)),
        got,
        rank=rank,
        what=f"gradients of a window of {len(window[0])} micro-batches",
        mistakes={
            "that is this rank's own: no backward of the window has sent anything": (
                grads[rank].sum(0)
            ),
            "the first micro-batch was summed, and what came later stays on its rank: "
            "sync in the last one": grads[:, 0].sum(0) + grads[rank, 1:].sum(0),
            "each backward sums what earlier ones have summed already: no_sync for all but "
            "the last": each_time,
            "only the last micro-batch is there: param.grad adds up from one to the next": (
                grads[:, -1].sum(0)
            ),
        },
        hint="all micro-batches of all ranks, each once",
    )


def assert_survives_an_error(Overlap: Answer) -> None:
    def after_an_error(axis: Axis) -> bool:
        model = make_model()
        parallel, batch = Overlap(model, axis), make_batches([5])[0]
        reached = False
        try:
            with parallel.no_sync():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            reached = True
        model(batch.inputs_BS).sum().backward()
        parallel.finish()
        return reached

    run = run_each(after_an_error, [(), ()])
    if not run[0]:
        fail(
            "right, but an error inside no_sync() never reaches its caller",
            "finally, not except: whoever stops the program with Ctrl-C must be heard",
        )
    if not run.trace.of(lane="comm"):
        fail(
            "right, but after an error inside no_sync() nothing is sent any more",
            "put the old state back in a finally: somebody may catch the error and go on",
        )


@one_thread()
def two_faults(install_hooks: Answer, accumulate: Answer) -> str:
    def window(batches: list[Batch], counted: int, axis: Axis) -> tuple[Tensor, Tensor]:
        model, sync = make_model(), [True]
        before = weights_in_one_row(model)
        install_hooks(model, axis, sync)
        accumulate(model, batches, counted, sync)
        return grad_in_one_row(model), weights_in_one_row(model) - before

    def gradients(batches: list[Batch], counted: int, axis: Axis) -> Tensor:
        return window(batches, counted, axis)[0]

    for counts in (*WINDOWS[:2], ON_FOUR):
        total = sum(map(sum, counts))
        inputs = [(make_batches(c, rank), total) for rank, c in enumerate(counts)]
        run = run_each(window, inputs, "each rank has as many micro-batches: send in the last one")
        for rank, (grad, moved) in enumerate(run.values):
            if moved.abs().max() > 0:
                fail(
                    f"expected the weights as they were, they changed on rank {rank}",
                    "it is the gradient that must be summed over the ranks",
                )
            assert_window(counts, rank, grad)
        if counts is WINDOWS[1]:
            assert_keeps_to_axis(gradients, inputs, run_each(gradients, inputs))
    return "the gradient, not the weight; in the last micro-batch, not in the first"


def weights_in_one_row(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])
