"""Start ranks from a notebook or a script.

    run = launch(fn, world_size=4)      # in a notebook: four processes run fn(), and are gone
    run[2], run.output[2], run.trace    # what rank 2 returned and printed; what all of them did

    if __name__ == "__main__":          # in a script: the same main under torchrun and plain python
        entrypoint(main)

nccl where there are enough GPUs, else gloo on the CPU, over the loopback interface, meeting in a
temporary folder: no port, no host name, nothing that a second launch could collide with.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..flags import parse_flags
from .checks import check_call, check_timeout, in_range, whole_number
from .errors import RanksError
from .link import Link
from .machine import cores, pick_backend, threads_per_rank
from .mesh import ORDER
from .packing import pack
from .pool import Outcome, RankPool
from .printing import print_by_rank
from .runtime import CURRENT, Runtime, seed_rank, take_device
from .trace import Trace

MAX_RANKS = 64  # on one machine
MAX_SEED = 2**32 - MAX_RANKS  # numpy's seeds have 32 bits, and each rank adds its number


@dataclass(frozen=True)
class Run(Sequence):
    """The result of a launch: `run[r]` is what rank r returned, `run.output[r]` what it printed."""

    values: list[Any]
    output: list[str]
    trace: Trace

    @property
    def world_size(self) -> int:
        return len(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rank: Any) -> Any:
        return self.values[rank]

    def __repr__(self) -> str:
        return f"Run of {len(self)} ranks: run[r], run.output[r], run.trace"


def current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the current folder, where the ranks would start, is deleted: os.chdir() to another"
        ) from None


def make_spec(
    world_size: int, backend: str | None, link: Any, threads: int | None, seed: int
) -> dict[str, Any]:
    """All that a rank must know before its first line runs; RankPool adds its folder."""
    world_size = in_range("world_size", world_size, 1, MAX_RANKS)
    seed = in_range("seed", seed, 0, MAX_SEED)
    if threads is not None and (whole_number(threads) or 0) < 1:
        raise ValueError(f"threads={threads!r}: must be 1 or more, a whole number")
    links = list(link.values()) if isinstance(link, Mapping) else [] if link is None else [link]
    if not all(isinstance(x, Link) for x in links):
        raise ValueError(f"link={link!r}: must be a Link, or a dict of them by axis name")
    for name in link if isinstance(link, Mapping) else ():
        parts = set(name.split("_")) if isinstance(name, str) else {name}
        if name not in ("world", "ep", "expert_dp") and not parts <= set(ORDER):
            raise ValueError(
                f"link={{{name!r}: ...}}: no axis has that name (world, {', '.join(ORDER)}, ep, "
                f"expert_dp, or a joined one such as dp_cp)"
            )
    environ = os.environ.copy()
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback:
            environ[key] = loopback[0]  # the host's name need not resolve
    return {
        "environ": environ,
        "cwd": current_folder(),
        "sys_path": list(sys.path),
        "argv": list(sys.argv),
        "threads": whole_number(threads) or threads_per_rank(cores(), world_size),
        "backend": pick_backend(world_size, backend),
        "link": link,
        "seed": seed,
    }


def to_run(outcome: Outcome) -> Run:
    """What came back, for the reader; the machine's clock becomes seconds since the first event."""
    zero = min((e.start for e in outcome.events), default=0.0)
    events = [e._replace(start=e.start - zero, end=e.end - zero) for e in outcome.events]
    texts = ["".join(piece for _, piece in pieces) for pieces in outcome.texts]
    return Run(outcome.values, texts, Trace(events, outcome.truncated))


def pack_call(fn: Callable, args: tuple) -> bytes:
    """The function and its arguments as bytes, also if they exist only in the notebook."""
    try:
        return pack((fn, args))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(
            f"fn={name} cannot travel to the ranks: {error}. It, its arguments or a variable it "
            f"uses holds something that lives in this process only (an open file, a lock, a "
            f"generator); make that inside the function"
        ) from None


