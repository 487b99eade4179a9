"""The notice board: every rank writes what it is about to do, so that no rank waits in silence.

The board is a small file that all ranks map into their memory, with one slot per rank. Before each
message a rank notes the operation, the axis, its line and a running number; this costs
microseconds. Two questions are answered from it without sending anything:

1. *Do we all mean the same?* The k-th call on an axis must be the same operation on the same shape
   on every rank. Who arrives second compares (`Board.enter`): a mismatch is an error at once.
2. *Can this wait ever end?* A rank waits for those who have not yet made the matching call. If they
   have returned, or wait (directly or round a ring) for the one who waits, it never will:

       rank 0: send to 1 ─waits for─> rank 1: send to 0 ─waits for─> rank 0    a deadlock

`Board.deadlock` finds the largest set of waiting ranks of which each waits for a member of the set
or for a rank that is gone. Sends count as *rendezvous*: a send ends when its receive has been
posted.

Source: the wait-for graph with AND semantics, Knapp, "Deadlock detection in distributed databases",
1987.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .slots import AXES, HISTORY, OPPOSITE, slot_type

WORKING, WAITING, RETURNED, FAILED = 1, 2, 3, 4  # the state of a rank

Call = tuple[int, int]  # a collective call: the row of its axis in this rank's slot, its number
Message = tuple[str, int, int]  # one end of a message: its kind, the other rank, its number


class Mismatch(RuntimeError):
    """Two ranks made different calls where they should have made the same one."""


@dataclass(frozen=True)
class Wait:
    """What one rank of a hung run was doing, `since` how many seconds."""

    rank: int
    what: str
    axis: str
    line: str
    since: float
    blocked: bool

    def __str__(self) -> str:
        """One line of a report; how long is said once it is long."""
        where = f" at {self.line}" if self.line else ""
        return f"  rank {self.rank} {self.what}{where}" + (
            f", for {self.since:.0f} s" if self.since >= 1 and self.blocked else ""
        )


def checksum(text: str) -> int:
    return zlib.crc32(text.encode()) or 1


class Board:
    """All slots; `rank` is the one this process writes to (None for the parent, who reads)."""

    def __init__(self, path: Path, world_size: int, rank: int | None = None) -> None:
        dtype = slot_type(world_size)
        if not path.exists():
            path.write_bytes(bytes(dtype.itemsize * world_size))
        # a plain array over the shared memory: np.memmap's own indexing is ten times slower
        self.slots = np.asarray(np.memmap(path, dtype=dtype, mode="r+", shape=(world_size,)))
        self.columns = {name: self.slots[name] for name in dtype.names or ()}
        self.world_size = world_size
        self.rows: dict[tuple[int, int], int] = {}  # (rank, axis key) → row in that rank's slot
        if rank is not None:
            self.rank = rank

    # ---- written by the rank ---------------------------------------------------------------

    def set_state(self, state: int) -> None:
        column, me = self.columns, self.rank
        column["state"][me] = state
        column["since"][me] = time.perf_counter()
        column["version"][me] += 1

    def note(self, what: str, axis: str, line: str) -> None:
        """What this rank is about to do, for the report."""
        column, me = self.columns, self.rank
        column["what"][me], column["axis"][me] = what.encode()[:160], axis.encode()[:40]
        column["line"][me] = line.encode()[-200:]

    def enter(self, axis: str, ranks: Sequence[int], what: str) -> Call:
        """Note the next call on this axis; raises Mismatch if a peer's same call differs."""
        column, me = self.columns, self.rank
        key, signature = checksum(f"{axis}{tuple(ranks)}"), checksum(what)
        row = self.row_of(me, key)
        if row is None:
            row = self.new_row(key, ranks)
        number = int(column["calls"][me, row]) + 1
        column["signature"][me, row, number % HISTORY] = signature
        column["entered"][me, row, number % HISTORY] = time.perf_counter()
        column["calls"][me, row] = number  # last: who sees the number finds its signature
        for peer in ranks:
            theirs = self.row_of(peer, key)
            if theirs is None or not number <= column["calls"][peer, theirs] < number + HISTORY:
                continue
            if column["signature"][peer, theirs, number % HISTORY] != signature:
                raise Mismatch(f"rank {peer} makes another call than {what} over axis '{axis}'")
        return row, number

    def new_row(self, key: int, ranks: Sequence[int]) -> int:
        """The next free row of this rank's slot, from now on that of the axis `key`."""
        keys = self.columns["key"][self.rank].tolist()
        if 0 not in keys:
            raise RuntimeError(
                f"rank {self.rank} talks over more than {AXES} axes: make a Mesh once and use it "
                f"again"
            )
        row = keys.index(0)
        self.columns["members"][self.rank, row, list(ranks)] = 1
        self.columns["key"][self.rank, row] = key
        return row

    def post(self, peer: int, kind: str, what: str) -> Message:
        """Note one message to or from `peer`, of a `kind` in OPPOSITE; both ends must agree."""
        column, me, signature = self.columns, self.rank, checksum(what)
        number = int(column[f"{kind} count"][me, peer]) + 1
        column[f"{kind} signature"][me, peer, number % HISTORY] = signature
        column[f"{kind} posted"][me, peer, number % HISTORY] = time.perf_counter()
        column[f"{kind} count"][me, peer] = number
        other = OPPOSITE[kind]
        count = column[f"{other} count"][peer, me]
        theirs = column[f"{other} signature"][peer, me, number % HISTORY]
        if number <= count < number + HISTORY and theirs != signature:
            raise Mismatch(f"rank {me} {kind}s {what}, rank {peer} {other}s something else")
        return kind, peer, number

    def block(self, call: Call | None, messages: list[Message]) -> None:
        """From now on this rank waits until `call` and `messages` have been met by the others."""
        column, me = self.columns, self.rank
        if call:
            row, number = call
            column["waiting"][me, row] = number
        for kind, peer, number in messages:
            waiting = column[f"{kind} waiting"]
            waiting[me, peer] = max(waiting[me, peer], number)
        self.set_state(WAITING)

    def unblock(self, call: Call | None, messages: list[Message]) -> None:
        if call:
            self.columns["waiting"][self.rank, call[0]] = 0
        for kind, peer, _ in messages:
            self.columns[f"{kind} waiting"][self.rank, peer] = 0
        self.columns["state"][self.rank] = WORKING

    # ---- read by anybody -------------------------------------------------------------------

    def row_of(self, rank: int, key: int) -> int | None:
        """The row of the axis `key` in the slot of `rank`; None if it has not used it yet."""
        if (rank, key) not in self.rows:
            keys = self.columns["key"][rank].tolist()
            if key not in keys:
                return None
            self.rows[rank, key] = keys.index(key)
        return self.rows[rank, key]

    def entries(
        self, ranks: Sequence[int], call: Call | None, messages: list[Message]
    ) -> dict[int, float | None]:
        """When each rank made `call` (without one: posted its end of the last of `messages`); None
        for not yet, 0 for so long ago that it is forgotten.
        """
        column, me = self.columns, self.rank
        times: dict[int, float | None] = {}

        def came(rank: int, number: int, count: int, posted: np.ndarray) -> None:
            moment = float(posted[number % HISTORY]) if count < number + HISTORY else 0.0
            before = times.get(rank, 0.0)
            times[rank] = None if count < number or before is None else max(moment, before)

        if call:
            row, number = call
            key = int(column["key"][me, row])
            for rank in ranks:
                theirs = self.row_of(rank, key)
                count = 0 if theirs is None else int(column["calls"][rank, theirs])
                came(rank, number, count, column["entered"][rank, theirs or 0])
            return times
        for kind, peer, number in messages:
            for name, rank, to in ((kind, me, peer), (OPPOSITE[kind], peer, me)):
                count = int(column[f"{name} count"][rank, to])
                came(rank, number, count, column[f"{name} posted"][rank, to])
        return times

    def state_of(self, rank: int) -> int:
        return int(self.columns["state"][rank])

    def all_returned(self) -> bool:
        return all(self.state_of(rank) == RETURNED for rank in range(self.world_size))

    def blockers(self, rank: int) -> set[int]:
        """The ranks that have not yet done what `rank` waits for; empty if it does not wait."""
        column = self.columns
        late: set[int] = set()
        if self.state_of(rank) != WAITING:
            return late
        # lists, not arrays: others write while this one reads
        for row, number in enumerate(column["waiting"][rank].tolist()):
            members = column["members"][rank, row].tolist() if number else []
            for peer in (p for p, is_member in enumerate(members) if is_member):
                theirs = self.row_of(peer, int(column["key"][rank, row]))
                if theirs is None or column["calls"][peer, theirs] < number:
                    late.add(peer)
        for kind, other in OPPOSITE.items():
            waiting, count = column[f"{kind} waiting"][rank], column[f"{other} count"][:, rank]
            late |= {p for p, n in enumerate(waiting.tolist()) if n > count[p]}
        return late

    def deadlock(self) -> tuple[tuple[int, int], ...]:
        """The (rank, version) of all ranks that can never go on; the same twice is a proof."""
        gone = {r for r in range(self.world_size) if self.state_of(r) in (RETURNED, FAILED)}
        waits_for = {r: self.blockers(r) for r in range(self.world_size)}
        stuck = {r for r, late in waits_for.items() if late}
        while freed := {r for r in stuck if not waits_for[r] & (stuck | gone)}:
            stuck -= freed
        return tuple((r, int(self.columns["version"][r])) for r in sorted(stuck))

    def report(self) -> list[Wait]:
        """What every rank is doing now; of a failed one, the last message it began."""
        now, waits = time.perf_counter(), []
        for rank, slot in enumerate(self.slots):
            what, axis, line = (slot[k].decode(errors="replace") for k in ("what", "axis", "line"))
            state, since = int(slot["state"]), now - float(slot["since"])
            if state == WAITING:
                what = f"waits in {what} over axis '{axis}'"
            elif state == FAILED and what:
                what = f"calls {what} over axis '{axis}'"
            else:
                axis = line = ""
                what = "has returned: it will not join" if state == RETURNED else "is in no message"
            waits.append(Wait(rank, what, axis, line, since, state == WAITING))
        return waits
