"""A pool of ranks, seen from the notebook: send them work, hear them, end them in every case.

`RankPool.run` is one loop that waits for the ranks' pipes and asks three questions each time round:

    has a rank failed?          take a moment to hear who else did, then name the first by time:
                                neighbours of a dead rank fail too ("connection reset"), but later
    can anybody still move?     the notice board knows who waits for whom (board.py)
    is the time limit over?     ask each rank where it is

However it ends, with a result, an exception or Ctrl-C, nobody is left behind: after anything but
success the pool is ended, and the fork server kills what is left of it.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .board import WORKING, Board, Wait
from .errors import (
    Failure,
    Frame,
    RankFailed,
    RanksError,
    RanksHung,
    location,
    readers_frames,
    tidy,
)
from .packing import pack, unpack
from .start import start_workers
from .trace import Event

GRACE = 0.3  # seconds to hear of other failures after the first one
PATIENCE = 0.1  # seconds of silence after which the board is read


@dataclass
class Outcome:
    """What came back from one task; lists have one entry a rank."""

    values: list[Any]
    texts: list[list[tuple[str, str]]]  # ("out" or "err", text) as it came
    events: list[Event] = field(default_factory=list)
    truncated: bool = False


class RankPool:
    """`world_size` ranks with a process group, ready to run tasks; a context manager."""

    def __init__(self, world_size: int, spec: dict[str, Any], method: str | None = None) -> None:
        self.world_size = world_size
        self.alive = True
        self.folder = Path(tempfile.mkdtemp(prefix="picotron-edu-"))
        spec = {**spec, "world_size": world_size, "folder": str(self.folder)}
        try:
            self.board = Board(self.folder / "board", world_size)
            self.workers = start_workers(world_size, spec, method)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End every rank, at once."""
        if self.alive:
            self.alive = False
            self.workers.end()

    def run(
        self,
        kind: str,
        payload: dict[str, Any],
        timeout: float | None,
        live: Callable[[str, str], None] | None = None,
    ) -> Outcome:
        """Run a task on every rank; `live` is called with each piece of rank 0's text as it comes.

        Raises RankFailed or RanksHung, whose `outcome` holds the text printed until then.
        """
        task = Task(self, timeout, live)
        try:
            for slot in self.board.slots:  # else those who returned from the last task seem gone
                slot["state"] = WORKING
            message = pack((kind, payload))
            for pipe in self.workers.pipes:
                with contextlib.suppress(OSError):  # it is dead; the loop will tell how
                    pipe.send_bytes(message)
            return task.wait()
        except RanksError as error:
            error.outcome = task.outcome
            if len(task.returned) + len(task.failures) < self.world_size or task.ended:
                self.end()  # some rank still waits for another: nothing sensible can follow
            raise
        except BaseException:  # Ctrl-C above all
            self.end()
            raise


