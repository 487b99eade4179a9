"""Chapter 00, an all-reduce by hand: the mistakes people make."""

from __future__ import annotations

import torch
import torch.distributed as dist

from picotron_edu.ranks import (
    all_gather,
    all_reduce,
    receive,
    send,
    send_recv,
)

# ---- 0.5 doubling_all_reduce(x, axis) ----


def neighbours(axis):
    return (axis.index + 1) % axis.size, (axis.index - 1) % axis.size


def swap(x, axis, partner):
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, partner)], receives=[(came, partner)])
    return came


def calls_all_reduce(x, axis):
    return all_reduce(x.clone(), axis)


def all_reduce_in_place(x, axis):
    return all_reduce(x, axis)


def gathers_and_sums(x, axis):
    return all_gather(x[None], axis).sum(0)


def once_round_the_ring(x, axis):
    total, leaving = x.clone(), x
    for _ in range(axis.size - 1):
        came = torch.empty_like(x)
        right, left = neighbours(axis)
        send_recv(axis, sends=[(leaving, right)], receives=[(came, left)])
        total, leaving = total + came, came
    return total


def sends_x_again(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total += swap(x, axis, axis.index ^ distance)
        distance *= 2
    return total


def adds_to_x(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total = x + swap(total, axis, axis.index ^ distance)
        distance *= 2
    return total


def adds_in_place(x, axis):
    distance = 1
    while distance < axis.size:
        x += swap(x, axis, axis.index ^ distance)
        distance *= 2
    return x


def averages(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total = (total + swap(total, axis, axis.index ^ distance)) / 2
        distance *= 2
    return total


def never_doubles(x, axis):
    total = x.clone()
    for distance in range(1, axis.size):
        total += swap(total, axis, axis.index ^ distance)
    return total


def swaps_with_itself(x, axis):
    total = x.clone()
    for k in range(axis.size.bit_length() - 1):
        total += swap(total, axis, axis.index ^ k)
    return total


def partner_to_the_right(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        total += swap(total, axis, (axis.index + distance) % axis.size)
        distance *= 2
    return total


def passes_on_to_the_right(x, axis):
    """Dissemination: right in log2(n) rounds, but each rank adds in another order."""
    total, distance = x.clone(), 1
    while distance < axis.size:
        to, source = (axis.index + distance) % axis.size, (axis.index - distance) % axis.size
        came = torch.empty_like(total)
        send_recv(axis, sends=[(total, to)], receives=[(came, source)])
        total = total + came
        distance *= 2
    return total


def blocking_messages(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        came = torch.empty_like(total)
        send(total, axis, axis.index ^ distance)
        receive(came, axis, axis.index ^ distance)
        total += came
        distance *= 2
    return total


def one_of_two_sends_first(x, axis):
    total, distance = x.clone(), 1
    while distance < axis.size:
        came, partner = torch.empty_like(total), axis.index ^ distance
        if axis.index < partner:
            send(total, axis, partner)
            receive(came, axis, partner)
        else:
            receive(came, axis, partner)
            send(total, axis, partner)
        total += came
        distance *= 2
    return total


def float32_totals(x, axis):
    total, distance = x.float(), 1
    while distance < axis.size:
        total = total + swap(total, axis, axis.index ^ distance)
        distance *= 2
    return total


def flat_totals(x, axis):
    total, distance = x.flatten().clone(), 1
    while distance < axis.size:
        total += swap(total, axis, axis.index ^ distance)
        distance *= 2
    return total


def tree(x, axis):
    """Up to rank 0 and down again: log2(n) rounds twice, and ranks that do nothing in most."""
    total, distance = x.clone(), 1
    while distance < axis.size:
        if axis.index % (2 * distance) == distance:
            send_recv(axis, sends=[(total, axis.index - distance)])
        elif axis.index % (2 * distance) == 0:
            came = torch.empty_like(total)
            send_recv(axis, receives=[(came, axis.index + distance)])
            total += came
        distance *= 2
    while distance > 1:
        distance //= 2
        if axis.index % (2 * distance) == distance:
            send_recv(axis, receives=[(total, axis.index - distance)])
        elif axis.index % (2 * distance) == 0:
            send_recv(axis, sends=[(total, axis.index + distance)])
    return total


def calls_torch(x, axis):
    total = x.clone()
    dist.all_reduce(total, group=axis.group)
    return total


WRONG_ANSWERS = (
    (
        "0.5",
        calls_all_reduce,
        "got 1 × all_reduce on rank 0. Hint: that is the one you are building",
    ),
    ("0.5", all_reduce_in_place, "your function changed its input from"),
    ("0.5", gathers_and_sums, "expected 1 × send_recv, got 1 × all_gather"),
    (
        "0.5",
        once_round_the_ring,
        "expected 2 × send_recv, got 3 × send_recv on rank 0. Hint: each round",
    ),
    ("0.5", sends_x_again, "Hint: in the next round send what you have added up, not x again"),
    ("0.5", adds_to_x, "Hint: in round k swap totals with the rank 2**k places away"),
    ("0.5", adds_in_place, "your function changed its input from"),
    ("0.5", averages, "2 times too small. Hint: the sum, not the average"),
    ("0.5", never_doubles, "on 4 ranks: expected"),
    ("0.5", swaps_with_itself, "is this rank itself"),
    ("0.5", partner_to_the_right, "Hint: two partners must call each other in the same round"),
    ("0.5", passes_on_to_the_right, "expected the same bits everywhere"),
    ("0.5", blocking_messages, "Hint: two partners must call each other in the same round"),
    ("0.5", one_of_two_sends_first, "Hint: send_recv does both in one call"),
    ("0.5", float32_totals, "expected torch.float64, got torch.float32 on rank 0"),
    ("0.5", flat_totals, "expected shape (1, 3), got (3,) on rank 0"),
    ("0.5", tree, "expected 1 × send_recv, got 2 × send_recv"),
    ("0.5", calls_torch, "expected 1 × send_recv, got no messages on rank 0. Hint: messages count"),
)
