"""A message under way: started now, waited for later.

`Handle` is the one place where a message begins and ends, so it is also where everything that this
course adds to torch happens: the note on the board (who waits for whom), the event in the trace
(how many bytes, from when to when), and the delay of an emulated link.

    start ──> the notice board checks that all ranks mean the same ──> torch sends, asynchronously
    (compute)
    wait()  ──> note that this rank is blocked ──> torch's wait ──> link delay ──> event ──> result
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .board import Call, Message
from .link import LinkQueue, link_bytes, wire_bytes
from .mesh import Axis
from .trace import Event

# folders whose frames a report does not show; the "/" keeps them apart from, say, torchvision
OURS = f"{Path(__file__).parent}{os.sep}"
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
TORCH = f"{Path(dist.__file__).parents[1]}{os.sep}"


def caller() -> str:
    """File and line of the innermost frame that the reader wrote, for reports."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((PACKAGE, TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def describe(x: Tensor) -> str:
    """`float32[4, 8]`: what both ends of a message must agree on."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class Handle:
    """A message under way. `wait()` blocks until it has arrived and returns its result.

    operation: its name in the trace; what: how all ranks of the axis must describe this call;
    payload_bytes: the N of the ring formula; start: begins the transfer and returns torch's works;
    finish: makes the result after the transfer; messages: the parts that go between two ranks, one
    (kind as on the board, place on the axis, description) each; collective: whether all ranks of
    the axis join; detail: for the report only, may differ between the ranks.
    """

    def __init__(
        self,
        axis: Axis,
        operation: str,
        what: str,
        payload_bytes: int,
        start: Callable[[], Sequence[dist.Work | None]],
        finish: Callable[[], Any],
        messages: Sequence[tuple[str, int, str]] = (),
        collective: bool = True,
        detail: str = "",
    ) -> None:
        self.axis, self.operation, self.payload_bytes = axis, operation, payload_bytes
        self.wire_bytes = wire_bytes(operation, payload_bytes, axis.size)
        self.finish, self.result = finish, None
        self.done = False
        self.call: Call | None = None  # as noted on the board
        self.messages: list[Message] = []
        runtime = axis.runtime
        self.line = caller() if runtime.board or runtime.recorder else ""
        if board := runtime.board:
            board.note(what + detail, axis.name, self.line)
            if collective:
                self.call = board.enter(axis.name, axis.ranks, what)
            self.messages = [
                board.post(axis.ranks[place], kind, f"{text} over axis '{axis.name}'")
                for kind, place, text in messages
            ]
        self.queue: LinkQueue | None = None
        self.link_bytes = self.arrival = 0.0
        if runtime.link_of(axis.name):
            self.link_bytes = link_bytes(operation, payload_bytes, axis.size)
            direction = "in" if operation == "receive" else "out"
            self.queue = runtime.queues.setdefault(f"{axis.name} {direction}", LinkQueue())
            self.queue.waiting.append(self)
        self.began = time.perf_counter()
        with self.marked():
            self.works = [work for work in start() if work is not None]
        self.ended: float | None = None  # known before wait() only where the backend tells

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """An error of the transfer itself is most often the echo of another rank's: mark it so."""
        try:
            yield
        except RuntimeError as error:
            error.in_message = True  # type: ignore[attr-defined]
            if board := self.axis.runtime.board:
                board.unblock(self.call, self.messages)  # somebody may catch it and go on
            raise

    def record_true_end(self) -> Handle:
        """Note when an asynchronous transfer ends, not when somebody comes to wait for it."""
        if self.axis.runtime.recorder and not self.axis.runtime.link and self.works:
            try:
                future = self.works[-1].get_future()
            except RuntimeError:  # gloo has no futures for reduce-scatter and point-to-point
                return self
            future.then(lambda _: setattr(self, "ended", time.perf_counter()))
        return self

    def entries(self) -> dict[int, float | None]:
        """When each rank this message needs came to it; None for those that have not yet."""
        if board := self.axis.runtime.board:
            return board.entries(self.axis.ranks, self.call, self.messages)
        return {}

    def entered(self) -> float | None:
        """When the last rank came; None as long as somebody has not."""
        times = self.entries().values()
        came = [t for t in times if t is not None]
        return max([self.began, *came]) if len(came) == len(times) else None

    def wait(self) -> Any:
        """Block until the message has arrived; a second call returns the same result at once."""
        if self.done:
            return self.result
        runtime = self.axis.runtime
        if board := runtime.board:
            board.block(self.call, self.messages)
        with self.marked():
            for work in self.works:
                work.wait()
        end = self.ended or time.perf_counter()
        if self.queue and (link := runtime.link_of(self.axis.name)):
            end = self.queue.arrival(self, link)
            time.sleep(max(0.0, end - time.perf_counter()))  # burns no CPU
        if board:
            board.unblock(self.call, self.messages)
        self.result, self.done = self.finish(), True
        self.works = []
        if recorder := runtime.recorder:
            times = {rank: t for rank, t in self.entries().items() if t is not None}
            last = max(times, key=lambda rank: times[rank]) if times else None
            recorder.add(
                Event(
                    recorder.rank,
                    "comm",
                    self.operation,
                    self.began,
                    end,
                    self.payload_bytes,
                    self.wire_bytes,
                    self.axis.name,
                    waits_for=last,
                    where=self.line,
                )
            )
        return self.result


class Arrived(Handle):
    """The handle of a message that need not be sent: its axis has one rank."""

    def __init__(self, result: Any) -> None:
        self.result, self.done = result, True
