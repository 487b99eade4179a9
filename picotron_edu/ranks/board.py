"""The notice board: every rank writes what it is about to do, so that no rank waits in silence.

The board is a small file in shared memory with one slot per rank. Before each message a rank notes
the operation, the axis, its line and a running number; this costs microseconds. Two questions are
answered from it without sending anything:

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

from .slots import GROUPS, HISTORY, OPPOSITE, slot_type

WORKING, WAITING, RETURNED, FAILED = 1, 2, 3, 4  # the state of a rank


class Mismatch(RuntimeError):
    """Two ranks made different calls where they should have made the same one."""


@dataclass(frozen=True)
class Wait:
    """What one rank of a hung run was doing; `since` is in seconds before now."""

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
    """All slots; `rank` is the slot this process writes (None for the parent, who only reads)."""

    def __init__(self, path: Path, world_size: int, rank: int | None = None) -> None:
        dtype = slot_type(world_size)
        if not path.exists():
            path.write_bytes(bytes(dtype.itemsize * world_size))
        # a plain array over the shared memory: np.memmap's own indexing is ten times slower
        self.slots = np.asarray(np.memmap(path, dtype=dtype, mode="r+", shape=(world_size,)))
        self.columns = {name: self.slots[name] for name in dtype.names or ()}
        self.world_size = world_size
        self.places: dict[tuple[int, int], int] = {}  # (rank, axis key) → place among its axes
        if rank is not None:
            self.rank = rank

    # ---- written by the rank ---------------------------------------------------------------

    def state(self, state: int) -> None:
        column, me = self.columns, self.rank
        column["state"][me] = state
        column["since"][me] = time.perf_counter()
        column["version"][me] += 1

    def note(self, what: str, axis: str, line: str) -> None:
        """What this rank is about to do, for the report."""
        column, me = self.columns, self.rank
        column["what"][me], column["axis"][me] = what.encode()[:160], axis.encode()[:40]
        column["line"][me] = line.encode()[-200:]

    def enter(self, axis: str, ranks: Sequence[int], what: str) -> tuple[int, int]:
        """Note the next call on this axis; raises Mismatch if a peer's same call differs."""
        column, me = self.columns, self.rank
        key, signature = checksum(f"{axis}{tuple(ranks)}"), checksum(what)
        place = self.place_of(me, key)
        if place is None:
            place = self.new_place(key, ranks)
        call = int(column["calls"][me, place]) + 1
        column["signature"][me, place, call % HISTORY] = signature
        column["entered"][me, place, call % HISTORY] = time.perf_counter()
        column["calls"][me, place] = call
        for peer in ranks:
            theirs = self.place_of(peer, key)
            if theirs is None or not call <= column["calls"][peer, theirs] < call + HISTORY:
                continue
            if column["signature"][peer, theirs, call % HISTORY] != signature:
                raise Mismatch(f"rank {peer} makes another call than {what} over axis '{axis}'")
        return place, call

    def new_place(self, key: int, ranks: Sequence[int]) -> int:
        keys = self.columns["key"][self.rank].tolist()
        if 0 not in keys:
            raise RuntimeError(
                f"rank {self.rank} talks over more than {GROUPS} axes: make a Mesh once and use it "
                f"again"
            )
        place = keys.index(0)
        self.columns["members"][self.rank, place, list(ranks)] = 1
        self.columns["key"][self.rank, place] = key
        return place

    def post(self, peer: int, kind: str, what: str) -> tuple[str, int, int]:
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

    def block(self, group: tuple[int, int] | None, messages: list[tuple[str, int, int]]) -> None:
        """From now on this rank waits for that call of an axis, or for those messages."""
        column, me = self.columns, self.rank
        if group:
            column["waiting"][me, group[0]] = group[1]
        for kind, peer, number in messages:
            waiting = column[f"{kind} waiting"]
            waiting[me, peer] = max(waiting[me, peer], number)
        self.state(WAITING)

    def unblock(self, group: tuple[int, int] | None, messages: list[tuple[str, int, int]]) -> None:
        if group:
            self.columns["waiting"][self.rank, group[0]] = 0
        for kind, peer, _ in messages:
            self.columns[f"{kind} waiting"][self.rank, peer] = 0
        self.columns["state"][self.rank] = WORKING

    # ---- read by anybody -------------------------------------------------------------------

    def place_of(self, rank: int, key: int) -> int | None:
        """Where `rank` has noted the axis `key`; None if it has not used it yet."""
        if (rank, key) not in self.places:
            keys = self.columns["key"][rank].tolist()
            if key not in keys:
                return None
            self.places[rank, key] = keys.index(key)
        return self.places[rank, key]

    def entries(
        self,
        ranks: Sequence[int],
        group: tuple[int, int] | None,
        messages: list[tuple[str, int, int]],
    ) -> dict[int, float | None]:
        """When each rank made the call `group` (else: posted its end of `messages`); None for not
        yet, 0 for so long ago that it is forgotten.
        """
        column, me = self.columns, self.rank
        times: dict[int, float | None] = {}

        def note(rank: int, number: int, count: int, posted: np.ndarray) -> None:
            time = float(posted[number % HISTORY]) if count < number + HISTORY else 0.0
            before = times.get(rank, 0.0)
            times[rank] = None if count < number or before is None else max(time, before)

        if group:
            key, call = int(column["key"][me, group[0]]), group[1]
            for rank in ranks:
                at = self.place_of(rank, key)
                count = 0 if at is None else int(column["calls"][rank, at])
                note(rank, call, count, column["entered"][rank, at or 0])
            return times
        for kind, peer, number in messages:
            for name, rank, to in ((kind, me, peer), (OPPOSITE[kind], peer, me)):
                count = int(column[f"{name} count"][rank, to])
                note(rank, number, count, column[f"{name} posted"][rank, to])
        return times

    def state_of(self, rank: int) -> int:
        return int(self.columns["state"][rank])

    def blockers(self, rank: int) -> set[int]:
        """The ranks that have not yet done what `rank` waits for; empty if it does not wait."""
        column = self.columns
        late: set[int] = set()
        if self.state_of(rank) != WAITING:
            return late
        # lists, not arrays: others write while this one reads
        for place, call in enumerate(column["waiting"][rank].tolist()):
            members = column["members"][rank, place].tolist() if call else []
            for peer in (p for p, is_member in enumerate(members) if is_member):
                at = self.place_of(peer, int(column["key"][rank, place]))
                if at is None or column["calls"][peer, at] < call:
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
        """What every rank is doing now; of a failed one, the message it failed in."""
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
