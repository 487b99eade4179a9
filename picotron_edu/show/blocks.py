"""Pieces of data as blocks: a colour says which rank a piece comes from, stripes mean a sum.

Shared by `collective` (before → after) and `ring` (step by step).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from picotron_edu.show.palette import FRAME, PAPER, TEXT, rank_colour


def values_of(data: Any) -> list[float]:
    """The numbers of a tensor, array or (nested) list, in reading order; None holds no number."""
    if data is None:
        return []
    if hasattr(data, "detach"):
        data = data.detach().flatten().tolist()
    elif hasattr(data, "ravel"):
        data = data.ravel().tolist()
    if isinstance(data, (list, tuple)):
        return [value for part in data for value in values_of(part)]
    return [data]


def contributors(value: float, parts: Sequence[float]) -> list[int]:
    """The smallest set of ranks whose `parts` add up to `value`; empty if there is none.

    This reads a partial sum backwards: with parts (1, 10, 100), 101 is ranks 0 and 2. Give every
    rank different numbers, else several sets fit and the first is taken.
    """
    for count in range(1, len(parts) + 1):
        for ranks in itertools.combinations(range(len(parts)), count):
            total = sum(parts[rank] for rank in ranks)
            if math.isclose(total, value, rel_tol=1e-5, abs_tol=1e-9):
                return list(ranks)
    return []


def block(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    ranks: Sequence[int],
    text: str,
    font: float,
    band: float = 1.0,
    times: int = 1,
) -> None:
    """A block at (x, y) (upper left, y grows downwards) in the colours of `ranks`: one stripe each,
    or `times` narrower ones.

    The colours fill the lowest `band` of the block: all of it, or a part, where the text would hide
    them. No rank at all means that nobody's data explain the content: grey and dotted.
    """
    stripe = width / max(1, len(ranks) * times)
    plain: dict[str, Any] = {"ec": "none", "in_layout": False}
    top = y + (1 - band) * height
    for i, rank in enumerate([*ranks] * times):
        left = x + i * stripe
        ax.add_patch(Rectangle((left, top), stripe, band * height, fc=rank_colour(rank), **plain))
    look: dict[str, Any] = {"ec": TEXT, "lw": 0.9, "label": "block", "in_layout": False}
    look |= {"fc": "none"} if ranks else {"fc": "#EEEEEE", "hatch": "...."}
    ax.add_patch(Rectangle((x, y), width, height, **look))
    paper = {"boxstyle": "round,pad=0.18", "fc": PAPER, "ec": "none", "alpha": 0.93}
    place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": font, "in_layout": False}
    if band == 1.0:
        ax.text(x + width / 2, y + height / 2, text, bbox=paper, **place)
    else:
        ax.text(x + width / 2, y + (1 - band) * height / 2, text, **place)


def empty_block(ax: Axes, x: float, y: float, width: float, height: float) -> None:
    """A place that holds nothing."""
    look: dict[str, Any] = {"fc": "none", "ec": FRAME, "ls": (0, (3, 3)), "lw": 0.9}
    ax.add_patch(Rectangle((x, y), width, height, **look))


def short(value: float) -> str:
    """A number as it stands in a block: whole ones in full, others with four digits."""
    whole = float(value).is_integer() and abs(value) < 1_000_000
    return f"{value:.0f}" if whole else f"{value:.4g}"
