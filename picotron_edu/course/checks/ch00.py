"""Chapter 00, meet the ranks: predict bytes, average, gather, mend a deadlock, sum in few rounds.

Every answer runs on 2, 3 and 4 ranks (8 where rounds are counted) with other data on each rank, and
once over an axis that is only a part of the world. First the numbers, then the messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from picotron_edu.course.checking import ExerciseError, exercise, run_on_ranks
from picotron_edu.course.comparing import (
    UNSEEN,
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    fail,
    run_each,
)
from picotron_edu.ranks import (
    all_gather,
    all_reduce,
    all_to_all,
    receive,
    reduce_scatter,
    send,
    world,
)

Answer = Callable[..., Any]

BYTES_HINTS = {  # said / counted
    1 / 4: "bytes, not elements: a float32 has 4 bytes",
    3: "what one rank sends, not all three together",
    3 / 2: "n−1 of n pieces: the one that a rank keeps, or is last to get, it need not send",
}
MORE_BYTES_HINTS = {
    "all_reduce": {
        3 / 4: "two rounds, a reduce-scatter and an all-gather; in each, n−1 of n pieces",
        1 / 2: "that is one round: an all-reduce is a reduce-scatter, then an all-gather",
    },
    "all_gather": {
        1 / 3: "N is the size of the whole: here that is the gathered result, three times x",
        1 / 2: "one x in a step, but n−1 steps: a rank passes on what was passed to it",
    },
    "reduce_scatter": {1 / 2: "a rank keeps one piece and sends the n−1 others"},
    "all_to_all": {1 / 2: "a rank keeps one piece and sends the n−1 others"},
}


@exercise("0.1", answers=4)
def bytes_of_four_collectives(*predicted: float) -> str:
    def call_all_four() -> None:
        for collective in (all_reduce, all_gather, reduce_scatter, all_to_all):
            collective(torch.ones(1200), world())

    run = run_on_ranks(call_all_four, 3)
    for (name, more_hints), said in zip(MORE_BYTES_HINTS.items(), predicted, strict=True):
        assert_close(
            run.trace.wire_bytes(rank=0, operation=name),
            said,
            what=f"{name}_bytes",
            hints=BYTES_HINTS | more_hints,
            hint="one round of a ring sends (n−1)/n of the whole",
        )
    return "6,400 + 9,600 + 3,200 + 3,200 bytes: as you said, and as counted on three ranks"


@exercise("0.2")
def mean_of_unequal_counts(global_mean: Answer) -> str:
    for numbers in ([[2, 4, 6], [12]], [[], [5], [1, 3]], [[1, 2, 3], [], [10], [4, 8]]):
        inputs = [(torch.tensor(own, dtype=torch.float32),) for own in numbers]
        hint = "every rank must make the same calls, also a rank that has no values"
        run = run_each(global_mean, inputs, hint)
        everything = torch.cat([own for (own,) in inputs])
        means = [own.mean() for (own,) in inputs if len(own)]
        for rank in range(len(inputs)):
            mistakes = {
                "a mean of means: one of few values must not weigh as much as one of many": (
                    sum(means) / len(means)
                ),
                "divide by the number of values, not of ranks": everything.sum() / len(inputs),
                "that is the sum: divide it by the number of all values": everything.sum(),
                "a rank without values has no mean, 0/0 is nan: add up sums and counts": math.nan,
                "that is the mean of this rank's own values": inputs[rank][0].mean(),
            }
            hint = "add up the sums and the counts of all ranks, then divide once"
            assert_close(everything.mean(), run[rank], rank=rank, mistakes=mistakes, hint=hint)
        assert_messages(
            run,
            {"all_reduce": 1},
            hints={"all_gather": "every rank now gets n sums and n counts, and needs one of each"},
            hint="the sum and the count fit into one tensor: one message, one latency",
        )
        size = max(event.payload_bytes for event in run.trace.of(lane="comm"))
        if size > 16:  # two float64
            fail(f"expected an all_reduce of 2 numbers, got {size} bytes", "add up, then send")
    inputs = [(torch.tensor([1.0, 2.0]),), (torch.tensor([6.0]),)]
    assert_keeps_to_axis(global_mean, inputs, run_each(global_mean, inputs))
    return "sums and counts travel, means do not: two numbers a rank, however many values"


@exercise("0.3")
def gather_unequal_pieces(all_gather_uneven: Answer) -> str:
    for lengths in ([1, 3], [2, 0, 1], [1, 4, 0, 2]):
        n = len(lengths)
        pieces = [10 * rank + torch.arange(2 * m).view(m, 2) for rank, m in enumerate(lengths)]
        inputs = [(piece, lengths) for piece in pieces]
        hint = (
            "in one call send a piece right and receive one from the left, of its length and dtype"
        )
        run = run_each(all_gather_uneven, inputs, hint)
        for rank in range(n):
            came = torch.cat([pieces[rank - step] for step in range(n)])
            assert_close(
                torch.cat(pieces),
                run[rank],
                rank=rank,
                dtype=torch.int64,
                mistakes={"that is the order in which they came: piece i belongs at place i": came},
                hint="after n−1 steps return torch.cat of all pieces, in the order of the axis",
            )
        # A rank sends all but its right neighbour's piece: that one has come from there.
        needed = [16 * (sum(lengths) - lengths[(rank + 1) % n]) for rank in range(n)]
        sent = run.trace.wire_bytes(rank=0)
        padded = f"right, but {sent:,g} bytes where {needed[0]:,g} do: zeros need not travel"
        assert_messages(
            run,
            {"send_recv": n - 1},
            wire_bytes=needed,
            hints={"all_reduce": padded, "all_gather": padded},
            hint="n−1 steps to the right: first your own piece, then always the one that just came",
        )
        if n == 2:
            assert_keeps_to_axis(all_gather_uneven, inputs, run)
    return "n−1 steps, neighbours only, and not a byte of padding"


@exercise("0.4")
def mended_shift(shift_right: Answer) -> str:
    for n in (2, 3, 4):
        inputs = [(torch.tensor([10.0 * rank, rank + 1.0]),) for rank in range(n)]
        hint = "a send ends when it is received, so everybody must receive while everybody sends"
        run = run_each(shift_right, inputs, hint)
        for rank in range(n):
            mistakes = {
                "that came from the right: what goes to the right comes from the left": (
                    inputs[(rank + 1) % n][0]
                ),
                "that is this rank's own x": inputs[rank][0],
            }
            hint = "return the buffer (send_recv returns a list of them), once it is filled"
            assert_close(inputs[rank - 1][0], run[rank], rank=rank, mistakes=mistakes, hint=hint)
            sent = run.trace.wire_bytes(rank=rank)
            if sent != 8:
                hint = "x travels once, to one neighbour" if sent else UNSEEN
                fail(f"expected 8 bytes on the wire, got {sent:g} on rank {rank} of {n}", hint)
        if n == 2:
            assert_keeps_to_axis(shift_right, inputs, run)

    def rank_2_comes_late() -> None:
        axis, token = world(), torch.zeros(1)
        if axis.index == 2:
            receive(token, axis, source=0)  # when rank 0 is through
        shift_right(torch.ones(2), axis)
        if axis.index == 0:
            send(token, axis, to=2)

    try:
        run_on_ranks(rank_2_comes_late, 4)
    except ExerciseError:
        fail(
            "right, but the ranks take turns: on 4 ranks, expected rank 0 to wait for its "
            "neighbours 1 and 3 alone, got it waiting for rank 2 as well",
            "start the send and the receive together, in one call",
        )
    return "everybody sends and receives at once, and waits for nobody but its neighbours"


@exercise("0.5")
def recursive_doubling(doubling_all_reduce: Answer) -> str:
    draw = torch.Generator().manual_seed(0)
    for n in (2, 4, 8):
        x = [torch.randint(1, 100, (1, 3), generator=draw).double() / 10 for _ in range(n)]
        inputs, rounds = [(own,) for own in x], int(math.log2(n))
        hint = "two partners must call each other in the same round"
        run = run_each(doubling_all_reduce, inputs, hint)
        for rank in range(n):
            again = x[rank] + sum(x[rank ^ 2**k] for k in range(rounds))
            assert_close(
                sum(x),
                run[rank],
                rank=rank,
                what=f"on {n} ranks",
                dtype=torch.float64,
                hints={1 / n: "the sum, not the average"},
                mistakes={"in the next round send what you have added up, not x again": again},
                hint="in round k swap totals with the rank 2**k places away; add what comes",
                rtol=1e-12,
            )
        assert_messages(
            run,
            {"send_recv": rounds},
            wire_bytes=rounds * x[0].nbytes,
            hints={
                "all_reduce": "that is the one you are building: use send_recv",
                "send": "send_recv does both in one call",
                "receive": "send_recv does both in one call",
            },
            hint=f"each round doubles how many are added up: {rounds} will do for {n} ranks",
        )
        for rank in range(n):
            if not torch.equal(run[rank], run[0]):
                fail(
                    f"expected the same bits everywhere, got other last bits on rank {rank} of {n}",
                    "let partners swap: then both add the same two totals",
                )
        if n == 2:
            assert_keeps_to_axis(doubling_all_reduce, inputs, run)
    return "log2(n) rounds: fewer steps than a ring, more bytes, so the choice for small tensors"
