"""Comparisons for functions that run on the ranks: no `assert`, so that ranks need no pytest."""

import torch
from torch import Tensor

from picotron_edu.ranks import Axis, Mesh, world


def expect(got: object, wanted: object, what: str) -> None:
    """Both are equal: tensors in shape, type and every bit, all else by ==."""
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        same = got.shape == wanted.shape and got.dtype == wanted.dtype
        same = same and torch.equal(got.double(), wanted.double())
    else:
        same = type(got) is type(wanted) and got == wanted
    if not same:
        raise AssertionError(f"{what}: got {got}, wanted {wanted}")


def the_axis(name: str) -> Axis:
    """`world`, or a line of a mesh of 4 ranks: tp is [0, 1] and [2, 3], dp is [0, 2] and [1, 3]."""
    return world() if name == "world" else getattr(Mesh(dp=2, tp=2), name)
