"""Messages from one rank to one other rank: N bytes for a message of N bytes.

A send is a *rendezvous*: it ends when the other side receives. Two ranks that both send first wait
for each other for ever, whatever the size, and so does a ring of them:

    rank 0: send to 1, then receive          rank 0: send_recv(send to 1, receive from 1)
    rank 1: send to 0, then receive          rank 1: send_recv(send to 0, receive from 0)
            deadlock                                 both are under way at once: fine

Pipelines and rings therefore use `send_recv`, one batched call for all of a rank's messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .checks import check_axis, check_message, check_parts, check_writable, global_rank
from .collectives import copy_back, result_or_handle, wire
from .handle import Handle, describe
from .mesh import Axis

Send = tuple[Tensor, int]  # what, and to which place on the axis
Receive = tuple[Tensor, int]  # into which buffer, and the source: from which place on the axis


def send_recv(
    axis: Axis, sends: Sequence[Send] = (), receives: Sequence[Receive] = (), async_op: bool = False
) -> Any:
    """All of a rank's sends and receives in one call, so that no order of them can deadlock.

    sends: (tensor, to which place); receives: (buffer, source place); shapes and types of the two
    ends must agree. Returns the filled buffers, or a Handle for them. Between one pair of ranks
    messages match in the order given: on an axis of 2 the left neighbour *is* the right one.
    """
    check_axis(axis)
    check_parts("sends", sends, axis)
    check_parts("receives", receives, axis)
    return _point_to_point("send_recv", axis, sends, receives, async_op)


def send(x: Tensor, axis: Axis, to: int, async_op: bool = False) -> Any:
    """Send `x` to place `to`; blocks until its receive is posted there, at any size.

    With async_op=True it returns a Handle at once, and its wait() blocks.
    """
    check_message(x, axis)
    return _point_to_point("send", axis, [(x, to)], [], async_op)


def receive(buffer: Tensor, axis: Axis, source: int, async_op: bool = False) -> Any:
    """Fill `buffer` with what place `source` sends; returns [buffer] or a Handle for it."""
    check_message(buffer, axis, "buffer")
    return _point_to_point("receive", axis, [], [(buffer, source)], async_op)


def _point_to_point(
    operation: str, axis: Axis, sends: Sequence[Send], receives: Sequence[Receive], async_op: bool
) -> Any:
    for name, other in [("to", to) for _, to in sends] + [("source", at) for _, at in receives]:
        if global_rank(axis, name, other) == axis.ranks[axis.index]:
            raise ValueError(f"{name}={other} is this rank itself: nothing need be sent")
    for buffer, _ in receives:
        check_writable("buffer", buffer)
    out = [(wire(x), axis.ranks[to]) for x, to in sends]
    into = [(wire(buffer), axis.ranks[at]) for buffer, at in receives]

    def start() -> list[dist.Work]:
        ops = [dist.P2POp(dist.isend, x, rank, axis.group) for x, rank in out if x.numel()]
        ops += [dist.P2POp(dist.irecv, x, rank, axis.group) for x, rank in into if x.numel()]
        return dist.batch_isend_irecv(ops) if ops else []

    def finish() -> list[Tensor]:
        return [copy_back(buffer, data) for (buffer, _), (data, _) in zip(receives, into)]

    parts = [f"send {describe(x)} to rank {axis.ranks[to]}" for x, to in sends]
    parts += [f"receive {describe(x)} from rank {axis.ranks[at]}" for x, at in receives]
    what = ", ".join(parts)
    if operation == "send_recv":
        what = f"send_recv({what})"
    leaves, comes = (sum(x.nbytes for x, _ in part) for part in (out, into))
    handle = Handle(
        axis,
        operation,
        what,
        comes if operation == "receive" else leaves,
        start,
        finish,
        messages=[("send", to, describe(x)) for x, to in sends]
        + [("receive", at, describe(x)) for x, at in receives],
        collective=False,
    )
    handle.link_bytes = max(leaves, comes)  # a link carries both directions at once
    return result_or_handle(handle, async_op)
