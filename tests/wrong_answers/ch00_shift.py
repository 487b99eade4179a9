"""Chapter 00, a deadlock to mend: the mistakes people make."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from picotron_edu.ranks import (
    all_gather,
    barrier,
    receive,
    send,
    send_recv,
)

# ---- 0.4 shift_right(x, axis) ----


def neighbours(axis):
    return (axis.index + 1) % axis.size, (axis.index - 1) % axis.size


def as_it_was(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    send(x, axis, right)
    receive(came, axis, left)
    return came


def all_receive_first(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    receive(came, axis, left)
    send(x, axis, right)
    return came


def sleeps_first(x, axis):
    time.sleep(0.1 * axis.index)
    return as_it_was(x, axis)


def a_barrier_between(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    send(x, axis, right)
    barrier(axis)
    receive(came, axis, left)
    return came


def rank_0_receives_first(x, axis):
    return (all_receive_first if axis.index == 0 else as_it_was)(x, axis)


def odd_ranks_receive_first(x, axis):
    return (all_receive_first if axis.index % 2 else as_it_was)(x, axis)


def gathers_everything(x, axis):
    return all_gather(x[None], axis)[axis.index - 1]


def nobody_waits_for_the_receive(x, axis):
    right, left = neighbours(axis)
    came = torch.zeros_like(x)
    receive(came, axis, left, async_op=True)
    result = came.clone()
    send(x, axis, right)
    return result


def receives_into_x(x, axis):
    right, left = neighbours(axis)
    send_recv(axis, sends=[(x.clone(), right)], receives=[(x, left)])
    return x


def shifts_to_the_left(x, axis):
    right, left = neighbours(axis)
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, left)], receives=[(came, right)])
    return came


def receives_where_it_sends(x, axis):
    right, _ = neighbours(axis)
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, right)], receives=[(came, right)])
    return came


def returns_x(x, axis):
    right, left = neighbours(axis)
    send_recv(axis, sends=[(x, right)], receives=[(torch.empty_like(x), left)])
    return x


def returns_the_list(x, axis):
    right, left = neighbours(axis)
    return send_recv(axis, [(x, right)], [(torch.empty_like(x), left)])


def global_neighbours(x, axis):
    right, left = (dist.get_rank() + 1) % axis.size, (dist.get_rank() - 1) % axis.size
    came = torch.empty_like(x)
    send_recv(axis, sends=[(x, right)], receives=[(came, left)])
    return came


WRONG_ANSWERS = (
    (
        "0.4",
        as_it_was,
        "on 2 ranks, the ranks wait for each other for ever: ranks 0, 1 wait in send",
    ),
    ("0.4", all_receive_first, "ranks 0, 1 wait in receive"),
    ("0.4", sleeps_first, "Hint: a send ends when it is received"),
    ("0.4", a_barrier_between, "ranks 0, 1 wait in send"),
    ("0.4", rank_0_receives_first, "right, but the ranks take turns"),
    ("0.4", odd_ranks_receive_first, "right, but the ranks take turns"),
    ("0.4", gathers_everything, "expected 8 bytes on the wire, got 16 on rank 0 of 3"),
    ("0.4", nobody_waits_for_the_receive, "all zeros. Hint: return the buffer"),
    ("0.4", receives_into_x, "your function changed its input from"),
    ("0.4", shifts_to_the_left, "Hint: that came from the right"),
    ("0.4", receives_where_it_sends, "on 3 ranks, the ranks wait for each other for ever"),
    ("0.4", returns_x, "Hint: that is this rank's own x"),
    (
        "0.4",
        returns_the_list,
        "got [[10, 2]] on rank 0. Hint: return the buffer (send_recv returns a list",
    ),
    ("0.4", global_neighbours, "in two pairs, 0 with 2 and 1 with 3"),
)