def launch(
    fn: Callable,
    *args: Any,
    world_size: int = 4,
    timeout: float | None = 60.0,
    link: Link | Mapping[str, Link] | None = None,
    live: bool = False,
    quiet: bool = False,
    trace: bool = True,
    threads: int | None = None,
    backend: str | None = None,
    start_method: str | None = None,
    seed: int = 0,
) -> Run:
    """Run `fn(*args)` once per rank, in `world_size` fresh processes, and wait for all of them.

    fn may be defined in a notebook cell, a lambda or a closure. timeout: seconds for all of it
    (None: no limit). link: an emulated network, or one by axis name. live: pass rank 0's text on as
    it comes. quiet: print nothing. trace: record events. threads: per rank, default cores // ranks.
    backend: "gloo" or "nccl". start_method: "fork" or "spawn". seed: rank r starts with seed + r.

    Raises RankFailed or RanksHung; no process is left, whatever happens.
    """
    check_call(fn, args)
    check_timeout(timeout)
    world_size = in_range("world_size", world_size, 1, MAX_RANKS)
    spec = make_spec(world_size, backend, link, threads, seed)
    payload = {"call": pack_call(fn, args), "trace": trace}
    if not quiet:
        where = "one GPU each" if spec["backend"] == "nccl" else "on CPU"
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        print(f"{ranks}, {spec['backend']} {where}", flush=True)

    def pass_on(stream: str, text: str) -> None:
        target = sys.stdout if stream == "out" else sys.stderr
        target.write(text)
        target.flush()

    with RankPool(world_size, spec, start_method) as pool:
        try:
            outcome = pool.run("call", payload, timeout, pass_on if live else None)
        except RanksError as error:
            if not quiet:
                print_by_rank(error.outcome.texts, skip=0 if live else None)
            raise
    if not quiet:
        print_by_rank(outcome.texts, skip=0 if live else None)
    return to_run(outcome)


def entrypoint(main: Callable, Config: type | None = None, argv: list[str] | None = None) -> Any:
    """Run a script's `main` on its ranks: those torchrun has started, or `--nproc N` of our own.

    With a frozen dataclass `Config` the flags are made from its fields, checked before any rank
    starts, and `main(config)` is called; else `main()`. Returns what `main` did (on rank 0).
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    nproc = None if under_torchrun else take_nproc(argv)
    args = () if Config is None else (read_flags(main, Config, argv),)
    if Config is None:
        sys.argv[1:] = argv  # `main` may read flags of its own, but not --nproc
    try:
        if nproc is not None and nproc > 1:
            return launch(main, *args, world_size=nproc, timeout=None, live=True, trace=False)[0]
        join(under_torchrun)
        try:
            return main(*args)
        finally:
            gc.collect()  # models in cycles hold the group, whose threads must end before Python
            dist.destroy_process_group()
    except RanksError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # Ctrl-C is not an error, and needs no traceback


def read_flags(main: Callable, Config: type, argv: list[str]) -> Any:
    """The flags as a `Config`; of many ranks only the first explains what is wrong with them."""
    epilog = "--nproc N: start N ranks (not under torchrun, which has a flag of that name itself)"
    silent = io.StringIO() if int(os.environ.get("RANK", 0)) > 0 else sys.stderr
    with contextlib.redirect_stderr(silent):
        return parse_flags(Config, argv, description=main.__doc__, epilog=epilog)


def take_nproc(argv: list[str]) -> int:
    """Remove `--nproc N` (or `--nproc=N`) from argv; 1 if it is not there."""
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name == "--nproc":
            if not equals:
                value = argv[i + 1] if i + 1 < len(argv) else ""
            del argv[i : i + (1 if equals else 2)]
            if not value.isdecimal() or not 1 <= int(value) <= MAX_RANKS:
                sys.exit(f"--nproc {value}: must be a whole number from 1 to {MAX_RANKS}")
            return int(value)
    return 1


def join(under_torchrun: bool) -> None:
    """Make this very process a rank: of torchrun's group, or of a group of one."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    backend = pick_backend(local_world)
    device = take_device(backend, local_rank)
    if under_torchrun:
        if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it where it starts several ranks
            torch.set_num_threads(threads_per_rank(cores(), local_world))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    seed_rank(0, dist.get_rank())
    CURRENT.set(Runtime(device=device))
