"""What is checked, on every rank alike, before anything is sent.

A wrong argument must not reach the network: there it would be a hang, or a wrong number. So each
error is raised before the first byte moves (of a launch: before any rank starts), and names the
argument, its value and what would be right. What only the *other* ranks know (do they call the same
with the same shape?) is compared on the notice board (`board.py`).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # then divided here: not every backend has an average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
NO_SUMS = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # unknown to gloo or nccl


def is_fp8(x: Tensor) -> bool:
    """All 8-bit floats: torch's backends do not know them, so they travel as bytes."""
    return x.dtype.is_floating_point and x.dtype.itemsize == 1


def short(value: object) -> str:
    """A wrong value on one line of an error, also if it is a tensor."""
    return " ".join(repr(value).split())[:80]


def check_axis(axis: Axis) -> None:
    if not isinstance(axis, Axis):
        raise ValueError(f"axis={short(axis)}: must be an Axis, such as world() or mesh.tp")


def check_message(x: Tensor, axis: Axis, name: str = "x") -> None:
    """Refuse an `x`, the argument `name`, that is no ordinary tensor, and what is no axis."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}={short(x)}: must be a tensor")
    if x.is_meta:
        raise ValueError(f"{name}: a tensor on device 'meta' has no numbers, make it on a real one")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: a tensor of {x.layout} cannot travel, use {name}.to_dense()")
    check_axis(axis)


def check_parts(name: str, parts: Sequence[tuple[Tensor, int]], axis: Axis) -> None:
    """Refuse what is no list of (tensor, place), the argument `name` of send_recv."""
    for pair in parts if isinstance(parts, (list, tuple)) else [None]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], Tensor):
            raise ValueError(f"{name}={short(parts)}: {name} must be a list of (tensor, place)")
        check_message(pair[0], axis, name)


def whole_number(value: Any) -> int | None:
    """`value` as an int, numpy's integers too; None if it is no whole number."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_reducible(x: Tensor, op: str) -> None:
    """Refuse an `op` that cannot combine tensors of this type on every backend."""
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op={op!r}: must be one of {', '.join(OPS)}")
    if is_fp8(x) or x.dtype in NO_SUMS:
        better = "bfloat16 or float32" if is_fp8(x) else "int32"
        raise ValueError(f"{x.dtype} cannot be combined by op={op!r}: convert to {better} first")
    if x.dtype == torch.bool and op in ("sum", "avg"):
        raise ValueError(f"op={op!r} on bool: use 'max' for any, 'min' for all, or int64 to count")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"op='avg' on {x.dtype}: an average of integers is not an integer, use 'sum'"
        )
    if x.is_complex() and op not in ("sum", "avg"):
        raise ValueError(f"op={op!r} on {x.dtype}: complex numbers have only 'sum' and 'avg'")


def check_writable(name: str, x: Tensor) -> None:
    """Refuse an expanded tensor, which has one number in many places, where a result must go."""
    strides = x.stride()
    if 0 in strides and any(not by and size > 1 for by, size in zip(strides, x.shape)):
        raise ValueError(
            f"{name}: a tensor of shape {list(x.shape)} that was expanded cannot be written to: "
            f"its elements share their memory, use {name}.contiguous()"
        )


def check_out(out: Tensor, dtype: torch.dtype, numel: int, dim: int) -> None:
    """Refuse an `out` that the ranks' parts cannot be received in, one behind the other."""
    if dim != 0:
        raise ValueError(f"out is for dim=0, got dim={dim}")
    if out.dtype != dtype or out.numel() != numel or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, of {dtype}, with {numel} elements, got {out.dtype}, "
            f"{out.numel()} elements{'' if out.is_contiguous() else ', strided'}"
        )


def global_rank(axis: Axis, name: str, place: int) -> int:
    """The global rank of a place on the axis, given as the argument `name`."""
    if not isinstance(place, int) or not 0 <= place < axis.size:
        raise ValueError(
            f"{name}={place!r}: axis '{axis.name}' has places 0 to {axis.size - 1} "
            f"(a place on the axis, not a global rank; it holds the ranks {axis.ranks})"
        )
    return axis.ranks[place]


def which_dim(x: Tensor, dim: int) -> int:
    """`dim` counted from the front; a single number has dim 0, as a vector of length 1."""
    dims = max(1, x.dim())
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ValueError(
            f"dim={dim!r}: a tensor of shape {list(x.shape)} has dims {-dims} to {dims - 1}"
        )
    return dim % dims


def dim_to_cut(operation: str, x: Tensor, dim: int, axis: Axis) -> int:
    """`dim` counted from the front, if `x` can be cut along it into one equal piece a rank."""
    at = which_dim(x, dim)
    if x.dim() == 0 or x.shape[at] % axis.size:
        raise ValueError(
            f"{operation} cuts dim={dim} of shape {list(x.shape)} into axis.size={axis.size} equal "
            f"pieces: it must be divisible"
        )
    return at


def counts_of(name: str, counts: Sequence[int], axis: Axis) -> list[int]:
    """`counts`, the argument `name`, as a list of one int a rank."""
    numbers = [whole_number(count) for count in counts] if isinstance(counts, Iterable) else []
    whole = [number for number in numbers if number is not None and number >= 0]
    if not len(whole) == len(numbers) == axis.size:
        raise ValueError(
            f"{name}={short(counts)}: must be {axis.size} whole numbers, none negative"
        )
    return whole


def row_counts(
    x: Tensor, axis: Axis, send: Sequence[int] | None, receive: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """How many rows of `x` go to, and come from, each place of the axis in an all_to_all."""
    if send is None and receive is None:
        if x.dim() == 0 or x.shape[0] % axis.size:
            raise ValueError(
                f"all_to_all cuts dim 0 of shape {list(x.shape)} into axis.size={axis.size} equal "
                f"parts: it must be divisible, or give send_counts and receive_counts"
            )
        equal = [x.shape[0] // axis.size] * axis.size
        return equal, equal
    if send is None or receive is None:
        raise ValueError(
            f"send_counts={send}, receive_counts={receive}: give both send_counts and "
            f"receive_counts, or neither"
        )
    send, receive = counts_of("send_counts", send, axis), counts_of("receive_counts", receive, axis)
    if x.dim() == 0 or sum(send) != x.shape[0]:
        raise ValueError(f"send_counts={send} must sum to dim 0 of shape {list(x.shape)}")
    if send[axis.index] != receive[axis.index]:
        raise ValueError(
            f"send_counts={send} and receive_counts={receive} differ at place {axis.index}, this "
            f"rank itself: what it sends itself it receives"
        )
    return send, receive


# ---- before any rank starts ----------------------------------------------------------------------


def in_range(name: str, value: Any, low: int, high: int) -> int:
    number = whole_number(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name}={value!r}: must be a whole number from {low} to {high}")
    return number


def check_call(fn: Callable, args: tuple) -> None:
    """Refuse what cannot be called as fn(*args)."""
    if not callable(fn):
        raise ValueError(
            f"fn={short(fn)}: must be a function, not its result (launch(work), not launch(work()))"
        )
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name, hint = getattr(fn, "__name__", repr(fn)), ""
        if len(args) == 1 and whole_number(args[0]) and not signature.parameters:
            hint = f"; did you mean world_size={args[0]}?"
        raise ValueError(
            f"fn={name}{signature} cannot take args={short(args)}: {error}{hint}"
        ) from None


def check_timeout(timeout: float | None) -> None:
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise ValueError(f"timeout={timeout!r}: must be more than 0 seconds, or None for no limit")
