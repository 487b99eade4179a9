"""A mark on a gradient: over which axes it has been summed.

A sum that is summed once more counts once for each rank, and so does what the next backward adds to
it: the gradient is n times too large, no shape is wrong, and Adam hides it. So whoever sums over an
axis marks the gradient; who sums next leaves the axis out, and who adds to it is told.
"""

from typing import Any

from torch import Tensor

from picotron_edu.layout import Axis, layout_of

AXES = {"pp", "dp", "cp", "tp", "ep"}


def names_of(axis: Axis) -> set[str]:
    """Of an axis, and of those it joins: dp_cp is dp and cp."""
    parts = {*axis.name.split("_")}
    return {axis.name, *parts} if parts <= AXES else {axis.name}


def summed_over(grad: Tensor | None) -> set[str]:
    return getattr(grad, "summed_over", set())


def mark_summed(grad: Any, axis: Axis) -> None:
    """The mark goes where the gradient goes, and ends with it."""
    grad.summed_over = summed_over(grad) | names_of(axis)


def refuse_summed(param: Any, grad: Tensor | None) -> None:
    """Raises RuntimeError if `grad` is a sum of a finished step; one that was zeroed may stay."""
    if grad is None or not summed_over(grad) or not grad.any():
        return
    unseen = ""
    if param.grad is None and grad.dtype != param.dtype:
        unseen = (
            f". It is in .main_grad, where torch's optimizers do not look: for {param.dtype} "
            f"weights use picotron_edu.optim.AdamW"
        )
    raise RuntimeError(
        f"{layout_of(param).name} still has the gradient of a finished step: zero the gradients "
        f"(zero_grad() of our AdamW or of the wrapper, or optim.zero_grads(params)) after the sum "
        f"over the ranks and before the next backward{unseen}"
    )
