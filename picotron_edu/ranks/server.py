"""The fork server: a process that has torch imported already and makes ranks out of itself.

A new Python process needs seconds to import torch; a fork of one that has it needs milliseconds.
Forking the notebook itself would copy its threads' locks and its CUDA state, which breaks in many
ways, so a small clean process is started once and forked from then on:

    notebook ══ control ══> server         one per notebook; when the notebook dies, control
       ║                     ├─ rank 0      closes, and the server kills every rank it has
       ║  one pipe a rank    ├─ rank 1
       ╚═════════════════════└─ …

For each job the notebook sends one message with open pipes: one to talk about the job, one per
rank. When the job's pipe closes, for whatever reason, its ranks are killed and its temporary folder
is removed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

IDLE = 1.0  # seconds without work after which the server imports what only some ranks need


class Job:
    """The ranks of one launch."""

    def __init__(self, pipe: Connection, rank_fds: list[int]) -> None:
        self.pipe, self.rank_fds = pipe, rank_fds
        self.folder: str | None = None
        self.pids: dict[int, int] = {}  # pid → rank, of those that live

    def start(self, spec: dict[str, Any], close: list[int]) -> None:
        """Fork one child a rank; `close` are this server's own files, no business of a rank."""
        self.folder = spec["folder"]
        for rank, fd in enumerate(self.rank_fds):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, fd, spec, [*close, *(f for f in self.rank_fds if f != fd)])
            self.pids[pid] = rank
        for fd in self.rank_fds:
            os.close(fd)
        self.rank_fds = []

    def end(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with whatever it has started itself
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # if it had no time to found its group
        self.pipe.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def become_rank(rank: int, fd: int, spec: dict[str, Any], close: list[int]) -> None:
    """In the fork: drop everything of the server, run the rank, and never return."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for other in close:
            os.close(other)
        from . import worker

        worker.main(rank, Connection(fd), spec)
    finally:
        os._exit(1)  # an exception must not lead back into the server's own loop


def reap(jobs: dict[Connection, Job]) -> None:
    """Tell each job which of its ranks have ended, and how."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            for job in jobs.values():
                if pid in job.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # what it has started goes with it
                    with contextlib.suppress(OSError):
                        job.pipe.send((job.pids.pop(pid), os.waitstatus_to_exitcode(status)))


def serve(control: socket.socket) -> None:
    """Start and end jobs until the notebook is gone."""
    jobs: dict[Connection, Job] = {}
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # ends the wait below
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the notebook's; it tells us by closing
    own = [control.fileno(), wake, wake_write]
    complete = False
    while True:
        idle = None if jobs or complete else IDLE
        all_ready = wait([control, wake, *jobs], timeout=idle)
        if not all_ready:
            import_module("torch._dynamo")  # torch's profiler, optimizers, checkpoint load it
            gc.freeze()
            complete = True
        for ready in all_ready:
            if ready is control:
                message, fds, _, _ = socket.recv_fds(control, 16, 200)
                if not message:  # the notebook is gone
                    for job in jobs.values():
                        job.end()
                    return
                pipe = Connection(fds[0])
                jobs[pipe] = Job(pipe, fds[1:])
            elif ready == wake:
                os.read(wake, 1024)
            else:
                # a job's pipe brings its spec, and after that only its end of file
                job = jobs[ready]  # type: ignore[index]
                try:
                    others = [pipe.fileno() for pipe in jobs]
                    job.start(job.pipe.recv(), [*own, *others])
                except (EOFError, OSError):
                    del jobs[job.pipe]
                    job.end()
        reap(jobs)


if __name__ == "__main__":
    # What every rank needs is imported and done once, here.
    import numpy.random
    import torch.distributed.device_mesh

    from . import magic, worker  # noqa: F401

    torch.manual_seed(0)  # the first seeding costs more than later ones
    numpy.random.seed(0)
    gc.freeze()  # the garbage collector of a rank need not walk through torch (0.2 s)
    serve(socket.socket(fileno=int(sys.argv[1])))
