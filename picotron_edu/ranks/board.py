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

WORKING, WAITING, RETURNED, FAILED = 1, 2, 3, 4  # the state of a rank
GROUPS = 32  # axes one rank can talk over
HISTORY = 8  # calls remembered per axis or neighbour: ranks are never further apart


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


def slot_type(world_size: int) -> np.dtype:
    """The layout of one rank's slot."""
    group = np.dtype(
        [
            ("key", "u4"),
            ("members", "u1", (world_size,)),
            ("calls", "i8"),  # calls made so far
            ("signature", "u4", (HISTORY,)),
            ("entered", "f8", (HISTORY,)),  # when each of the last calls was made
            ("waiting", "i8"),  # the call it is blocked in, 0 for none
        ]
    )
    per_rank = (world_size,)
    return np.dtype(
        [
            ("state", "i8"),
            ("version", "i8"),  # changes with every note: proves that nothing moved
            ("since", "f8"),
            ("what", "S160"),
            ("axis", "S40"),
            ("line", "S200"),
            ("groups", group, (GROUPS,)),
            ("sends", "i8", per_rank),  # messages posted to each rank
            ("receives", "i8", per_rank),
            ("send_signature", "u4", (world_size, HISTORY)),
            ("receive_signature", "u4", (world_size, HISTORY)),
            ("needs_receives", "i8", per_rank),  # blocked until that rank has posted so many
            ("needs_sends", "i8", per_rank),
        ]
    )


def checksum(text: str) -> int:
    return zlib.crc32(text.encode()) or 1


