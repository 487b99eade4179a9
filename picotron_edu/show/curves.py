"""Lines for formulas: one quantity against another, each curve named at its right end.

    curves([1, 2, 4], {"measured": [8, 4, 2]}, x="sequences in a batch", y="noise", log=True)

Measured values are dots on their line (names in `dots`), formulas are lines alone.
"""

from collections.abc import Collection, Mapping, Sequence

from matplotlib.ticker import FuncFormatter, NullLocator

from picotron_edu.show.figure import Picture, finish, new_figure, style
from picotron_edu.show.ledger import number, size
from picotron_edu.show.palette import RANK_COLOURS


def curves(
    at: Sequence[float],
    values: Mapping[str, Sequence[float]],
    x: str,
    y: str,
    log: bool = False,
    dots: Collection[str] = (),
    caption: str = "The same quantity, computed in several ways.",
) -> Picture:
    """One line per name; y="bytes" writes the axis in a readable unit; log for both axes."""
    for name, line in values.items():
        if len(line) != len(at):
            raise ValueError(f"{name!r} has {len(line)} values for {len(at)} places on the x axis")
    with style():
        figure = new_figure(height=3.8)
        ax = figure.add_subplot()
        for i, (name, line) in enumerate(values.items()):
            colour, marker = RANK_COLOURS[(0, 2, 4, 1, 6)[i % 5]], "o" if name in dots else ""
            ax.plot(at, line, marker=marker, color=colour, label=name)
        if log:
            ax.set(xscale="log", yscale="log")
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.set_ylim(0, None)
        ax.set_xticks(list(at), [number(value) for value in at])
        if y == "bytes":
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        elif log:
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set(xlabel=x, ylabel=y)
        ax.grid(True, axis="y")
        ax.legend()
        return finish(figure, caption)
