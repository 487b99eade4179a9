"""Gradients of which each rank has only a part: summed where their layout says so.

    parameter                               is partial over   because its ranks
    every one                               dp, cp            saw other rows, other positions
    norms, under sequence parallelism       tp                saw other positions
    key and value heads that ranks share    tp_inner          have other query heads of the group
    weights cut over tp                     – (not tp)        have all there is of their piece
    norms, without sequence parallelism     – (not tp)        saw all positions

A data-parallel wrapper sums over its own axis, overlapped with backward. What is left are few and
small parameters: they travel together, one message an axis, after the last backward of a step.
Forgetting one of them is the classic silent fault: the loss falls, and the ranks drift apart.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from picotron_edu.layout import Axis, layout_of
from picotron_edu.optim import AllReduce, grad_of, main_dtype


@torch.no_grad()
def sum_partial_grads(
    params: Iterable[Tensor], all_reduce: AllReduce, done: Iterable[Axis] = ()
) -> None:
    """Sum each gradient over the axes on which its layout says it is partial, and over no other.

    One message per axis: the gradients travel as one vector. `done`: axes summed over already; the
    name of a joined one tells its parts: dp_cp is dp and cp.
    """
    done_names = {part for axis in done for part in (axis.name, *axis.name.split("_"))}
    by_axis: dict[str, tuple[Axis, list[Tensor]]] = {}
    for param in params:
        for axis in layout_of(param).partial_over:
            if axis.size > 1 and axis.name not in done_names:
                by_axis.setdefault(axis.name, (axis, []))[1].append(param)
    for name in sorted(by_axis):  # the same order on every rank
        axis, partial = by_axis[name]
        parts = [grad_of(p) for p in partial]
        zeros = [p.new_zeros(p.shape, dtype=main_dtype(p)) for p in partial]
        grads = [zero if part is None else part for part, zero in zip(parts, zeros)]
        vector = all_reduce(torch.cat([grad.flatten() for grad in grads]), axis, "sum")
        for param, grad, total in zip(partial, grads, vector.split([g.numel() for g in grads])):
            grad.copy_(total.view_as(grad))
            if grad_of(param) is None:
                setattr(param, "main_grad" if hasattr(param, "main_grad") else "grad", grad)