class Board:
    """All slots; `rank` is the slot this process writes (None for the parent, who only reads)."""

    def __init__(self, path: Path, world_size: int, rank: int | None = None) -> None:
        dtype = slot_type(world_size)
        if not path.exists():
            path.write_bytes(bytes(dtype.itemsize * world_size))
        self.slots = np.memmap(path, dtype=dtype, mode="r+", shape=(world_size,))
        self.world_size = world_size
        if rank is not None:
            self.rank, self.mine = rank, self.slots[rank]
            self.index: dict[int, int] = {}  # axis key → place among my groups

    # ---- written by the rank ---------------------------------------------------------------

    def state(self, state: int) -> None:
        self.mine["state"] = state
        self.mine["since"] = time.perf_counter()
        self.mine["version"] += 1

    def note(self, what: str, axis: str, line: str) -> None:
        """What this rank is about to do, for the report."""
        self.mine["what"], self.mine["axis"] = what.encode()[:160], axis.encode()[:40]
        self.mine["line"] = line.encode()[-200:]

    def enter(self, axis: str, ranks: Sequence[int], what: str) -> tuple[int, int]:
        """Note the next call on this axis; raises Mismatch if a peer's same call differs."""
        key = checksum(f"{axis}{tuple(ranks)}")
        place = self.index.get(key)
        if place is None:
            place = self.index[key] = len(self.index)
            if place == GROUPS:
                raise RuntimeError(f"one rank talks over more than {GROUPS} axes")
            self.mine["groups"][place]["members"][list(ranks)] = 1
            self.mine["groups"][place]["key"] = key
        mine = self.mine["groups"][place]
        call = int(mine["calls"]) + 1
        mine["signature"][call % HISTORY] = checksum(what)
        mine["entered"][call % HISTORY] = time.perf_counter()
        mine["calls"] = call
        self.mine["version"] += 1
        for peer in ranks:
            other = self.group_of(peer, key)
            if peer == self.rank or other is None or not call <= other["calls"] < call + HISTORY:
                continue
            if other["signature"][call % HISTORY] != checksum(what):
                raise Mismatch(f"rank {peer} makes another call than {what} over axis '{axis}'")
        return place, call

    def post(self, peer: int, kind: str, what: str) -> tuple[str, int, int]:
        """Note one send to, or receive from, `peer`; both ends must agree on shape and dtype."""
        counts, signatures = f"{kind}s", f"{kind}_signature"
        number = int(self.mine[counts][peer]) + 1
        self.mine[signatures][peer][number % HISTORY] = checksum(what)
        self.mine[counts][peer] = number
        self.mine["version"] += 1
        opposite = "receive" if kind == "send" else "send"
        posted = int(self.slots[peer][f"{opposite}s"][self.rank])
        signature = self.slots[peer][f"{opposite}_signature"][self.rank][number % HISTORY]
        if number <= posted < number + HISTORY and signature != checksum(what):
            raise Mismatch(f"rank {peer} {opposite}s another shape or dtype than {what}")
        return f"needs_{opposite}s", peer, number

    def block(self, group: tuple[int, int] | None, messages: list[tuple[str, int, int]]) -> None:
        """From now on this rank waits for that call of an axis, or for those messages."""
        if group:
            self.mine["groups"][group[0]]["waiting"] = group[1]
        for needs, peer, number in messages:
            self.mine[needs][peer] = max(self.mine[needs][peer], number)
        self.state(WAITING)

    def unblock(self, group: tuple[int, int] | None, messages: list[tuple[str, int, int]]) -> None:
        if group:
            self.mine["groups"][group[0]]["waiting"] = 0
        for needs, peer, _ in messages:
            self.mine[needs][peer] = 0
        self.state(WORKING)

    # ---- read by anybody -------------------------------------------------------------------

    def group_of(self, rank: int, key: int) -> np.void | None:
        groups = self.slots[rank]["groups"]
        (places,) = np.nonzero(groups["key"] == key)
        return groups[places[0]] if len(places) else None

    def last_to_enter(self, ranks: Sequence[int], place: int, call: int) -> tuple[int, float]:
        """Which rank made this call last, and when."""
        key = int(self.mine["groups"][place]["key"])
        times = {}
        for rank in ranks:
            group = self.group_of(rank, key)
            if group is not None and call <= group["calls"] < call + HISTORY:
                times[rank] = float(group["entered"][call % HISTORY])
        rank = max(times, key=lambda r: times[r])
        return rank, times[rank]

    def state_of(self, rank: int) -> int:
        return int(self.slots[rank]["state"])

    def blockers(self, rank: int) -> set[int]:
        """The ranks that have not yet done what `rank` waits for; empty if it does not wait."""
        slot = self.slots[rank]
        if slot["state"] != WAITING:
            return set()
        late = set()
        for group in slot["groups"][slot["groups"]["waiting"] > 0]:
            for peer in np.nonzero(group["members"])[0].tolist():
                other = self.group_of(peer, int(group["key"]))
                if other is None or other["calls"] < group["waiting"]:
                    late.add(peer)
        for peer in range(self.world_size):
            theirs = self.slots[peer]
            if (
                slot["needs_receives"][peer] > theirs["receives"][rank]
                or slot["needs_sends"][peer] > theirs["sends"][rank]
            ):
                late.add(peer)
        return late

    def deadlock(self) -> tuple[tuple[int, int], ...]:
        """The (rank, version) of all ranks that can never go on; the same twice is a proof."""
        gone = {r for r, slot in enumerate(self.slots) if slot["state"] in (RETURNED, FAILED)}
        waits_for = {r: self.blockers(r) for r in range(self.world_size)}
        stuck = {r for r, late in waits_for.items() if late}
        while freed := {r for r in stuck if not waits_for[r] & (stuck | gone)}:
            stuck -= freed
        return tuple((r, int(self.slots[r]["version"])) for r in sorted(stuck))

    def report(self) -> list[Wait]:
        """What every rank is doing now; of a failed one, the message it failed in."""
        now, waits = time.perf_counter(), []
        for rank, slot in enumerate(self.slots):
            what, axis, line = (slot[key].decode() for key in ("what", "axis", "line"))
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
