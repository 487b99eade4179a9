"""What every data-parallel wrapper does, whoever keeps the sums: start equal, hand the sums out.

    wrapped    ranks start equal; each gradient is from now on a part of a sum over the axis
    backward   gradients add up in float32 `main_grad`s, and are summed over the ranks
    finish     the sums lie where an optimizer looks:   .grad        float32 weights (torch's, too)
                                                        .main_grad   bfloat16 weights, float32 sums
    zeroed     by the optimizer or the model, before the next backward

A sum that nobody has zeroed must not get into the next step's: so it is marked (`summed.py`).
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from picotron_edu.layout import attach, describe, layout_of
from picotron_edu.optim import Param, grad_of, keep_main_grads
from picotron_edu.ranks import Axis, broadcast
from picotron_edu.summed import mark_summed


def start_equal(module: nn.Module, axis: Axis) -> None:
    """The ranks get rank 0's weights and buffers, wherever each one's came from."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast(tensor.detach(), axis)
    describe(module)
    keep_main_grads(module)


def make_partial(param: Param, axis: Axis) -> None:
    """Its gradient is from now on a part of the sum over the axis, and has a place of its own."""
    layout = layout_of(param)
    if hasattr(param, "grad_home"):
        raise ValueError(
            f"{layout.name} is in a data-parallel wrapper already: wrap a model once, and "
            f"over two axes by their joined one, such as mesh.dp_cp"
        )
    param.grad_home = None
    attach(param, replace(layout, partial_over=(*layout.partial_over, axis)))


def check_trained(param: Param, trained: bool) -> None:
    """Whether it still is what it was when the model was wrapped."""
    if param.requires_grad != trained:
        raise ValueError(
            f"{layout_of(param).name} was {'trainable' if trained else 'frozen'} when the model "
            f"was wrapped, and is not any more: set requires_grad before you wrap the model"
        )


def hand_out(param: Param, summed: Tensor) -> None:
    """Put a sum, or add it, where an optimizer looks."""
    place = "grad" if summed.dtype == param.dtype else "main_grad"
    so_far = getattr(param, place)
    if so_far is None:
        setattr(param, place, summed)
    else:
        so_far += summed


def mark_finished(params: Iterable[Param], axis: Axis) -> None:
    for grad in map(grad_of, params):
        if grad is not None:
            mark_summed(grad, axis)


def check_dtype(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"{name} must be a type such as torch.bfloat16, or None, got {value!r}")
