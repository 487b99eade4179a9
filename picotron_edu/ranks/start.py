"""How ranks come to life: forked by the fork server, or spawned where there is no fork (Windows).

Both give the same thing, a `Workers`: one open pipe a rank, a way to learn that a rank has ended
and how, and a way to end them all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .packing import pack

PACKAGE_ROOT = str(Path(__file__).parents[2])  # found also where the package is not installed
CAN_FORK = hasattr(os, "fork")  # Windows cannot


def python(module: str, *args: str, **options: Any) -> subprocess.Popen:
    """Start a module of this package, in a session that Ctrl-C in a terminal does not reach."""
    find = f"import runpy, sys; sys.path.insert(0, {PACKAGE_ROOT!r})"
    run = f"runpy.run_module({module!r}, run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"{find}; {run}", *args],  # -P: not the files lying around
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        **{"stderr": subprocess.DEVNULL, **options},
        start_new_session=True,
    )


class ForkServer:
    """The notebook's hold on its fork server."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        self.lock = threading.Lock()
        with theirs:
            fd = theirs.fileno()
            self.log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the server)
            module = "picotron_edu.ranks.server"
            self.process = python(module, str(fd), pass_fds=[fd], stderr=self.log)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def new_job(self, pipes: list[Connection]) -> None:
        with self.lock:
            socket.send_fds(self.control, [b"job"], [pipe.fileno() for pipe in pipes])


@functools.lru_cache(maxsize=1)
def _fork_server(pid: int) -> ForkServer:  # one for each notebook process, also after a fork
    return ForkServer()


def fork_server() -> ForkServer:
    """The running fork server; starts one if there is none (about 2 s, torch must be imported)."""
    server = _fork_server(os.getpid())
    if not server.alive:
        _fork_server.cache_clear()
        server = _fork_server(os.getpid())
    return server


class Workers:
    """The processes of one launch. `pipes[r]` talks to rank r, and closes when that rank ends."""

    pipes: list[Connection]

    def exits(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended since the last call; −9 is a SIGKILL."""
        raise NotImplementedError

    def last_words(self) -> str:
        """Why no rank lives, where that is known: the end of what the fork server wrote."""
        return ""

    def end(self) -> None:
        """Kill every rank and remove the job's folder."""
        raise NotImplementedError


class ForkedWorkers(Workers):
    def __init__(self, world_size: int, spec: dict[str, Any]) -> None:
        self.server = server = fork_server()
        self.job, job_end = Pipe()
        pairs = [Pipe() for _ in range(world_size)]
        self.pipes = [ours for ours, _ in pairs]
        theirs = [end for _, end in pairs]
        try:
            server.new_job([job_end, *theirs])
        finally:
            for end in (job_end, *theirs):
                end.close()
        self.job.send(spec)

    def exits(self) -> dict[int, int]:
        codes = {}
        with contextlib.suppress(EOFError, OSError):
            while self.job.poll():
                rank, code = self.job.recv()
                codes[rank] = code
        return codes

    def last_words(self) -> str:
        if self.server.alive:
            return ""
        self.server.log.seek(0)
        return "The fork server ended. " + self.server.log.read().decode(errors="replace")[-2000:]

    def end(self) -> None:
        self.job.close()  # the server kills what is left
        for pipe in self.pipes:
            pipe.close()


class SpawnedWorkers(Workers):
    def __init__(self, world_size: int, spec: dict[str, Any]) -> None:
        self.folder = spec["folder"]
        self.pipes, self.processes, self.told = [], [], set[int]()
        for rank in range(world_size):
            ours, theirs = Pipe()
            handle, options = inheritable(theirs)
            module = "picotron_edu.ranks.spawned"
            self.processes.append(python(module, str(rank), str(handle), **options))
            theirs.close()
            self.pipes.append(ours)
            ours.send_bytes(pack(spec))

    def exits(self) -> dict[int, int]:
        codes = {r: p.returncode for r, p in enumerate(self.processes) if p.poll() is not None}
        new = {rank: code for rank, code in codes.items() if rank not in self.told}
        self.told |= set(new)
        return new

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def inheritable(pipe: Connection) -> tuple[int, dict[str, Any]]:
    """The number under which a child process finds `pipe`, and Popen's options for that."""
    fd = pipe.fileno()
    if sys.platform != "win32":
        return fd, {"pass_fds": [fd]}
    os.set_handle_inheritable(fd, True)
    startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [fd]})
    return fd, {"startupinfo": startup, "close_fds": True}


def start_workers(world_size: int, spec: dict[str, Any], method: str | None) -> Workers:
    """Start the ranks; method "fork" (from the fork server), "spawn", or None: fork if possible."""
    method = method or ("fork" if CAN_FORK else "spawn")
    kinds = {"fork": ForkedWorkers, "spawn": SpawnedWorkers}
    if method not in kinds:
        raise ValueError(f"start_method={method!r}: must be 'fork' or 'spawn'")
    return kinds[method](world_size, spec)
