"""What every technique that changes a plain model checks first, and what it checks in forward."""

import torch
from torch import Tensor, nn

from picotron_edu.layout import describe, layout_of
from picotron_edu.model import Llama
from picotron_edu.ranks import Axis
from picotron_edu.ranks.checks import check_axis


def check_plain(model: Llama, axis: Axis, whole: bool = False) -> None:
    """Raises ValueError for a wrapped model: a wrapper has looked at the weights as they were.

    whole: also if weights are cut already.
    """
    check_axis(axis)
    if not isinstance(model, Llama):
        raise ValueError(
            f"model is a {type(model).__name__}: change the plain Llama, and wrap it last "
            f"(DataParallel, Zero)"
        )
    describe(model)
    for param in model.parameters():
        layout = layout_of(param)
        if hasattr(param, "grad_home"):
            raise ValueError(
                f"{layout.name} is in a data-parallel wrapper already: apply this to the plain "
                f"model, and wrap it last"
            )
        if whole and layout.cuts:
            raise ValueError(f"{layout.name} is cut already: apply this once")


def check_tokens(vocabulary: int, _model: nn.Module, inputs: tuple[Tensor | None, ...]) -> None:
    """Where no rank has the whole vocabulary, a number outside of it would be nobody's, silently.

    Raises RuntimeError; on a GPU later, so that nobody waits.
    """
    for name, numbers, besides in zip(("token", "-", "label"), inputs, (0, 0, -100)):
        if numbers is not None and name != "-":
            known = (numbers >= 0) & (numbers < vocabulary) | (numbers == besides)
            torch._assert_async(known.all(), f"a {name} is not in the vocabulary of {vocabulary}")