class Task:
    """One task while it runs."""

    def __init__(
        self, pool: RankPool, timeout: float | None, live: Callable[[str, str], None] | None
    ) -> None:
        n = pool.world_size
        self.pool, self.timeout, self.live = pool, timeout, live
        self.outcome = Outcome([None] * n, [[] for _ in range(n)])
        self.returned: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.ended: set[int] = set()  # those whose pipe has closed
        self.codes: dict[int, int] = {}  # and how their processes ended
        self.where: dict[int, list[Frame]] = {}  # the stacks of those that were asked
        self.stuck: tuple = ()

    @property
    def finished(self) -> set[int]:
        """The ranks that have answered, or whose process has ended."""
        return {*self.returned, *self.failures, *self.ended}

    def wait(self) -> Outcome:
        """Listen until every rank has returned; raise as soon as one cannot."""
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        while len(self.returned) < self.pool.world_size:
            quiet = not self.listen(PATIENCE)
            if self.failures or self.ended:
                self.fail()
            if quiet and (stuck := self.pool.board.deadlock()):
                if stuck == self.stuck:  # nobody has moved since the last look
                    raise RanksHung(self.report(), "the ranks wait for each other for ever:")
                self.stuck = stuck
            if deadline and time.monotonic() > deadline and not self.pool.board.all_returned():
                raise RanksHung(self.report(), f"not finished within timeout={self.timeout:g} s:")
        return self.outcome

    def listen(self, seconds: float) -> bool:
        """Handle what the ranks send within `seconds`; False if nobody said anything."""
        pipes = {
            pipe: rank
            for rank, pipe in enumerate(self.pool.workers.pipes)
            if rank not in self.ended and not pipe.closed
        }
        heard = wait(list(pipes), seconds)
        for pipe, rank in pipes.items():
            if pipe in heard:
                try:
                    while pipe.poll():
                        self.handle(rank, *unpack(pipe.recv_bytes()))
                except (EOFError, OSError):
                    self.ended.add(rank)
        return bool(heard)

    def exit_code(self, rank: int) -> int:
        """How a rank ended whose pipe has closed; the fork server tells a moment later."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            self.codes.update(self.pool.workers.exits())
            if rank in self.codes:
                return self.codes[rank]
            time.sleep(0.005)
        return 1  # nobody knows: the fork server itself is gone

    def handle(self, rank: int, kind: str, *content: Any) -> None:
        """Take in one message of a rank (see `worker.py`)."""
        if kind == "text":
            self.outcome.texts[rank].append((content[0], content[1]))
            if self.live and rank == 0:
                self.live(*content)
        elif kind == "returned":
            answer, events, truncated = content
            try:
                self.outcome.values[rank] = unpack(answer)
            except Exception as error:
                what = f"what the function returned cannot be made again in this process: {error}"
                self.failures[rank] = Failure(rank, time.perf_counter(), "TypeError", what)
                return
            self.outcome.events += events
            self.outcome.truncated |= truncated
            self.returned.add(rank)
        elif kind == "failed":
            self.failures[rank] = content[0]
        elif kind == "where":
            self.where[rank] = content[0]

    def fail(self) -> None:
        """Raise RankFailed for the first failure, after a moment for the others to report."""
        until = time.monotonic() + GRACE
        while (left := until - time.monotonic()) > 0 and len(self.finished) < self.pool.world_size:
            self.listen(left)
        failures = list(self.failures.values())
        for rank in self.ended - self.failures.keys() - self.returned:
            failures.append(self.died(rank, self.exit_code(rank)))
        if not failures:  # a process ended after it had returned: nobody misses it
            return
        if any(f.mismatch for f in failures):
            calls = [
                replace(w, what=w.what.replace("waits in", "calls"), blocked=False)
                for w in self.report()
            ]
            why = "the ranks do not agree on what they call:"
            if len({w.what for w in calls}) == 1:  # the other call was begun earlier, and left open
                why = f"{next(f.message for f in failures if f.mismatch)}; they are now in:"
            raise RanksHung(calls, why)
        # echoes of somebody else's failure come last, and need not be told
        first, *rest = sorted(failures, key=lambda f: (f.in_message, f.time))
        raise RankFailed(first, [f for f in rest if not f.in_message])

    def died(self, rank: int, code: int) -> Failure:
        """The description of a rank whose process ended without a word."""
        what = f"its process ended with exit code {code}"
        if code < 0:
            names = {s.value: s.name for s in signal.Signals}
            what = f"its process was killed by {names.get(-code, f'signal {-code}')}"
        log = self.pool.folder / f"rank{rank}.log"
        text = log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""
        text = text or self.pool.workers.last_words()
        # time 0: before any exception that it caused elsewhere
        return Failure(rank, 0.0, "RankDied", what, log=text)

    def report(self) -> list[Wait]:
        """What every rank is doing; those outside any message are asked for their line."""
        waits = self.pool.board.report()
        asked = [w.rank for w in waits if not w.blocked and w.rank not in self.finished]
        for rank in asked:
            with contextlib.suppress(OSError):
                self.pool.workers.pipes[rank].send_bytes(pack(("where",)))
        until = time.monotonic() + 0.5
        while (left := until - time.monotonic()) > 0 and not self.where.keys() >= set(asked):
            self.listen(left)
        for rank in asked:
            if rank in self.where:
                line = location(*readers_frames(self.where[rank])[-1])
                waits[rank] = replace(waits[rank], line=line)
            else:
                what = "does not answer: busy outside Python, or stopped"
                waits[rank] = replace(waits[rank], what=what)
        return [replace(w, line=tidy(w.line)) for w in waits]
