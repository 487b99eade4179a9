"""Messages that autograd can go through: each has its transpose as its backward.

A plain collective has no history: the gradient of what it gathered is silently lost. Here every
operation is a linear map over the joint inputs of all ranks, and backward is the transposed map:

    forward                            backward                  Megatron's name
    copy_to      x -> x on each rank   all-reduce of gradients   f
    reduce_from  sum over ranks        the same gradient         g
    gather       all-gather            reduce-scatter            g (sequence parallel)
    scatter_sum  reduce-scatter        all-gather                g-bar (sequence parallel)
    split        this rank's piece     all-gather
    exchange     all-to-all            all-to-all, counts swapped

Which scale? `gather`, `scatter_sum`, `split` and `exchange` are transposes for the *sum of all
ranks' losses*: if each of n ranks computes a loss from the gathered tensor, a piece gets the
gradient of all n. `copy_to` and `reduce_from` mark where one logical tensor, equal on all ranks,
enters and leaves a parallel region; the loss behind `reduce_from` is one loss, computed alike by
every rank, and counts once.

Source: Shoeybi et al., "Megatron-LM", 1909.08053, section 3 (f, g); Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2205.05198, section 4.2.2 (g, g-bar).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from .checks import check_message, dim_to_cut
from .collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from .mesh import Axis


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.shape = axis, dim, x.shape
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        piece = reduce_scatter(grad, ctx.axis, ctx.dim)
        return piece.view(ctx.shape), None, None  # a single number was gathered as a vector


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.tensor_split(axis.size, dim)[axis.index].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, send_counts, receive_counts
        return all_to_all(x, axis, send_counts, receive_counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.axis, ctx.received, ctx.sent), None, None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Enter a parallel region (Megatron's f): `x` as it is; backward sums the ranks' gradients."""
    check_message(x, axis)
    return _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Leave a parallel region (Megatron's g): the ranks' `x` summed; backward passes through."""
    check_message(x, axis)
    return _ReduceFrom.apply(x, axis)


def gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """The ranks' pieces joined along `dim`; backward sums over the ranks and cuts."""
    check_message(x, axis)
    return _Gather.apply(x, axis, dim)


def scatter_sum(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over the ranks, keep this rank's piece along `dim`; backward gathers.

    x.shape[dim] must be divisible by axis.size.
    """
    check_message(x, axis)
    return _ScatterSum.apply(x, axis, dim)


def split(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's piece of an `x` that is equal on all ranks; backward gathers the gradients.

    x.shape[dim] must be divisible by axis.size.
    """
    check_message(x, axis)
    return _Split.apply(x, axis, dim_to_cut("split", x, dim, axis))


def exchange(
    x: Tensor,
    axis: Axis,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
) -> Tensor:
    """All-to-all along dim 0 (see `all_to_all`); backward sends every row's gradient back."""
    check_message(x, axis)
    return _Exchange.apply(x, axis, send_counts, receive_counts)
