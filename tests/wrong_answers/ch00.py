"""Chapter 00, bytes and averages: the mistakes people make, and what must be said to them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from picotron_edu.ranks import (
    all_gather,
    all_reduce,
    world,
)

# ---- 0.2 global_mean(values, axis) ----


def mean_of_means(values, axis):
    return all_reduce(values.mean(), axis, op="avg")


def mean_of_means_that_skips_the_empty(values, axis):
    mean_and_one = torch.stack([values.mean(), torch.tensor(1.0)])
    if len(values) == 0:
        mean_and_one.zero_()
    all_reduce(mean_and_one, axis)
    return mean_and_one[0] / mean_and_one[1]


def divides_by_ranks(values, axis):
    return all_reduce(values.sum(), axis, op="avg")


def forgets_to_divide(values, axis):
    return all_reduce(values.sum(), axis)


def stays_at_home(values, axis):
    return values.mean()


def empty_rank_stays_away(values, axis):
    if len(values) == 0:
        return torch.tensor(0.0)
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, axis)
    return total[0] / total[1]


def two_messages(values, axis):
    total = all_reduce(values.sum(), axis)
    count = all_reduce(torch.tensor(float(len(values))), axis)
    return total / count


def gathers_the_values(values, axis):
    return all_gather(values, axis).mean()


def gathers_sums_and_counts(values, axis):
    pairs = all_gather(torch.tensor([[values.sum(), len(values)]]), axis)
    return pairs[:, 0].sum() / pairs[:, 1].sum()


def a_slot_for_each_rank(values, axis):
    slots = torch.zeros(2, axis.size)
    slots[:, axis.index] = torch.tensor([values.sum(), len(values)])
    all_reduce(slots, axis)
    return slots[0].sum() / slots[1].sum()


def returns_nothing(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, axis)
    total[0] / total[1]


def returns_one_number_as_a_list(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, axis)
    return total[:1] / total[1:]


def asks_the_world(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    all_reduce(total, world())
    return total[0] / total[1]


def goes_round_the_trace(values, axis):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def sums_in_place(values, axis):
    counts = torch.tensor([float(len(values))])
    values[:1] = values.sum()
    total = torch.cat([values[:1] if len(values) else torch.zeros(1), counts])
    all_reduce(total, axis)
    return total[0] / total[1]


def misspells(values, axis):
    return values.summ()


WRONG_ANSWERS = (
    (
        "0.1",
        (4800, 9600, 3200, 3200),
        "all_reduce_bytes: expected 6400, got 4800. Hint: two rounds",
    ),
    ("0.1", (3200, 9600, 3200, 3200), "2 times too small. Hint: that is one round"),
    ("0.1", (9600, 9600, 3200, 3200), "need not send"),
    (
        "0.1",
        (6400, 3200, 3200, 3200),
        "all_gather_bytes: expected 9600, got 3200: 3 times too small",
    ),
    ("0.1", (6400, 14400, 3200, 3200), "Hint: n−1 of n pieces"),
    ("0.1", (6400, 9600, 800, 3200), "4 times too small. Hint: bytes, not elements"),
    ("0.1", (6400, 9600, 9600, 3200), "Hint: what one rank sends, not all three together"),
    ("0.1", (6400, 9600, 3200, 4800), "all_to_all_bytes: expected 3200, got 4800. Hint: n−1"),
    ("0.1", (6400, 9600, 3200, 1600), "2 times too small. Hint: a rank keeps one piece"),
    ("0.1", (6400, 9600, 3200, "a third"), "expected 3200, got 'a third'"),
    ("0.2", mean_of_means, "expected 6, got 8 on rank 0. Hint: a mean of means"),
    ("0.2", mean_of_means_that_skips_the_empty, "Hint: a mean of means"),
    ("0.2", divides_by_ranks, "Hint: divide by the number of values, not of ranks"),
    ("0.2", forgets_to_divide, "4 times too large. Hint: that is the sum"),
    ("0.2", stays_at_home, "Hint: that is the mean of this rank's own values"),
    ("0.2", empty_rank_stays_away, "Hint: every rank must make the same calls"),
    (
        "0.2",
        two_messages,
        "expected 1 × all_reduce, got 2 × all_reduce on rank 0. Hint: the sum and",
    ),
    ("0.2", gathers_the_values, "on 2 ranks, the ranks do not agree on what they call"),
    ("0.2", gathers_sums_and_counts, "got 1 × all_gather on rank 0. Hint: every rank now gets n"),
    ("0.2", a_slot_for_each_rank, "expected an all_reduce of 2 numbers, got 24 bytes"),
    ("0.2", returns_nothing, "got None on rank 0. Hint: does your function return its result?"),
    ("0.2", returns_one_number_as_a_list, "expected shape (), got (1,) on rank 0"),
    (
        "0.2",
        asks_the_world,
        "in two pairs, 0 with 2 and 1 with 3: expected messages over axis 'dp'",
    ),
    ("0.2", goes_round_the_trace, "got no messages on rank 0. Hint: messages count when"),
    ("0.2", sums_in_place, "your function changed its input from [2, 4, 6] to [12, 4, 6]"),
    ("0.2", misspells, "AttributeError: 'Tensor' object has no attribute 'summ'"),
)
