"""What can go wrong with ranks, said so that a reader finds the line to mend."""

from __future__ import annotations

import linecache
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .board import Wait
from .handle import OURS, PACKAGE, TORCH

COURSE = str(Path(OURS).parent / "course")
LONGEST = 2000  # characters of an exception's message that a report shows
Frame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Failure:
    """How one rank failed, as plain data: the notebook knows the source of its cells, ranks do not.

    time: when, on the machine's clock; frames: outermost first; mismatch: two ranks made different
    calls; in_message: most often the echo of another rank's failure; log: what C++ printed.
    """

    rank: int
    time: float
    type: str
    message: str
    frames: Sequence[Frame] = ()
    mismatch: bool = False
    in_message: bool = False
    log: str = ""


def location(filename: str, line: int, function: str = "") -> str:
    """`notebook cell, line 3, in work`: what a reader can find, the same in every run."""
    if re.search(r"ipykernel_\d+", filename) or filename.startswith("<ipython-input"):
        filename = "notebook cell"
    elif filename.startswith("<ranks cell"):
        filename = "%%ranks cell"
    elif filename.startswith(PACKAGE):
        filename = Path(filename).relative_to(Path(PACKAGE).parent).as_posix()
    inside = f", in {function}" if function and not function.startswith("<") else ""
    return f"{filename}, line {line}{inside}"


def tidy(where: str) -> str:
    """The same for "file:line" as the notice board has it."""
    filename, _, line = where.rpartition(":")
    return location(filename, int(line)) if line.isdigit() else where


def readers_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Without the frames of this folder, of torch and of Python's own library: what the reader
    wrote (all, if that is nothing).
    """
    hidden, library = (OURS, TORCH, COURSE, "<frozen", "<string>"), sysconfig.get_path("stdlib")

    def is_readers(file: str) -> bool:
        return not file.startswith(hidden) and (
            not file.startswith(library) or "site-packages" in file
        )

    return [f for f in frames if is_readers(f[0])] or list(frames)


class RanksError(RuntimeError):
    """Something went wrong on the ranks; the message is the whole report."""

    outcome: Any = None  # pool.Outcome: what was printed until then

    def _render_traceback_(self) -> list[str]:
        """Jupyter shows this in place of the launcher's own frames."""
        return [f"{type(self).__name__}: {self}"]


class RankFailed(RanksError):
    """A rank raised, or its process ended. `rank` failed first, with an exception of this `type`;
    `line` is where, in the reader's code; `others` failed in another way, later.
    """

    def __init__(self, first: Failure, others: Sequence[Failure] = ()) -> None:
        alike = [f for f in others if same(f, first)]
        # the lowest of those alike, not the quickest: the same report in every run
        self.rank = min(f.rank for f in [first, *alike])
        self.others = sorted((f for f in others if f not in alike), key=lambda f: f.rank)
        self.type = first.type
        frames = readers_frames(first.frames)
        self.line = location(*frames[-1]) if frames else ""
        said = f"{first.type}: {shortened(first.message)}".strip(": ")
        shown = "\n".join(lines_of(frames))
        self.traceback = f"Traceback of rank {self.rank}, innermost line last:\n{shown}\n{said}"
        message = f"rank {self.rank} failed first: {said}"
        if alike:
            ranks = sorted({first.rank, *(f.rank for f in alike)} - {self.rank})
            message += f"\n(and alike on rank {', '.join(map(str, ranks))})"
        if frames:
            message += f"\n\n{self.traceback}"
        if first.log:
            message += f"\n\nIts process printed last:\n{first.log}"
        for other in self.others:
            message += f"\n\nrank {other.rank} failed too: {other.type}: {shortened(other.message)}"
        super().__init__(message)


def same(a: Failure, b: Failure) -> bool:
    """Whether two ranks failed in the same way at the same line."""
    return (a.type, a.message, a.frames) == (b.type, b.message, b.frames)


def shortened(message: str) -> str:
    return message if len(message) <= LONGEST else f"{message[:LONGEST]} … ({len(message):,} long)"


def lines_of(frames: Sequence[Frame]) -> list[str]:
    """A line a frame, and the text of that line of code; a frame that repeats is told once."""
    lines = []
    for frame, repeats in groupby(frames):
        lines.append(f"  {location(*frame)}{source(*frame[:2])}")
        if (count := len(list(repeats))) > 1:
            lines.append(f"    … {count} times")
    return lines


def source(filename: str, line: int) -> str:
    """The text of that line of code, on a line of its own."""
    text = linecache.getline(filename, line).strip()
    return f"\n    {text}" if text else ""


class RanksHung(RanksError):
    """Ranks wait for something that does not come. `waits` has one entry a rank."""

    def __init__(self, waits: Sequence[Wait], why: str) -> None:
        self.waits = list(waits)
        super().__init__("\n".join([why, *map(str, self.waits)]))
