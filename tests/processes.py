"""Helpers of the tests that count processes: no rank may outlive its launch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil


def ranks_of(pid: int | None = None) -> list[psutil.Process]:
    """The live rank processes below a process (default: this one): children of its fork server."""
    found = []
    try:
        below = psutil.Process(pid or os.getpid()).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    for process in below:
        try:
            parent, lives = process.parent(), process.status() != psutil.STATUS_ZOMBIE
            if lives and parent and "picotron_edu.ranks.server" in " ".join(parent.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended while we looked
            continue
    return found


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether the condition becomes true within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def gone(pids: list[int]) -> bool:
    """Whether none of these processes lives (a zombie does not)."""

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(alive(pid) for pid in pids)
