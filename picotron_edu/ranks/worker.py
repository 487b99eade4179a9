"""The life of one rank: join the process group, then run what the notebook sends.

Three kinds of things go back to the notebook over the rank's pipe: printed text as it comes, and at
the end of a task either its result with the recorded events, or a description of the exception. A
second thread listens to the pipe all the time: it answers "where are you?" while the rank hangs,
and ends the process when the notebook is gone.
"""

from __future__ import annotations

import ast
import datetime
import io
import linecache
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .board import FAILED, RETURNED, WORKING, Board, Mismatch
from .errors import Failure, Frame
from .packing import pack, unpack
from .runtime import CURRENT, Runtime, seed_rank, take_device
from .trace import Recorder


class Pipe:
    """The rank's end: several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()

    def send(self, *message: Any) -> None:
        with self.lock:
            self.connection.send_bytes(pack(message))

    def send_text(self, stream: str, text: str) -> None:
        """The same for text, of which there may be a lot: plain pickle is ten times quicker."""
        with self.lock:
            self.connection.send_bytes(pickle.dumps(("text", stream, text)))


class RankText(io.TextIOBase):
    """sys.stdout or sys.stderr of a rank: whole lines travel to the notebook."""

    def __init__(self, pipe: Pipe, stream: str) -> None:
        self.pipe, self.stream, self.kept = pipe, stream, ""

    def write(self, text: str) -> int:
        self.kept += text
        if "\n" in text or "\r" in text or len(self.kept) > 8192:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self.kept = self.kept, ""
        if text:
            self.pipe.send_text(self.stream, text)

    def writable(self) -> bool:
        return True


def main(rank: int, connection: Connection, spec: dict[str, Any]) -> None:
    """Run rank `rank` as `spec` says (see `launch.make_spec`) until the process is ended."""
    pipe = Pipe(connection)
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    main_thread = threading.get_ident()
    try:
        set_up_process(rank, pipe, spec)
        threading.Thread(
            target=listen, args=(connection, pipe, tasks, main_thread), daemon=True
        ).start()
        runtime = join(rank, spec)
    except BaseException as error:
        pipe.send("failed", describe(error, rank))
        os._exit(1)
    cell_names: dict[str, Any] = {}
    while True:
        kind, payload = tasks.get()
        run_task(kind, payload, pipe, runtime, cell_names)


def set_up_process(rank: int, pipe: Pipe, spec: dict[str, Any]) -> None:
    """The notebook's environment, folder and import path; its own text, threads and seeds."""
    os.environ.clear()
    os.environ.update(spec["environ"])
    os.chdir(spec["cwd"])
    sys.path[:], sys.argv[:] = spec["sys_path"], spec["argv"]
    # What C++ prints goes to a file, whose end is shown if the rank dies without a word.
    log = os.open(Path(spec["folder"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = RankText(pipe, "out"), RankText(pipe, "err")
    sys.stdin = open(os.devnull)  # noqa: SIM115  (for the life of the process)
    torch.set_num_threads(spec["threads"])  # before anything has started torch's pool
    seed_rank(spec["seed"], rank)


def join(rank: int, spec: dict[str, Any]) -> Runtime:
    """Meet the other ranks in the job's folder and fill in this rank's runtime."""
    folder, world_size = Path(spec["folder"]), spec["world_size"]
    device = take_device(spec["backend"], rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        spec["backend"],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(days=1),  # the notebook's time limit comes first, and explains
    )
    board = Board(folder / "board", world_size, rank)
    runtime = Runtime(board, None, spec["link"], device)
    CURRENT.set(runtime)
    return runtime


def listen(connection: Connection, pipe: Pipe, tasks: queue.SimpleQueue, main_thread: int) -> None:
    """Take tasks from the notebook, say where the main thread is, end with the notebook."""
    while True:
        try:
            message = unpack(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        if message[0] == "where":
            pipe.send("where", stack(sys._current_frames().get(main_thread)))
        else:
            tasks.put(message)


def run_task(kind: str, payload: Any, pipe: Pipe, runtime: Runtime, names: dict[str, Any]) -> None:
    """Run one function or one cell, and report."""
    rank, board = dist.get_rank(), runtime.board
    assert board is not None
    recorder = Recorder(rank)
    runtime.recorder = recorder if payload["trace"] else None
    board.set_state(WORKING)
    try:
        value = None
        try:
            if kind == "call":
                fn, args = unpack(payload["call"])
                value = on_cpu(fn(*args))
            else:
                run_cell(payload["source"], payload["name"], names, rank)
        except SystemExit as leave:  # sys.exit() is a return, sys.exit(1) a failure
            if leave.code:
                raise
        flush()
        board.set_state(RETURNED)  # from here on only its answer travels, however large
        answer = pack_answer(value)
    except BaseException as error:
        flush()
        board.set_state(FAILED)
        pipe.send("failed", describe(error, rank))
    else:
        pipe.send("returned", answer, recorder.events, recorder.truncated)


def pack_answer(value: Any) -> bytes:
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__}, which cannot travel to the notebook "
            f"({error}): return tensors, numbers, text, or lists and dicts of them"
        ) from None


def flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def run_cell(source: str, name: str, names: dict[str, Any], rank: int) -> None:
    """Run a notebook cell in the rank's own names; print its last expression, as IPython does."""
    if not names:
        from . import magic

        names.update(magic.first_names(rank))
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), names)
        if value is not None:
            print(repr(value))


def on_cpu(value: Any) -> Any:
    """Tensors, also inside lists, tuples, sets and dicts, as they leave this process: detached and
    on the CPU.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) in (list, tuple, set):
        return type(value)(on_cpu(v) for v in value)
    if type(value) is dict:
        return {key: on_cpu(v) for key, v in value.items()}
    return value


def stack(frame: FrameType | None) -> list[Frame]:
    """The frames of a running thread, outermost first."""
    frames = []
    while frame:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def describe(error: BaseException, rank: int) -> Failure:
    """An exception as plain data."""
    try:
        message = str(error)
    except Exception as second:
        message = f"(its message cannot be read: {type(second).__name__})"
    frames: list[Frame] = [
        (f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno or 0, ""))
    return Failure(
        rank,
        time.perf_counter(),
        type(error).__name__,
        message,
        frames,
        mismatch=isinstance(error, Mismatch),
        in_message=getattr(error, "in_message", False),
    )
