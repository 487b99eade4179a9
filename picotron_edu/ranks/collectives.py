"""The collectives: messages in which all ranks of an axis take part.

    operation        before (rank 0 | rank 1)      after               bytes a rank sends (ring)
    broadcast        a        | ·                  a      | a          (n−1)/n · N, the mean
    all_reduce       a        | b                  a+b    | a+b        2(n−1)/n · N
    reduce_scatter   a0 a1    | b0 b1              a0+b0  | a1+b1      (n−1)/n · N
    all_gather       a        | b                  a b    | a b        (n−1)/n · N, N the result
    all_to_all       a0 a1    | b0 b1              a0 b0  | a1 b1      (n−1)/n · N
    barrier          nobody goes on before all have come                0

Messages between two ranks are in `point_to_point.py`, the autograd versions in `pairs.py`.

Each takes an `Axis` and sends nothing when its size is 1. What torch leaves to the caller is done
here once: strided tensors are copied to contiguous ones and back (gloo reads them wrongly,
silently); fp8 travels as bytes; for empty tensors the ranks only meet (gloo hangs on some); shapes
and types are compared before anything is sent; sources are places on the axis, never global ranks;
old and new torch names are bridged. With `async_op=True` a `Handle` is returned: compute, then
`handle.wait()` for the result. Each message leaves one event in the trace.

Source: torch.distributed; ring bytes from Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import (
    OPS,
    check_axis,
    check_message,
    check_out,
    check_reducible,
    check_writable,
    dim_to_cut,
    global_rank,
    is_fp8,
    row_counts,
    which_dim,
)
from .handle import Arrived, Handle, describe
from .mesh import Axis

# torch has renamed these two; whichever exists is the same call
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wire(x: Tensor) -> Tensor:
    """`x` as it may travel: without history, contiguous, fp8 seen as bytes."""
    x = x.detach().contiguous()
    return x.view(torch.uint8) if is_fp8(x) else x


def copy_back(x: Tensor, data: Tensor) -> Tensor:
    """Bring what came back into `x`, if `data` is not the memory of `x` itself."""
    if data.data_ptr() != x.data_ptr():
        with torch.no_grad():
            x.copy_(data.view(x.dtype))
    return x


def meet(axis: Axis) -> list[dist.Work | None]:
    """What is started in place of a message without content."""
    return [dist.barrier(group=axis.group, async_op=True)]


def result_or_handle(handle: Handle, async_op: bool) -> Any:
    """The message is under way: hand out its handle, or wait here for its result."""
    return handle.record_true_end() if async_op else handle.wait()


def at_once(result: Any, async_op: bool) -> Any:
    """The same where nothing need be sent."""
    return Arrived(result) if async_op else result


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", async_op: bool = False) -> Any:
    """Combine `x` over the ranks of `axis`, in place; every rank gets the result.

    op: "sum", "avg", "max", "min" or "prod". Returns `x`, or a Handle whose wait() returns it.
    """
    check_message(x, axis)
    check_reducible(x, op)
    check_writable("x", x)
    if axis.size == 1:
        return at_once(x, async_op)
    data = wire(x)  # the memory of x itself, unless x is strided

    def start() -> list[dist.Work | None]:
        if not data.numel():
            return meet(axis)
        return [dist.all_reduce(data, OPS[op], group=axis.group, async_op=True)]

    def finish() -> Tensor:
        return copy_back(x, data.div_(axis.size) if op == "avg" else data)

    what = f"all_reduce({describe(x)}, {op})"
    return result_or_handle(Handle(axis, "all_reduce", what, data.nbytes, start, finish), async_op)


def broadcast(x: Tensor, axis: Axis, src: int = 0, async_op: bool = False) -> Any:
    """Overwrite `x`, in place, with the `x` of place `src` on the axis. Returns `x` or a Handle."""
    check_message(x, axis)
    source = global_rank(axis, "src", src)
    check_writable("x", x)
    if axis.size == 1:
        return at_once(x, async_op)
    data = wire(x)

    def start() -> list[dist.Work | None]:
        if not data.numel():
            return meet(axis)
        return [dist.broadcast(data, source, group=axis.group, async_op=True)]

    what = f"broadcast({describe(x)}, src={src})"
    handle = Handle(axis, "broadcast", what, data.nbytes, start, lambda: copy_back(x, data))
    return result_or_handle(handle, async_op)


def all_gather(
    x: Tensor,
    axis: Axis,
    dim: int = 0,
    async_op: bool = False,
    out: Tensor | None = None,
    label: str = "",
) -> Any:
    """All ranks' `x`, concatenated along `dim` in the order of the axis; equal shapes everywhere.

    Returns a new tensor, `dim` being `axis.size` times as long, or a Handle for it. A single number
    a rank becomes a vector. out: where the result goes, in place of new memory (dim 0 only).
    label: what is gathered, as reports shall name it; must be the same on all ranks.
    """
    check_message(x, axis)
    dim = which_dim(x, dim)
    data = wire(x if x.dim() else x.view(1))
    if out is not None:
        check_out(out, x.dtype, axis.size * data.numel(), dim)
    if axis.size == 1:
        result = data.view(x.dtype).clone() if out is None else copy_back(out, data.view_as(out))
        return at_once(result, async_op)
    shape = axis.size, *data.shape
    parts = data.new_empty(shape) if out is None else wire(out).view(shape)

    def start() -> list[dist.Work | None]:
        if not data.numel():
            return meet(axis)
        return [_all_gather(parts.view(-1), data.view(-1), group=axis.group, async_op=True)]

    def finish() -> Tensor:
        whole = parts.flatten(0, 1) if dim == 0 else torch.cat([*parts], dim)
        return whole.view(x.dtype) if out is None else out

    what = f"all_gather({describe(x)}, dim={dim})" + label
    return result_or_handle(Handle(axis, "all_gather", what, parts.nbytes, start, finish), async_op)


def reduce_scatter(
    x: Tensor, axis: Axis, dim: int = 0, op: str = "sum", async_op: bool = False, label: str = ""
) -> Any:
    """Combine `x` over the ranks; place i of the axis gets the i-th piece along `dim`.

    op: as for all_reduce. x.shape[dim] must be divisible by axis.size. label: as for all_gather.
    Returns a new tensor, or a Handle for it.
    """
    check_message(x, axis)
    check_reducible(x, op)
    dim = dim_to_cut("reduce_scatter", x, dim, axis)
    if axis.size == 1:
        return at_once(x.detach().clone(), async_op)
    pieces = x.detach().tensor_split(axis.size, dim)
    data = wire(x) if dim == 0 else torch.cat([p.flatten() for p in pieces])
    piece = data.new_empty(pieces[0].shape)

    def start() -> list[dist.Work | None]:
        if not data.numel():
            return meet(axis)
        flat = piece.view(-1), data.view(-1)
        return [_reduce_scatter(*flat, op=OPS[op], group=axis.group, async_op=True)]

    def finish() -> Tensor:
        return piece.div_(axis.size) if op == "avg" else piece

    what = f"reduce_scatter({describe(x)}, dim={dim}, {op})" + label
    handle = Handle(axis, "reduce_scatter", what, data.nbytes, start, finish)
    return result_or_handle(handle, async_op)


def all_to_all(
    x: Tensor,
    axis: Axis,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    async_op: bool = False,
) -> Any:
    """Send the i-th part of `x` (along dim 0) to place i; returns what came, in axis order.

    send_counts[i] rows go to place i, receive_counts[i] rows come from it (0 is allowed); without
    counts x.shape[0] must be divisible by axis.size. Returns a new tensor, or a Handle for it.
    """
    check_message(x, axis)
    out, into = row_counts(x, axis, send_counts, receive_counts)
    if axis.size == 1:
        return at_once(x.detach().clone(), async_op)
    data = wire(x)
    came = data.new_empty(sum(into), *data.shape[1:])
    row = x.new_empty(x.shape[1:])  # the counts may differ between ranks, the rows may not

    def start() -> list[dist.Work | None]:
        if not row.numel():
            return meet(axis)
        return [dist.all_to_all_single(came, data, into, out, group=axis.group, async_op=True)]

    others = [i for i in range(axis.size) if i != axis.index]
    handle = Handle(
        axis,
        "all_to_all",
        f"all_to_all(rows of {describe(row)})",
        data.nbytes,
        start,
        lambda: came.view(x.dtype),
        # both ends of each part must agree on its rows
        messages=[("give", i, f"{out[i]} rows") for i in others]
        + [("take", i, f"{into[i]} rows") for i in others],
        detail=f", {out} rows sent, {into} rows received",
    )
    # (n−1)/n · N where the parts are equal
    handle.wire_bytes = row.nbytes * sum(out[i] for i in others)
    handle.link_bytes = row.nbytes * max(sum(out[i] for i in others), sum(into[i] for i in others))
    return result_or_handle(handle, async_op)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has come here."""
    check_axis(axis)
    if axis.size > 1:
        Handle(axis, "barrier", "barrier", 0, lambda: meet(axis), lambda: None).wait()
