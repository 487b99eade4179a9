"""A rank started as a fresh Python process: `python -m picotron_edu.ranks.spawned RANK PIPE`."""

import sys
from multiprocessing import connection

from . import worker
from .packing import unpack

if __name__ == "__main__":
    rank, handle = int(sys.argv[1]), int(sys.argv[2])
    pipe = getattr(connection, "PipeConnection", connection.Connection)(handle)
    worker.main(rank, pipe, unpack(pipe.recv_bytes()))
