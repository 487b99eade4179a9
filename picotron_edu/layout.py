"""What a piece of a parameter is a piece of.

On many ranks a parameter is seldom whole. A rank may hold two of its eight columns, or a copy
whose gradient is only a part of the sum. Everything that treats parameters alike (gradient
reduction, the global norm, weight decay, initialisation, checkpoints, the memory planner) must
know, for each one. They all read it from one place, the parameter's layout:

    full weight 4×6, rows cut over the axis tp (2 ranks)            Layout(
        ┌───────────┐                                                   name="mlp.up_proj.weight",
        │ tp.index 0│ rows 0, 1                                         full_shape=(4, 6),
        ├───────────┤                                                   cuts=(Cut(dim=0, axis=tp),),
        │ tp.index 1│ rows 2, 3                                         partial_over=(dp,),
        └───────────┘                                               )

`partial_over` names the axes whose ranks each computed only a part of this parameter's gradient
(they saw other samples, or other positions): there it must be summed. Over any other axis that is
not cut, the ranks hold equal copies. `flat` is ZeRO's cut: what is left, as one vector.

A technique that replaces a parameter attaches the new layout. A parameter without one is an
error, never a guess: a trainer that "forgot that this parameter is different" is the commonest
fault of parallel training.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class Axis(Protocol):
    """What a layout needs to know of a mesh axis. `picotron_edu.ranks.Axis` is one."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Cut:
    """Tensor dimension `dim` is cut into `axis.size` pieces; this rank holds piece `axis.index`."""

    dim: int
    axis: Axis


@dataclass(frozen=True)
class FlatCut:
    """What `cuts` leave, flattened, is cut over `axis`: this rank holds elements start to stop.

    So ZeRO cuts: without regard to rows, and of whatever length (also none at all).
    """

    axis: Axis
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    name: str
    full_shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    partial_over: tuple[Axis, ...] = ()
    flat: FlatCut | None = None

    def __post_init__(self) -> None:
        for cut in self.cuts:
            if not 0 <= cut.dim < len(self.full_shape):
                raise ValueError(
                    f"{self.name}: cannot cut dim {cut.dim}, its full shape is {self.full_shape}"
                )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        if self.flat:
            return (self.flat.stop - self.flat.start,)
        return tuple(piece.stop - piece.start for piece in slice_of(self))

    @property
    def cut_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks hold different pieces, each once."""
        axes = [cut.axis for cut in self.cuts] + ([self.flat.axis] if self.flat else [])
        return tuple({axis.name: axis for axis in axes}.values())


def piece_of(length: int, count: int, index: int) -> slice:
    """Piece `index` of `count`. Sizes differ by at most one, the longer first: 7 / 2 = 4, 3."""
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    return slice(start, start + size + (index < longer))


def slice_of(layout: Layout) -> tuple[slice, ...]:
    """This rank's part of the full tensor. A second cut of the same dim cuts the piece again."""
    pieces = [slice(0, length) for length in layout.full_shape]
    for cut in layout.cuts:
        outer = pieces[cut.dim]
        inner = piece_of(outer.stop - outer.start, cut.axis.size, cut.axis.index)
        pieces[cut.dim] = slice(outer.start + inner.start, outer.start + inner.stop)
    return tuple(pieces)


def place(layout: Layout, full: torch.Tensor, piece: torch.Tensor) -> None:
    """Write this rank's piece where it belongs in the full tensor."""
    if layout.flat is None:
        full[slice_of(layout)] = piece
    else:
        local = full[slice_of(layout)].flatten()
        local[layout.flat.start : layout.flat.stop] = piece
        full[slice_of(layout)] = local.view(full[slice_of(layout)].shape)


def attach(param: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Give a parameter its layout; the shape it has must be the shape the layout says."""
    if tuple(param.shape) != layout.local_shape:
        raise ValueError(
            f"{layout.name} has shape {tuple(param.shape)} on this rank, but its layout says "
            f"{layout.local_shape}: {layout.full_shape} cut {cuts_in_words(layout)}"
        )
    param.pieces = layout  # type: ignore[attr-defined]  # (torch itself uses `param.layout`)
    return param


def layout_of(param: torch.Tensor) -> Layout:
    layout = getattr(param, "pieces", None)
    if layout is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has no layout: call describe(model) on a "
            "plain model, and attach(param, Layout(...)) where a technique makes a parameter"
        )
    return layout


def describe(model: nn.Module) -> None:
    """Give each parameter of a plain model its layout: whole, with its complete gradient."""
    for name, param in model.named_parameters():
        if not hasattr(param, "pieces"):
            attach(param, Layout(name, tuple(param.shape)))


def cuts_in_words(layout: Layout) -> str:
    words = [f"dim {c.dim} over {c.axis.name}={c.axis.size}" for c in layout.cuts]
    if layout.flat:
        words.append(f"flat over {layout.flat.axis.name}={layout.flat.axis.size}")
    return ", ".join(words) or "nowhere"
