"""Is this machine ready for the course?

Each question is a function that answers in one line, or raises `Trouble` with what is wrong and how
to mend it. `picotron-edu doctor` asks them all. Torch is imported late: it may be what is missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

MEND_INSTALL = "make lab   (or: pip install -e . in the repository)"


class Trouble(Exception):
    """Something the course cannot do without; `mend` says what to do about it."""

    def __init__(self, wrong: str, mend: str) -> None:
        super().__init__(wrong)
        self.mend = mend


def python() -> str:
    return f"{platform.python_version()}, {sys.executable}"


def torch_version() -> str:
    try:
        import torch
    except ImportError as error:
        raise Trouble(f"torch cannot be imported: {error}", MEND_INSTALL) from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        raise Trouble(f"torch {torch.__version__} is too old, 2.11 is needed", MEND_INSTALL)
    if not torch.distributed.is_available():
        raise Trouble("this torch was built without torch.distributed", MEND_INSTALL)
    return torch.__version__


def cores_and_gpus() -> str:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{os.cpu_count()} cores, GPUs: {', '.join(gpus) or 'none'}"


def temp_folder() -> str:
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"ranks meet through a file here")
    except OSError as error:
        raise Trouble(
            f"cannot write to {folder}: {error}", "point TMPDIR to a folder that you can write to"
        ) from error
    return f"{folder}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free"


def kernel() -> str:
    """The kernel that Jupyter starts for "Python 3" must be this very interpreter."""
    from jupyter_client.manager import KernelManager

    mend = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        command = KernelManager(kernel_name="python3").format_kernel_cmd()
    except Exception as error:  # no such kernel, or a broken file that describes it
        raise Trouble(f"Jupyter has no kernel python3: {error}", mend) from error
    found = shutil.which(command[0]) or command[0]
    if found != sys.executable:
        raise Trouble(f"Jupyter's kernel python3 is {found}, not {sys.executable}", mend)
    return "python3, this interpreter"


def four_ranks() -> str:
    from picotron_edu.ranks import RankFailed, RanksHung, launch

    began = time.perf_counter()
    try:
        run = launch(all_reduce_latency, world_size=4, timeout=60, quiet=True)
    except (RankFailed, RanksHung, OSError) as error:
        raise Trouble(
            f"four ranks could not talk to each other: {error}",
            "a firewall on the loopback interface, or too little memory, is the usual cause",
        ) from error
    sums, backend, threads, microseconds = run[0]
    if sums != 6.0:
        raise Trouble(f"an all-reduce of 0 + 1 + 2 + 3 gave {sums} over {backend}", MEND_INSTALL)
    seconds = time.perf_counter() - began
    return (
        f"{backend}, {threads} thread(s) each, started in {seconds:.1f} s; "
        f"an all-reduce of one number takes {microseconds:.0f} µs"
    )


def all_reduce_latency() -> tuple[float, str, int, float]:
    """Runs on each rank: the sum of the ranks, backend, threads, an all-reduce's median µs."""
    import torch
    import torch.distributed as dist

    from picotron_edu.ranks import all_reduce, world
    from picotron_edu.ranks.runtime import device

    axis = world()
    total = float(all_reduce(torch.tensor([float(axis.index)], device=device()), axis))
    times = []
    for _ in range(30):
        began = time.perf_counter()
        all_reduce(torch.ones(1, device=device()), axis).item()
        times.append(time.perf_counter() - began)
    return total, dist.get_backend(), torch.get_num_threads(), sorted(times)[15] * 1e6


QUESTIONS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("Python", python),
    ("torch", torch_version),
    ("machine", cores_and_gpus),
    ("temporary folder", temp_folder),
    ("Jupyter kernel", kernel),
    ("4 ranks", four_ranks),
)


def examine(questions: tuple[tuple[str, Callable[[], str]], ...] = QUESTIONS) -> bool:
    """Ask every question and print the answers; True if nothing is wrong."""
    well = True
    for name, question in questions:
        try:
            print(f"✓ {name}: {question()}", flush=True)
        except Trouble as trouble:
            well = False
            print(f"✗ {name}: {trouble}\n    to mend it: {trouble.mend}", flush=True)
        except ImportError as error:  # said once already, by the question about torch
            well = False
            print(f"✗ {name}: {error}\n    to mend it: {MEND_INSTALL}", flush=True)
    print("This machine is ready for the course." if well else "Mend the above, then ask again.")
    return well
