"""`%%ranks 4`: a notebook cell that runs on every rank, in names that stay from cell to cell.

    %load_ext picotron_edu.ranks

    %%ranks 4
    x = torch.full((2,), rank)
    all_reduce(x, world())        # the last expression is printed, rank by rank

Unlike `launch`, which starts fresh ranks for one function, the ranks of a notebook live on between
its cells, as the notebook's own process does. After a failure that leaves ranks waiting they are
started anew, and their names are gone; the report says so.
"""

from __future__ import annotations

import argparse
import linecache
import shlex
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.magic import Magics, cell_magic, magics_class

from .errors import RanksError
from .launch import check_timeout, make_spec
from .link import Link
from .machine import pick_backend
from .pool import RankPool
from .printing import print_by_rank
from .start import CAN_FORK, fork_server


def first_names(rank: int) -> dict[str, Any]:
    """The names every `%%ranks` cell starts with; a rank does not launch others."""
    import picotron_edu.ranks as ranks

    names = {name: getattr(ranks, name) for name in ranks.__all__ if name != "launch"}
    names |= {"rank": rank, "world_size": dist.get_world_size(), "torch": torch, "dist": dist}
    return {**names, "__name__": "__ranks__"}


class UsageError(ValueError):
    """A wrong flag of %%ranks: Jupyter shows one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"ValueError: {self}"]


class Arguments(argparse.ArgumentParser):
    """argparse would end the notebook's process over a wrong argument."""

    def error(self, message: str) -> Any:
        raise ValueError(f"%%ranks: {message}\n{self.format_usage()}")


@magics_class
class RanksMagics(Magics):
    """Holds the pool of ranks of one notebook."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.pool: RankPool | None = None
        self.key: tuple = ()
        self.cells = 0

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """%%ranks [N] [--timeout SECONDS] [--link LATENCY_US,GBPS] [--fresh]: run the cell on N
        ranks.
        """
        parser = Arguments("%%ranks", add_help=False)
        parser.add_argument("n", nargs="?", type=int)
        parser.add_argument("--timeout", type=float, default=60.0)
        parser.add_argument("--link", default="")
        parser.add_argument("--fresh", action="store_true")
        try:
            args = parser.parse_args(shlex.split(line))
            check_timeout(args.timeout)
            n = args.n if args.n is not None else self.pool.world_size if self.pool else 4
            pool = self.ready_pool(n, args.link, args.fresh)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self.cells += 1
        name = f"<ranks cell {self.cells}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        payload = {"source": cell, "name": name, "trace": False}
        try:
            print_by_rank(pool.run("cell", payload, args.timeout).texts)
        except RanksError as error:
            print_by_rank(error.outcome.texts)
            if not pool.alive:
                error.args = (
                    f"{error}\n\nThe ranks were ended; the next %%ranks cell starts new ones, "
                    f"without the names of earlier cells.",
                )
            raise

    def ready_pool(self, n: int, link: str, fresh: bool) -> RankPool:
        """The pool of the last cell, or a new one if it is gone or something else is asked for."""
        if fresh or self.pool is None or not self.pool.alive or self.key != (n, link):
            # the flags are checked first: a wrong one must not cost the names of earlier cells
            spec = make_spec(n, backend=None, link=parse_link(link), threads=None, seed=0)
            self.close()
            self.pool, self.key = RankPool(n, spec), (n, link)
        return self.pool

    def close(self) -> None:
        """End the ranks, and with them the names."""
        if self.pool:
            self.pool.end()
            self.pool = None


def parse_link(text: str) -> Link | None:
    """The text 50,10 as Link(latency_us=50, gbps=10)."""
    if not text:
        return None
    try:
        latency, rate = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--link {text}: must be LATENCY_US,GBPS, such as 50,10") from None
    return Link(latency, rate)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext picotron_edu.ranks`; starts the fork server, so that the first launch is quick."""
    shell.register_magics(RanksMagics(shell))
    if CAN_FORK:
        fork_server()
    gpus = torch.cuda.device_count() if pick_backend(1) == "nccl" else 0
    print(f"%%ranks N: nccl, a GPU each, up to {gpus} ranks" if gpus else "%%ranks N: gloo on CPU")
