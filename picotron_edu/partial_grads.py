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
from picotron_edu.summed import mark_summed, names_of, summed_over


@torch.no_grad()
def sum_partial_grads(
    params: Iterable[Tensor], all_reduce: AllReduce, done: Iterable[Axis] = ()
) -> None:
    """Sum each gradient over the axes on which its layout says it is partial, and over no other.

    One message per axis: the gradients travel as one vector. What has been summed over an axis is
    left out, by its mark (`summed.py`): by DataParallel or Zero, or here before. `done`: axes over
    which somebody else has summed. Call it after the last backward of a step, and after finish().
    """
    done_names = {name for axis in done for name in names_of(axis)}
    by_axis: dict[str, tuple[Axis, list[Tensor]]] = {}
    for param in params:
        layout, summed = layout_of(param), summed_over(grad_of(param))
        if not summed and param.requires_grad and (layout.flat or hasattr(param, "grad_home")):
            raise RuntimeError(
                f"{layout.name} is in a data-parallel wrapper and has no sum yet: call finish() "
                f"before sum_partial_grads (of a model in Zero, take the wrapper's parameters)"
            )
        for axis in layout.partial_over if param.requires_grad else ():
            if axis.size > 1 and axis.name not in done_names | summed:
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
            mark_summed(grad, axis)
