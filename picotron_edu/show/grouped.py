"""Bars in groups: the same few ways, side by side, for each model or length; formulas as bars,
measurements as dots on top of them.

    grouped_bars({"128 tokens": {"none": 9e6, "full": 3e6}, "256 tokens": {…}}, unit="bytes",
                 measured={"128 tokens": {"none": 9e6}})
"""

from collections.abc import Mapping

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from picotron_edu.show.bars import FORMATS
from picotron_edu.show.figure import Picture, finish, new_figure, style
from picotron_edu.show.ledger import number
from picotron_edu.show.palette import PAPER, RANK_COLOURS, TEXT

Groups = Mapping[str, Mapping[str, float]]
COLOURS = (RANK_COLOURS[2], RANK_COLOURS[1], RANK_COLOURS[4], RANK_COLOURS[0])
FULL = 0.86  # of the width of a group is bars, the rest a gap


def grouped_bars(
    groups: Groups,
    unit: str = "",
    measured: Groups | None = None,
    limit: tuple[str, float] | None = None,
    caption: str = "The same ways, for each group.",
) -> Picture:
    """Upright bars from zero, each with its value; a dot where `measured` has a number.

    limit   a name and a value, drawn as a dashed line: what may not be exceeded. Bars that reach
            above twice the limit are cut off there, so that the others can be read.
    """
    if not groups:
        raise ValueError("groups is empty: give at least one group of bars")
    names = list(next(iter(groups.values())))
    for group, values in groups.items():
        if list(values) != names:
            raise ValueError(f"group {group!r} has bars {list(values)}; the first one has {names}")
    write = FORMATS.get(unit, lambda value: f"{number(round(value, 2))} {unit}".strip())
    highest = max(max(values.values()) for values in groups.values())
    top = min(highest, 2 * limit[1]) if limit else highest
    with style():
        figure = new_figure(height=4.2)
        ax = figure.add_subplot()
        width = FULL / len(names)
        for j, (group, values) in enumerate(groups.items()):
            for i, (name, value) in enumerate(values.items()):
                x, shown = j + (i - (len(names) - 1) / 2) * width, min(value, top)
                ax.bar(x, shown, 0.92 * width, color=COLOURS[i % len(COLOURS)])
                text = write(value) + (" ↑" if value > shown else "")
                ax.text(x, shown + 0.012 * top, text, ha="center", va="bottom", fontsize=8.5)
                dot = (measured or {}).get(group, {}).get(name)
                if dot is not None:
                    ax.plot(x, dot, "o", ms=7, color=TEXT, mec=PAPER, mew=1.5)
        if limit:
            ax.axhline(limit[1], color=TEXT, lw=1.2, ls=(0, (4, 3)))
        ax.set_xticks(range(len(groups)), list(groups))
        ax.tick_params(axis="x", length=0, labelsize=11)
        ax.set_ylim(0, 1.08 * top)
        ax.yaxis.set_visible(False)
        ax.spines["left"].set_visible(False)
        keys: list[Patch | Line2D] = [
            Patch(fc=COLOURS[i % len(COLOURS)], label=name) for i, name in enumerate(names)
        ]
        if measured:
            keys.append(Line2D([], [], marker="o", ls="", color=TEXT, label="measured"))
        if limit:
            keys.append(Line2D([], [], color=TEXT, lw=1.2, ls=(0, (4, 3)), label=limit[0]))
        figure.legend(handles=keys, loc="outside upper left", ncols=5)
        return finish(figure, caption)
