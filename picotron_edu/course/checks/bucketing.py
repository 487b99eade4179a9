"""The check of bucketed gradients: what is summed, in how many messages, and how early.

When a message begins is judged by the order of events, never by the clock: a hook of the check runs
right after the learner's on the same parameter and leaves a mark in the trace. A message that a
bucket's last gradient has started therefore stands before the mark of that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.course.checks.small_models import grad_in_one_row, one_thread
from picotron_edu.course.comparing import assert_close, assert_keeps_to_axis, fail, run_each
from picotron_edu.ranks import Axis, Run, span
from picotron_edu.ranks.trace import Event

Answer = Callable[..., Any]
BUCKET_BYTES = 700
SHAPES = ((6, 20), (20, 6), (6, 6), (6, 6), (6, 6))


def layers() -> nn.Sequential:
    """Float64, the same weights everywhere; some gradients alone are larger than a bucket."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(*shape, dtype=torch.float64) for shape in SHAPES))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return model(torch.randn(3, 6, generator=draw, dtype=torch.float64)).square().sum()


def right_buckets() -> list[list[str]]:
    """Names, from the last parameter to the first, together while they fit."""
    buckets: list[list[str]] = []
    filled = BUCKET_BYTES
    for name, param in reversed([*layers().named_parameters()]):
        if filled + param.nbytes > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += param.nbytes
    return buckets


def mark_when_ready(model: nn.Module) -> None:
    """From now on each gradient leaves "ready <name>" in the trace, after the learner's hook."""

    def mark(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            with span(f"ready {name}"):
                pass

        return hook

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(mark(name))


@one_thread()
def bucketed_overlap(Buckets: Answer) -> str:
    def two_steps(seed: int, axis: Axis) -> Tensor:
        model = layers()
        buckets = Buckets(model, axis, BUCKET_BYTES)
        mark_when_ready(model)
        rows = []
        for step in (0, 1):
            model.zero_grad()
            before = messages_waited_for(axis)
            loss_of(model, seed + step).backward()
            if messages_waited_for(axis) > before:
                with span("waited"):
                    pass
            with span("finish"):
                buckets.finish()
            rows.append(grad_in_one_row(model))
        return torch.stack(rows)

    hang = "all ranks must send the same buckets in the same order, in each step"
    for n in (2, 4):
        inputs = [(10 * rank,) for rank in range(n)]
        run = run_each(two_steps, inputs, hang)
        own = torch.stack([own_gradients(seed) for (seed,) in inputs])
        for rank in range(n):
            for step in (0, 1):
                assert_close(
                    own[:, step].sum(0),
                    run[rank][step],
                    rank=rank,
                    what=f"gradients after finish() in step {step + 1}",
                    mistakes={
                        "that is this rank's own: finish() must wait for each message, and put "
                        "the sums into param.grad": own[rank, step],
                        "those are the sums of the step before: begin anew in finish()": (
                            own[:, 0].sum(0)
                        ),
                    },
                    hints={1 / n: "add up, do not average: the losses are parts already"},
                    hint="each gradient is the sum over the ranks, in its own place",
                )
        assert_buckets(run)
        if n == 2:
            assert_keeps_to_axis(two_steps, inputs, run)
    return f"{len(right_buckets())} messages in place of {2 * len(SHAPES)}, each as early as it can"


def messages_waited_for(axis: Axis) -> int:
    """A message is in the trace as soon as somebody has waited for it."""
    recorder = axis.runtime.recorder
    return sum(event.lane == "comm" for event in recorder.events) if recorder else 0


def own_gradients(seed: int) -> Tensor:
    rows = []
    for step in (0, 1):
        model = layers()
        loss_of(model, seed + step).backward()
        rows.append(grad_in_one_row(model))
    return torch.stack(rows)


def assert_buckets(run: Run) -> None:
    """On rank 0: how many messages, of how many bytes, and where they stand among the marks."""
    sizes = {name: param.nbytes for name, param in layers().named_parameters()}
    expected = [sum(sizes[name] for name in names) for names in right_buckets()]
    for step, events in enumerate(split_by_finish(run)):
        sent = [e for e in events if e.lane == "comm"]
        where = f"in step {step + 1}: "
        if any(e.name != "all_reduce" for e in sent):
            fail(f"{where}expected only all_reduce, got {sorted({e.name for e in sent})}")
        got = [e.payload_bytes for e in sent]
        if len(got) != len(expected):
            fail(
                f"right sums, but {where}expected {len(expected)} messages, got {len(got)}",
                "a bucket takes the next parameter as long as its bytes stay within bucket_bytes",
            )
        marks = [e for e in events if e.name.startswith("ready ")]
        finish = next(e for e in events if e.name == "finish")
        if all(e.start > finish.start for e in sent):
            fail(
                f"right sums, but {where}no message begins before finish()",
                "start a bucket's message in the hook that brings its last gradient",
            )
        if got != expected:
            fail(
                f"right sums, but {where}expected messages of {expected} bytes, got {got}",
                "fill buckets from the last parameter to the first: so backward meets them",
            )
        assert_early(where, sent, marks)
        if any(e.name == "waited" for e in events):
            fail(
                f"right sums, but {where}messages were waited for during backward",
                "all_reduce(…, async_op=True) returns at once; wait for its handle in finish()",
            )


def assert_early(where: str, sent: Sequence[Event], marks: Sequence[Event]) -> None:
    """Each begins with its last gradient."""
    for number, (event, names) in enumerate(zip(sent, right_buckets())):
        last = max(mark.start for mark in marks if mark.name.removeprefix("ready ") in names)
        if event.start > last:
            fail(
                f"right sums, but {where}message {number + 1} of {len(sent)} begins later than the "
                f"last gradient of its bucket comes",
                "count what a bucket still waits for, and start it in the hook when that is 0",
            )


def split_by_finish(run: Run) -> Iterator[list[Event]]:
    """The events of rank 0, step by step; a step ends with its finish()."""
    mine = [*run.trace.of(rank=0)]
    ends = [0.0, *(e.end for e in mine if e.name == "finish")]
    for begin, end in pairwise(ends):
        yield [e for e in mine if begin <= e.start < end]
