"""A rank started as a fresh Python process: `python -m picotron_edu.ranks.spawned RANK PIPE`."""

import sys
from multiprocessing import connection

import cloudpickle

from . import worker

if __name__ == "__main__":
    rank, handle = int(sys.argv[1]), int(sys.argv[2])
    kind = connection.PipeConnection if sys.platform == "win32" else connection.Connection
    pipe = kind(handle)
    worker.main(rank, pipe, cloudpickle.loads(pipe.recv_bytes()))
