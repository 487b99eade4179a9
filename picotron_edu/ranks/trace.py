"""What every rank did, when, and how many bytes it sent: the evidence behind each chapter.

Every message writes one event; `span("forward")` writes one for computation. After a run the
events of all ranks are merged into one `Trace`:

    rank 0  compute |  forward  |   backward    | optimizer |
            comm                     | all_reduce dp |
    rank 1  compute |  forward    |   backward  | optimizer |
            comm                       | all_reduce dp |

`trace.ledger()` sums the bytes, `trace.save("run.json")` writes a file for https://ui.perfetto.dev,
`show.timeline(trace)` draws it. Bytes follow the ring formulas of `link.wire_bytes`; times are
seconds since the first event (all ranks of a machine share one clock).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, overload

from picotron_edu.ranks.link import Link

MAX_EVENTS = 200_000  # a rank stops writing here; `Trace.truncated` says so


class Event(NamedTuple):
    """One thing one rank did. `lane` is "compute" or "comm", times are in seconds."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    axis: str = ""
    waits_for: int | None = None  # the rank that came last to this message
    where: str = ""  # file and line of the caller


@dataclass
class Recorder:
    """The log of one rank: events are appended while it runs."""

    rank: int
    events: list[Event] = field(default_factory=list)
    truncated: bool = False

    def add(self, event: Event) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.truncated = True

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the enclosed block as one compute event called `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Event(self.rank, "compute", name, start, time.perf_counter()))


@dataclass(frozen=True)
class LedgerRow:
    """Sums over all calls of one operation on one axis; bytes are the mean over the ranks."""

    operation: str
    axis: str
    calls: float  # per rank
    payload_bytes: float
    wire_bytes: float


class Ledger:
    """The table of messages: print it, or let the notebook show it."""

    HEADER = ("operation", "axis", "calls", "payload bytes", "bytes on the wire")

    def __init__(self, rows: Sequence[LedgerRow]) -> None:
        self.rows = list(rows)

    @property
    def wire_bytes(self) -> float:
        """Bytes sent per rank, all operations together."""
        return sum(row.wire_bytes for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text, one tuple a row, numbers with thousands separators."""

        def number(x: float) -> str:
            return f"{x:,.0f}" if float(x).is_integer() else f"{x:,.2f}"

        return [
            (r.operation, r.axis, *map(number, (r.calls, r.payload_bytes, r.wire_bytes)))
            for r in self.rows
        ]

    def __str__(self) -> str:
        table = [self.HEADER, *self.cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.HEADER))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            )
            for row in table
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

    __repr__ = __str__


class Trace(Sequence[Event]):
    """The merged events of all ranks, in order of their start."""

    def __init__(self, events: Sequence[Event], truncated: bool = False) -> None:
        self.events = sorted(events, key=lambda e: (e.start, e.rank))
        self.truncated = truncated

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, i: int) -> Event: ...
    @overload
    def __getitem__(self, i: slice) -> list[Event]: ...
    def __getitem__(self, i: int | slice) -> Event | list[Event]:
        return self.events[i]

    def __repr__(self) -> str:
        ranks = len({e.rank for e in self.events})
        return f"Trace({len(self)} events of {ranks} ranks)"

    def of(
        self,
        rank: int | None = None,
        lane: str | None = None,
        name: str | None = None,
        axis: str | None = None,
    ) -> Trace:
        """Only the events that match everything given."""
        wanted = {"rank": rank, "lane": lane, "name": name, "axis": axis}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        kept = [e for e in self if all(getattr(e, k) == v for k, v in wanted.items())]
        return Trace(kept, self.truncated)

    def inside(self, whole: Event) -> Trace:
        """What the rank of `whole`, a span around other things, began and ended within it."""
        parts = [e for e in self.of(rank=whole.rank) if whole.start < e.start and e.end < whole.end]
        return Trace(parts, self.truncated)

    def on_link(self, link: Link, n: int) -> Trace:
        """Each message, among `n` ranks, from when it is on the emulated `link`: it may have waited
        for its turn before. To 0.1 µs, so that messages that follow each other do not overlap.
        """
        moved = []
        for e in self:
            if e.lane == "comm":
                start = e.end - link.seconds(e.name, e.payload_bytes, n)
                e = e._replace(start=round(start, 7), end=round(e.end, 7))
            moved.append(e)
        return Trace(moved, self.truncated)

    def wire_bytes(self, rank: int | None = None, operation: str | None = None) -> float:
        """Bytes sent: by one rank, or by all; by one operation, or by all."""
        return sum(e.wire_bytes for e in self.of(rank=rank, name=operation))

    def ledger(self) -> Ledger:
        """Messages by operation and axis; calls and bytes are per rank: the mean over the ranks
        that did anything at all.
        """
        ranks = max(1, len({e.rank for e in self.events}))
        sums: dict[tuple[str, str], list[float]] = {}
        for e in self.of(lane="comm"):
            row = sums.setdefault((e.name, e.axis), [0, 0, 0])
            row[0] += 1
            row[1] += e.payload_bytes
            row[2] += e.wire_bytes
        return Ledger(
            [LedgerRow(*key, *(x / ranks for x in row)) for key, row in sorted(sums.items())]
        )

    def save(self, path: str | Path) -> Path:
        """Write Chrome's trace format; open the file in https://ui.perfetto.dev.

        Slices of one row may only nest there, so messages that overlap are spread over more rows.
        """
        events: list[dict] = []
        for rank in sorted({e.rank for e in self.events}):
            mine = self.of(rank=rank)
            rows = [("compute", [*mine.of(lane="compute")])]
            rows += [("comm", row) for row in side_by_side(mine.of(lane="comm"))]
            label = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": label})
            for tid, (lane, row) in enumerate(rows):
                at, label = {"pid": rank, "tid": tid}, {"name": lane}
                events.append({"ph": "M", "name": "thread_name", **at, "args": label})
                events += [{**slice_of(e), **at} for e in row]
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return path


def side_by_side(events: Sequence[Event]) -> list[list[Event]]:
    """The events, in order of their start, on as few rows as possible without overlap."""
    rows: list[list[Event]] = []
    for e in events:
        free = next((row for row in rows if row[-1].end <= e.start), None)
        if free is None:
            rows.append(free := [])
        free.append(e)
    return rows


def slice_of(e: Event) -> dict[str, object]:
    """One event as Chrome's trace format has it: a complete event ("X"), in microseconds."""
    kept = ("axis", "payload_bytes", "wire_bytes", "waits_for", "where")
    return {
        "ph": "X",
        "name": f"{e.name} {e.axis}".strip(),
        "cat": e.lane,
        "ts": e.start * 1e6,
        "dur": max(0.0, e.end - e.start) * 1e6,
        "args": {key: getattr(e, key) for key in kept} if e.lane == "comm" else {},
    }
