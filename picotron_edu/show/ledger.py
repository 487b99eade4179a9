"""The ledger: what a run sent, and what a technique costs, before and after.

`ledger(trace)` lists the messages of one run, by operation and axis. `compare(rows)` is the table
that grows through the course: one row a technique, with the memory, the bytes sent, the steps
and, if wanted, the time it changes.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from picotron_edu.show.figure import emit, in_notebook


@dataclass(frozen=True)
class Row:
    """One technique's line in the course ledger; each pair is (before, after).

    memory  bytes on one rank, at the peak unless the caption says otherwise
    sent    bytes one rank puts on the wire in a step
    steps   messages one after the other (latencies) or passes, whichever the technique changes
    seconds time of a step; leave out where outputs are compared strictly, since times never repeat
    """

    name: str
    memory: tuple[float, float] | None = None
    sent: tuple[float, float] | None = None
    steps: tuple[float, float] | None = None
    seconds: tuple[float, float] | None = None


class Table:
    """Text in columns, shown once: `str(table)` is aligned text, `.html` what a notebook draws."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
        self.columns, self.rows, self.caption = list(columns), [list(r) for r in rows], caption

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def align(line: list[str]) -> str:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
            return "  ".join(cells).rstrip()

        body = [align(self.columns), "  ".join("─" * w for w in widths), *map(align, self.rows)]
        return "\n".join([*body, self.caption])

    @property
    def html(self) -> str:
        def cells(tag: str, line: list[str]) -> str:
            sides = ["left"] + ["right"] * (len(line) - 1)
            return "".join(
                f'<{tag} style="text-align:{side};padding:3px 12px">{html.escape(text)}</{tag}>'
                for side, text in zip(sides, line)
            )

        head = f"<tr>{cells('th', self.columns)}</tr>"
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        note = f"<div><em>{html.escape(self.caption)}</em></div>"
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{note}"

    def _ipython_display_(self) -> None:
        """Nothing: `show_table` has shown it already."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Table:
    """Show a table (drawn in a notebook, printed elsewhere) and return it."""
    table = Table(columns, rows, caption)
    if in_notebook():
        emit({"text/html": table.html, "text/plain": str(table)})
    else:
        print(table)
    return table


def ledger(
    trace: Any, caption: str = "Every message of the run: calls and bytes of one rank (the mean)."
) -> Table:
    """The messages of a run by operation and axis: calls, payload and bytes on the wire, per rank.

    show.ledger(run.trace)
    """
    columns = ["operation", "axis", "calls", "payload bytes", "bytes on the wire"]
    rows = [
        [row.operation, str(row.axis), number(row.calls)]
        + [number(row.payload_bytes), number(row.wire_bytes)]
        for row in trace.ledger().rows
    ]
    return show_table(columns, rows, caption)


def compare(
    rows: Sequence[Row], caption: str = "What each technique changes on one rank, before → after."
) -> Table:
    """The course ledger: a line per technique, a column per quantity that some row gives.

    show.compare([show.Row("accumulation ×4", memory=(812e6, 331e6), sent=(0, 0), steps=(1, 4))])
    """
    units = {"memory": size, "sent": size, "steps": number, "seconds": duration}
    titles = {
        "memory": "memory per rank",
        "sent": "bytes sent",
        "steps": "steps",
        "seconds": "time",
    }
    used = [field for field in units if any(getattr(row, field) is not None for row in rows)]

    def cell(row: Row, field: str) -> str:
        pair = getattr(row, field)
        if pair is None:
            return "–"
        before, after = pair
        text = f"{units[field](before)} → {units[field](after)}"
        if before == after or not before or not after:
            return text
        return text + (
            f"  (÷ {before / after:.3g})" if before > after else f"  (× {after / before:.3g})"
        )

    columns = ["technique", *(titles[field] for field in used)]
    return show_table(columns, [[r.name, *(cell(r, f) for f in used)] for r in rows], caption)


def number(value: float) -> str:
    """12345 -> "12,345", 2.5 -> "2.5"; up to two decimals where there are any."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def size(value: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point: 1e6 -> "1 MB"."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as "12 s", "3.1 ms" or "40 µs"."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
