"""What can go wrong with ranks, said so that a reader finds the line to mend."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from typing import Any

from .board import Wait
from .handle import OURS, TORCH


def place(filename: str, line: int, function: str = "") -> str:
    """`notebook cell, line 3, in work`: a path a reader can find, the same in every run."""
    if re.search(r"ipykernel_\d+", filename) or filename.startswith("<ipython-input"):
        filename = "notebook cell"
    elif filename.startswith("<ranks cell"):
        filename = "%%ranks cell"
    inside = f", in {function}" if function and not function.startswith("<") else ""
    return f"{filename}, line {line}{inside}"


def tidy(where: str) -> str:
    """The same for "file:line" as the notice board has it."""
    filename, _, line = where.rpartition(":")
    return place(filename, int(line)) if line.isdigit() else where


def readers_frames(frames: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Without the frames of this package's ground floor and of torch: what the reader wrote."""
    hidden = (OURS, TORCH, "<frozen", "<string>")
    return [f for f in frames if not f[0].startswith(hidden)] or list(frames)


class RanksError(RuntimeError):
    """Something went wrong on the ranks; the message is the whole report."""

    def _render_traceback_(self) -> list[str]:
        """Jupyter shows this in place of the launcher's own frames."""
        return [f"{type(self).__name__}: {self}"]


class RankFailed(RanksError):
    """A rank raised, or its process ended. `rank` failed first; `line` is where, in the reader's
    code.
    """

    def __init__(self, first: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> None:
        alike = [f for f in others if same(f, first)]
        self.rank: int = min(f["rank"] for f in [first, *alike])
        self.others = sorted((f for f in others if f not in alike), key=lambda f: f["time"])
        self.type = first["type"]
        frames = readers_frames(first["frames"])
        self.line = place(*frames[-1]) if frames else ""
        said = f"{first['type']}: {first['message']}".strip(": ")
        shown = "\n".join(f"  {place(*f)}{source(*f[:2])}" for f in frames)
        self.traceback = f"Traceback of rank {self.rank}, innermost line last:\n{shown}\n{said}"
        message = f"rank {self.rank} failed first: {said}"
        if alike:
            ranks = sorted({first["rank"], *(f["rank"] for f in alike)} - {self.rank})
            message += f"\n(and alike on rank {', '.join(map(str, ranks))})"
        if frames:
            message += f"\n\n{self.traceback}"
        if first.get("log"):
            message += f"\n\nIts process printed last:\n{first['log']}"
        for other in self.others:
            message += f"\n\nrank {other['rank']} failed too: {other['type']}: {other['message']}"
        super().__init__(message)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two ranks failed in the same way at the same line."""
    return all(a[key] == b[key] for key in ("type", "message", "frames"))


def source(filename: str, line: int) -> str:
    """The text of a line, on a line of its own."""
    text = linecache.getline(filename, line).strip()
    return f"\n    {text}" if text else ""


class RanksHung(RanksError):
    """Ranks wait for something that does not come. `waits` has one entry a rank."""

    def __init__(self, waits: Sequence[Wait], why: str) -> None:
        self.waits = list(waits)
        super().__init__("\n".join([why, *map(str, self.waits)]))
