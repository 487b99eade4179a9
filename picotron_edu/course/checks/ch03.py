"""Chapter 03, data parallelism: messages, weights of tokens, buckets, no_sync, two faults.

The judges of hooks and of the moments at which they send have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from picotron_edu.course.checking import exercise, run_on_ranks
from picotron_edu.course.checks import bucketing, syncing
from picotron_edu.course.checks.small_models import (
    each_alone,
    grad_in_one_row,
    make_batches,
    make_model,
    one_thread,
    set_grads,
)
from picotron_edu.course.comparing import assert_close, assert_keeps_to_axis, fail, run_each
from picotron_edu.data_parallel import DataParallel, Mode
from picotron_edu.ranks import Axis, Run, world

Answer = Callable[..., Any]

BYTES_HINTS = {  # said / counted
    1 / 4: "bytes, not elements: a float32 has 4 bytes",
    1 / 2: "an all-reduce is two rounds, a reduce-scatter and an all-gather",
    2 / 3: "that is N, the size of the gradients: a ring sends 2(n−1)/n of it",
    4 / 3: "2·N is for very many ranks: it is 2(n−1)/n",
    4: "what one rank sends, not all four together",
    3: "only the last of the three backward passes sends: the others add up",
}


@exercise("3.1", answers=4)
def messages_and_bytes(*predicted: float) -> str:
    def step(mode: Mode, accumulation: int) -> tuple[int, float]:
        model = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(12)))
        parallel, x = DataParallel(model, world(), mode, bucket_mb=0.025), torch.ones(1, 50)
        events = world().runtime.recorder.events  # type: ignore[union-attr]
        before = len(events)
        with parallel.no_sync():
            for _ in range(accumulation - 1):
                parallel(x).sum().backward()
        parallel(x).sum().backward()
        parallel.finish()
        sent = [event for event in events[before:] if event.name == "all_reduce"]
        return len(sent), sum(event.wire_bytes for event in sent)

    def steps() -> list[tuple[int, float]]:
        return [step("naive", 1), step("bucketed", 1), step("bucketed", 3)]

    (naive, _), (bucketed, once), (_, thrice) = run_on_ranks(steps, 4)[0]
    hints: dict[float, str] = {4: "of one rank: a message of all four is one call on each of them"}
    more = {
        5 / 6: "a gradient is not cut: of 10,000 bytes each, two fit into 25,000",
        2: "neighbours share a message while they fit: how many fit?",
    }
    counted: tuple[tuple[str, float, dict[float, str]], ...] = (
        ("naive_messages", naive, hints),
        ("bucketed_messages", bucketed, hints | more),
        ("bytes_of_a_step", once, BYTES_HINTS),
        ("bytes_of_three", thrice, BYTES_HINTS),
    )
    for (what, right, by_ratio), said in zip(counted, predicted, strict=True):
        assert_close(right, said, what=what, hints=by_ratio, hint="on four ranks it was counted")
    return "12 messages or 6, and 180,000 bytes a step: as you said, and as counted on four ranks"


@exercise("3.2")
@one_thread()
def token_weights(average_gradients: Answer) -> str:
    def average(own: Tensor, counted: int, axis: Axis) -> Tensor:
        model = make_model()
        set_grads(model, own)
        average_gradients([*model.parameters()], counted, axis)
        return grad_in_one_row(model)

    hang = "every rank must send, also one that has counted no token"
    for counts in ([3, 9], [5, 0, 12, 2]):
        n, total = len(counts), sum(counts)
        _, sums = each_alone(make_batches(counts))
        means = sums / torch.tensor(counts).clamp(min=1)[:, None]
        inputs = [(mean, counted) for mean, counted in zip(means, counts)]
        run = run_each(average, inputs, hang)
        for rank in range(n):
            assert_close(
                sums.sum(0) / total,
                run[rank],
                rank=rank,
                what=f"gradient of {n} ranks with {counts} tokens",
                mistakes=of_wrong_weights(sums, counts, rank),
                hints={1 / n: "sum what is weighted: dividing by the ranks again is too much"},
                hint="weigh each rank's mean by its share of all counted tokens, then add up",
            )
        assert_gradients_once(run, sums[0].nbytes)
        if n == 2:
            assert_keeps_to_axis(average, inputs, run)
    return "each token weighs the same, on whichever rank it is"


def of_wrong_weights(sums: Tensor, counts: Sequence[int], rank: int) -> dict[str, Tensor]:
    """Hint → the wrong gradient it belongs to. sums: each rank's, not divided by anything."""
    tokens = torch.tensor(counts).clamp(min=1)[:, None]
    means, total = sums / tokens, sum(counts)
    return {
        "a mean of means: a rank with few tokens must not weigh as much as one with many": (
            means.mean(0)
        ),
        "means cannot be added: weigh each by its rank's share of the tokens": means.sum(0),
        "that is the gradient of the sum: divide by the tokens of all ranks": sums.sum(0),
        "that is this rank's own part: the parts must be added up over the ranks": (
            sums[rank] / total
        ),
        "the tokens of all ranks, not of this one: all_reduce the count first": (
            sums.sum(0) / counts[rank] if counts[rank] else means[rank]
        ),
        "nothing has changed: write the result into param.grad": means[rank],
    }


def assert_gradients_once(run: Run, gradient_bytes: int) -> None:
    for rank in range(run.world_size):
        sent = sum(event.payload_bytes for event in run.trace.of(rank=rank, lane="comm"))
        if sent > gradient_bytes + 64:  # a count of each rank may be gathered
            fail(
                f"right, but expected {gradient_bytes:,} bytes of gradients and a count to travel, "
                f"got {sent:,} on rank {rank}",
                "weigh first, then one all_reduce of each gradient",
            )


bucketed_overlap = exercise("3.3")(bucketing.bucketed_overlap)
no_sync = exercise("3.4")(syncing.no_sync)
two_faults = exercise("3.5")(syncing.two_faults)
