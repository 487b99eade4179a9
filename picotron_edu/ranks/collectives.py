"""Every message between ranks, and nothing else, is sent from here.

    operation        before (rank 0 | rank 1)      after               bytes a rank sends (ring)
    broadcast        a        | ·                  a      | a          (n−1)/n · N
    all_reduce       a        | b                  a+b    | a+b        2(n−1)/n · N
    reduce_scatter   a0 a1    | b0 b1              a0+b0  | a1+b1      (n−1)/n · N
    all_gather       a        | b                  a b    | a b        (n−1)/n · N, N the result
    all_to_all       a0 a1    | b0 b1              a0 b0  | a1 b1      (n−1)/n · N

Messages between two ranks are in `point_to_point.py`, the autograd versions in `pairs.py`.

Each takes an `Axis` and is a no-op when its size is 1. What torch leaves to the caller is done here
once: strided tensors are copied to contiguous ones and back (gloo reads them wrongly, silently);
fp8 travels as bytes; shapes and types are compared before anything is sent; sources are places on
the axis, never global ranks; old and new torch names are bridged. With `async_op=True` a `Handle`
is returned: compute, then `handle.wait()` for the result. Each message leaves one event in the
trace.

Source: torch.distributed; ring bytes from Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .handle import Arrived, Handle, describe
from .mesh import Axis

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # then divided here: not every backend has an average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# torch has renamed these two; whichever exists is the same call
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wire(x: Tensor) -> Tensor:
    """`x` as it may travel: without history, contiguous, fp8 seen as bytes."""
    x = x.detach().contiguous()
    return x.view(torch.uint8) if x.dtype in FP8 else x


def reducible(x: Tensor, op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op={op!r}: must be one of {', '.join(OPS)}")
    if x.dtype in FP8:
        raise ValueError(
            f"{x.dtype} cannot be summed in 8 bits: convert to bfloat16 or float32 first"
        )
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"op='avg' on {x.dtype}: an average of integers is not an integer, use 'sum'"
        )


def place(axis: Axis, name: str, place: int) -> int:
    """Check a place on the axis; returns its global rank."""
    if not 0 <= place < axis.size:
        raise ValueError(
            f"{name}={place}: axis '{axis.name}' has places 0 to {axis.size - 1} "
            f"(a place on the axis, not a global rank; it holds the ranks {axis.ranks})"
        )
    return axis.ranks[place]


def begin(handle: Handle, async_op: bool) -> Any:
    return handle.record_true_end() if async_op else handle.wait()


def at_once(result: Any, async_op: bool) -> Any:
    return Arrived(result) if async_op else result


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", async_op: bool = False) -> Any:
    """Combine `x` over the ranks of `axis`, in place; every rank gets the result.

    op: "sum", "avg", "max", "min" or "prod". Returns `x`, or a Handle whose wait() returns it.
    """
    reducible(x, op)
    if axis.size == 1 or x.numel() == 0:
        return at_once(x, async_op)
    data = wire(x)  # the memory of x itself, unless x is strided

    def start() -> list[dist.Work | None]:
        return [dist.all_reduce(data, OPS[op], group=axis.group, async_op=True)]

    def finish() -> Tensor:
        if op == "avg":
            data.div_(axis.size)
        return x if data.data_ptr() == x.data_ptr() else copy_back(x, data)

    what = f"all_reduce({describe(x)}, {op})"
    return begin(Handle(axis, "all_reduce", what, data.nbytes, start, finish), async_op)


def copy_back(x: Tensor, data: Tensor) -> Tensor:
    with torch.no_grad():
        return x.copy_(data.view(x.dtype))


def broadcast(x: Tensor, axis: Axis, src: int = 0, async_op: bool = False) -> Any:
    """Overwrite `x`, in place, with the `x` of place `src` on the axis. Returns `x` or a Handle."""
    source = place(axis, "src", src)
    if axis.size == 1 or x.numel() == 0:
        return at_once(x, async_op)
    data = wire(x)

    def start() -> list[dist.Work | None]:
        return [dist.broadcast(data, source, group=axis.group, async_op=True)]

    def finish() -> Tensor:
        return x if data.data_ptr() == x.data_ptr() else copy_back(x, data)

    what = f"broadcast({describe(x)}, src={src})"
    return begin(Handle(axis, "broadcast", what, data.nbytes, start, finish), async_op)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, async_op: bool = False) -> Any:
    """All ranks' `x`, concatenated along `dim` in the order of the axis; equal shapes everywhere.

    Returns a new tensor, `dim` being `axis.size` times as long, or a Handle for it.
    """
    if axis.size == 1 or x.numel() == 0:
        whole = x.detach() if axis.size == 1 else torch.cat([x.detach()] * axis.size, dim)
        return at_once(whole.clone(), async_op)
    data = wire(x)
    parts = data.new_empty(axis.size, *data.shape)

    def start() -> list[dist.Work | None]:
        return [_all_gather(parts.view(-1), data.view(-1), group=axis.group, async_op=True)]

    def finish() -> Tensor:
        whole = parts.flatten(0, 1) if dim == 0 and x.dim() else torch.cat([*rows(parts)], dim)
        return whole.view(x.dtype)

    what = f"all_gather({describe(x)})"
    return begin(Handle(axis, "all_gather", what, parts.nbytes, start, finish), async_op)


def rows(parts: Tensor) -> list[Tensor]:
    """One tensor a rank; numbers become vectors of length 1, so that they can be concatenated."""
    return [part if part.dim() else part.view(1) for part in parts.unbind(0)]


def reduce_scatter(
    x: Tensor, axis: Axis, dim: int = 0, op: str = "sum", async_op: bool = False
) -> Any:
    """Combine `x` over the ranks; rank i of the axis gets the i-th piece along `dim`.

    x.shape[dim] must be divisible by axis.size. Returns a new tensor, or a Handle for it.
    """
    reducible(x, op)
    if x.dim() == 0 or x.shape[dim] % axis.size:
        raise ValueError(
            f"reduce_scatter cuts dim {dim} of shape {list(x.shape)} into axis.size={axis.size} "
            f"pieces: it must be divisible"
        )
    pieces = x.detach().chunk(axis.size, dim)
    if axis.size == 1 or x.numel() == 0:
        return at_once(pieces[0].clone(), async_op)
    data = x.detach().contiguous() if dim == 0 else torch.cat([p.flatten() for p in pieces])
    piece = data.new_empty(pieces[0].shape)

    def start() -> list[dist.Work | None]:
        flat = piece.view(-1), data.view(-1)
        return [_reduce_scatter(*flat, op=OPS[op], group=axis.group, async_op=True)]

    def finish() -> Tensor:
        return piece.div_(axis.size) if op == "avg" else piece

    what = f"reduce_scatter({describe(x)}, dim={dim}, {op})"
    return begin(Handle(axis, "reduce_scatter", what, data.nbytes, start, finish), async_op)


def all_to_all(
    x: Tensor,
    axis: Axis,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Send the i-th part of `x` (along dim 0) to place i; returns what came, in the order of the
    axis.

    send_counts[i] rows go to place i, receive_counts[i] rows come from it (0 is allowed); without
    counts x.shape[0] must be divisible by axis.size. Returns a new tensor, or a Handle for it.
    """
    if send_counts is None and receive_counts is None:
        if x.shape[0] % axis.size:
            raise ValueError(
                f"all_to_all cuts {x.shape[0]} rows into axis.size={axis.size} equal parts: "
                f"it must be divisible, or give send_counts and receive_counts"
            )
        send_counts = receive_counts = [x.shape[0] // axis.size] * axis.size
    if send_counts is None or receive_counts is None:
        raise ValueError("give both send_counts and receive_counts, or neither")
    for name, counts in (("send_counts", send_counts), ("receive_counts", receive_counts)):
        if len(counts) != axis.size or min(counts) < 0:
            raise ValueError(f"{name}={list(counts)}: must be {axis.size} numbers, none negative")
    if sum(send_counts) != x.shape[0]:
        raise ValueError(f"send_counts={list(send_counts)} must sum to the {x.shape[0]} rows of x")
    if axis.size == 1:
        return at_once(x.detach().clone(), async_op)
    data = wire(x)
    came = data.new_empty(sum(receive_counts), *data.shape[1:])
    sizes = {"output_split_sizes": list(receive_counts), "input_split_sizes": list(send_counts)}
    pairs: list[tuple[str, int, Tensor]] = []  # both ends of each part must agree on its rows
    for place in (i for i in range(axis.size) if i != axis.index):
        pairs.append(("send", place, data[: send_counts[place]]))
        pairs.append(("receive", place, came[: receive_counts[place]]))
    stays = data[: send_counts[axis.index]].nbytes

    def start() -> list[dist.Work | None]:
        return [dist.all_to_all_single(came, data, **sizes, group=axis.group, async_op=True)]

    def finish() -> Tensor:
        return came.view(x.dtype)

    what = f"all_to_all({describe(x[:0])})"
    handle = Handle(axis, "all_to_all", what, data.nbytes, start, finish, pairs)
    handle.wire_bytes = data.nbytes - stays  # (n−1)/n · N where the parts are equal
    return begin(handle, async_op)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has come here."""
    if axis.size > 1:
        Handle(
            axis,
            "barrier",
            "barrier",
            0,
            lambda: [dist.barrier(group=axis.group, async_op=True)],
            lambda: None,
        ).wait()
