"""Two small pictures that every chapter needs: bars to compare a few numbers, and loss curves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from picotron_edu.show.figure import WIDTH, Picture, finish, new_figure, style
from picotron_edu.show.ledger import duration, number, size
from picotron_edu.show.palette import RANK_COLOURS

FORMATS: Mapping[str, Callable[[float], str]] = {"bytes": size, "seconds": duration}


def bars(
    values: Mapping[str, float],
    unit: str = "",
    title: str | None = None,
    caption: str = "The same quantity, side by side.",
) -> Picture:
    """A horizontal bar per entry, its value written at the end, all from zero.

    unit   "bytes" and "seconds" choose a readable unit; any other is written after the number

        show.bars({"before": 812e6, "after": 331e6}, unit="bytes", title="peak memory")
    """
    if not values:
        raise ValueError("values is empty: give at least one name and number")
    write = FORMATS.get(unit, lambda value: f"{number(round(value, 2))} {unit}".strip())
    with style():
        figure = new_figure(height=0.85 + 0.42 * len(values) + 0.3 * bool(title))
        ax = figure.add_subplot()
        names = list(values)
        colours = [RANK_COLOURS[i % len(RANK_COLOURS)] for i in range(len(names))]
        drawn = ax.barh(names, [values[name] for name in names], color=colours, height=0.68)
        texts = [write(values[name]) for name in names]
        ax.bar_label(drawn, texts, padding=5, fontsize=10.5)
        longest = max(len(text) for text in texts)
        ax.set_xlim(0, max(max(values.values()), 1e-12) * (1 + 0.1 * longest / (WIDTH - 2)))
        ax.invert_yaxis()
        ax.xaxis.set_visible(False)
        ax.spines["bottom"].set_visible(False)
        ax.tick_params(axis="y", length=0, labelsize=11)
        if title:
            ax.set_title(title)
        return finish(figure, caption)


def loss(
    history: Sequence[Any] | Mapping[str, Sequence[Any]],
    caption: str = "Loss of every step (pale) and its running mean.",
) -> Picture:
    """Loss curves: numbers, or step records with `.loss`; several under names.

    Curves that agree lie on top of each other, so later ones are dashed.

        show.loss(history)
        show.loss({"one rank": alone, "4 ranks": together}, caption="The curves coincide.")
    """
    curves = dict(history) if isinstance(history, Mapping) else {"": history}
    with style():
        figure = new_figure(height=3.6)
        ax = figure.add_subplot()
        for i, (name, records) in enumerate(curves.items()):
            values = np.array([float(getattr(record, "loss", record)) for record in records])
            steps = np.arange(1, len(values) + 1)
            colour = RANK_COLOURS[i % len(RANK_COLOURS)]
            dashes = "-" if i == 0 else (0, (5, 3 + i))
            window = max(1, len(values) // 25)
            if window > 1:
                ax.plot(steps, values, color=colour, lw=0.9, alpha=0.35)
            ax.plot(
                steps, running_mean(values, window), color=colour, ls=dashes, label=name or None
            )
        ax.set(xlim=(0, None), xlabel="step", ylabel="loss per token (nats)")
        ax.grid(True, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(curves) > 1:
            ax.legend()
        return finish(figure, caption)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and its neighbours, `window` in all; fewer near the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    begin = np.maximum(0, at - window // 2)
    end = np.minimum(len(values), at + (window + 1) // 2)
    return (total[end] - total[begin]) / (end - begin)
