"""Where memory goes: through the moments of a step, and with sequence and batch.

Bytes come from measurements or from formulas; the pictures only draw them. Categories have the
same order and colours in the whole course: parameters, optimizer states, gradients, activations,
other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from picotron_edu.show.figure import Picture, finish, new_figure, style
from picotron_edu.show.palette import (
    KIND_COLOURS,
    MEMORY_COLOURS,
    RANK_COLOURS,
    ink,
    word_kind,
)

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def memory_steps(
    records: Sequence[Any],
    caption: str = "Bytes alive at each moment, stacked: gradients and optimizer states appear in "
    "the first step and stay.",
) -> Picture:
    """Stacked bytes through the first steps, the phases marked on top.

    records   one mapping (or object) per moment, in order, with `event` (the phase: "forward",
              "backward", "optimizer", …), `step`, and bytes under any of "parameters",
              "optimizer states", "gradients", "activations", "other" (a space may be an
              underscore; what is missing is 0)

        show.memory_steps([{"step": 0, "event": "forward", "parameters": 4e6}, …])
    """
    if not records:
        raise ValueError("records is empty: measure at least one moment")
    bytes_of = {
        name: np.array([float(_field(record, name, 0)) for record in records])
        for name in MEMORY_COLOURS
    }
    drawn = {name: values for name, values in bytes_of.items() if values.any()}
    peak = sum(drawn.values(), np.zeros(len(records))).max()
    factor, unit = unit_for(peak)
    with style():
        figure = new_figure(height=4.3)
        ax = figure.add_subplot()
        edges = np.arange(len(records) + 1)
        floor = np.zeros(len(records))
        for name, values in drawn.items():
            top = floor + values / factor
            lower, upper = (np.append(y, y[-1]) for y in (floor, top))
            ax.fill_between(
                edges, lower, upper, step="post", color=MEMORY_COLOURS[name], label=name, lw=0
            )
            floor = top
        ax.set_xlim(0, len(records))
        ax.set_ylim(0, peak / factor * 1.16)
        ax.set_ylabel(f"memory in {unit}")
        ax.axhline(peak / factor, color="#444444", lw=1, ls=(0, (4, 3)))
        _phases(ax, records)
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=5)
        return finish(figure, caption)


def _phases(ax: Axes, records: Sequence[Any]) -> None:
    """A coloured strip on top, one piece per run of moments in one phase; steps below the axis."""
    keys = [(_field(r, "step", 0), str(_field(r, "event", ""))) for r in records]
    begins = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]]
    height = ax.get_ylim()[1]
    for begin, end in zip(begins, [*begins[1:], len(keys)]):
        event = keys[begin][1]
        colour = KIND_COLOURS[word_kind(event)]
        ax.axvspan(begin, end, ymin=0.93, ymax=1.0, color=colour, lw=0)
        ax.axvline(begin, color="white", lw=1)
        inches = 7.9 * (end - begin) / len(keys)
        shown = event if inches > 0.085 * len(event) else event[:1].upper()
        if inches > 0.085 * len(shown):
            ax.text(
                (begin + end) / 2,
                height * 0.965,
                shown,
                ha="center",
                va="center",
                fontsize=9,
                color=ink(colour),
            )
    starts = [i for i in begins if i == 0 or keys[i][0] != keys[i - 1][0]]
    middles = [(a + b) / 2 for a, b in zip(starts, [*starts[1:], len(keys)])]
    ax.set_xticks(middles, [f"step {keys[i][0]}" for i in starts])
    ax.tick_params(axis="x", length=0)
    for i in starts[1:]:
        ax.axvline(i, color="#444444", lw=1)


def activations(
    sequences: Sequence[int],
    bytes_by_batch: Mapping[int, Sequence[float]],
    formula: Mapping[int, Sequence[float]] | None = None,
    caption: str = "Activation bytes against sequence length, a colour per batch size: twice the "
    "batch is twice the bytes.",
) -> Picture:
    """Activation bytes: measured as dots, a formula as lines where it is given.

    show.activations([64, 128], {1: [2e6, 4e6], 2: [4e6, 8e6]}, formula={1: …, 2: …})
    """
    for batch, values in [*bytes_by_batch.items(), *(formula or {}).items()]:
        if len(values) != len(sequences):
            raise ValueError(
                f"batch {batch} has {len(values)} values for {len(sequences)} sequence lengths; "
                "give one per length"
            )
    factor, unit = unit_for(max(max(values) for values in bytes_by_batch.values()))
    with style():
        figure = new_figure(height=4.0)
        ax = figure.add_subplot()
        for i, (batch, values) in enumerate(bytes_by_batch.items()):
            colour, scaled = RANK_COLOURS[i % len(RANK_COLOURS)], np.asarray(values) / factor
            line = "none" if formula else "-"
            ax.plot(sequences, scaled, "o", ls=line, color=colour, label=f"batch {batch}")
            if formula and batch in formula:
                ax.plot(sequences, np.asarray(formula[batch]) / factor, color=colour, lw=1.5)
        ax.set(xlabel="sequence length in tokens", ylabel=f"activations in {unit}", ylim=(0, None))
        ax.set_xticks(list(sequences))
        ax.grid(True, axis="y")
        ax.legend()
        return finish(figure, caption)


def unit_for(value: float) -> tuple[float, str]:
    """The factor and name of the unit in which `value` bytes is a number from 1 to 1000."""
    return next(((f, unit) for f, unit in UNITS if value >= f), UNITS[-1])


def _field(record: Any, name: str, default: Any) -> Any:
    """A field of a mapping or an object; "optimizer states" may be called optimizer_states."""
    for key in (name, name.replace(" ", "_")):
        if isinstance(record, Mapping):
            if key in record:
                return record[key]
        elif hasattr(record, key):
            return getattr(record, key)
    return default
