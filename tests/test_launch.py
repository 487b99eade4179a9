"""launch, entrypoint: what is run, what comes back, what is printed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import eventually, ranks_of

from picotron_edu.ranks import Link, RanksHung, Run, all_reduce, device, launch, world
from picotron_edu.ranks.machine import pick_backend, threads_per_rank

ROOT = Path(__file__).parents[1]


def python_stdin(
    code: str, *args: str, timeout: float = 60, **env: str
) -> subprocess.CompletedProcess:
    """Run code as a notebook's main module is: it exists in no file."""
    return subprocess.run(
        [sys.executable, "-", *args],
        input=textwrap.dedent(code),
        text=True,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **env},
    )


def test_every_rank_runs_and_returns():
    run = launch(lambda a, b: (world().index, a + b), 2, 3, world_size=3, quiet=True)
    assert isinstance(run, Run) and list(run) == [(0, 5), (1, 5), (2, 5)]
    assert run.world_size == len(run) == 3 and run[1] == (1, 5)


def test_tensors_come_back_detached_also_inside_containers():
    def work():
        x = torch.ones(2, requires_grad=True) * 2
        return {"x": x, "list": [x.bfloat16(), (x.double(),)], "rank": world().index}

    values = launch(work, world_size=2, quiet=True)
    for rank in range(2):
        assert values[rank]["rank"] == rank and not values[rank]["x"].requires_grad
        assert torch.equal(values[rank]["x"], torch.full((2,), 2.0))
        assert values[rank]["list"][0].dtype == torch.bfloat16
        assert values[rank]["list"][1][0].dtype == torch.float64


def test_functions_that_exist_only_in_the_notebook():
    """A function, a closure, a lambda, a class from an earlier cell, a cell edited and re-run."""
    done = python_stdin("""
        from picotron_edu.ranks import launch, world
        offset = 10
        class Point:
            def __init__(self, x): self.x = x
            def moved(self): return Point(self.x + offset)
        def outer(k):
            def inner(): return world().index * k + offset
            return inner
        def helper(): return "old"
        def work(point): return point.moved(), helper()
        first = launch(work, Point(1), world_size=2, quiet=True)
        assert all(isinstance(v[0], Point) and v[0].x == 11 and v[1] == "old" for v in first), first
        def helper(): return "new"                       # the cell is edited and run again
        offset = 100
        second = launch(work, Point(1), world_size=2, quiet=True)
        assert [(v[0].x, v[1]) for v in second] == [(101, "new")] * 2, second
        assert list(launch(outer(3), world_size=2, quiet=True)) == [100, 103]
        assert list(launch(lambda: offset, world_size=2, quiet=True)) == [100, 100]
        print("all right")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all right\n"


def test_printed_text_is_grouped_by_rank_and_the_same_in_twenty_runs():
    code = """
        import random, sys, time, warnings
        from picotron_edu.ranks import launch, world
        def work():
            rank = world().index
            time.sleep(random.Random(time.time_ns()).random() * 0.02)
            print("first", rank)
            print("a long line " * 50, end="")
            print("to stderr", file=sys.stderr)
            if rank == 1:
                print("only here\\nand here")
            return rank
        for _ in range(20):
            launch(work, world_size=3)
            print("=")
    """
    done = python_stdin(code, timeout=100)
    assert done.returncode == 0 and done.stderr == ""
    runs = done.stdout.split("=\n")[:-1]
    assert len(runs) == 20 and len(set(runs)) == 1
    lines = runs[0].splitlines()
    assert lines[0] == "3 ranks, gloo on CPU"
    owners = [line.split(" │ ")[0] for line in lines[1:]]
    assert owners == sorted(owners) and owners.count("rank 1") == 4
    assert "rank 1 │ and here" in lines


def test_output_is_kept_by_rank_and_quiet_prints_nothing(capsys):
    def work():
        print("from", world().index)

    run = launch(work, world_size=2, quiet=True)
    assert run.output == ["from 0\n", "from 1\n"] and capsys.readouterr().out == ""
    launch(work, world_size=2)
    assert capsys.readouterr().out == "2 ranks, gloo on CPU\nrank 0 │ from 0\nrank 1 │ from 1\n"


def test_a_progress_bar_leaves_only_its_last_state(capsys):
    launch(lambda: print("10 %\r50 %\rdone", end=""), world_size=1)
    assert capsys.readouterr().out == "1 rank, gloo on CPU\nrank 0 │ done\n"


def test_live_passes_the_text_of_rank_0_on_while_it_runs(capsys):
    seen = []

    def work():
        print("begun", world().index, flush=True)
        time.sleep(1.0)
        return time.perf_counter()

    def watch():
        while not seen:
            if "begun 0" in (text := capsys.readouterr().out):
                seen.append((time.perf_counter(), text))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run = launch(work, world_size=2, live=True)
    watcher.join(10)
    assert seen[0][0] < run[0], "rank 0's text came only at the end"
    assert capsys.readouterr().out == "rank 1 │ begun 1\n"  # rank 0's is not repeated


def test_sys_exit_without_an_error_is_a_return():
    assert list(launch(lambda: sys.exit(0), world_size=2, quiet=True)) == [None, None]


def test_each_rank_draws_other_random_numbers_and_each_launch_the_same():
    def work():
        return torch.rand(1).item()

    first, second = (launch(work, world_size=2, quiet=True) for _ in range(2))
    assert first[0] != first[1] and list(first) == list(second)
    assert list(launch(work, world_size=2, quiet=True, seed=5)) != list(first)


def test_threads_are_shared_out():
    assert threads_per_rank(cores=2, ranks=4) == 1
    assert threads_per_rank(cores=8, ranks=2) == 4
    assert threads_per_rank(cores=8, ranks=3) == 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    many = launch(torch.get_num_threads, world_size=4, quiet=True)
    assert list(many) == [max(1, cores // 4)] * 4
    assert list(launch(torch.get_num_threads, world_size=2, quiet=True, threads=3)) == [3, 3]


def test_two_launches_at_once():
    def work(k):
        time.sleep(0.3)
        return all_reduce(torch.tensor(float(k)), world()).item()

    results = {}

    def one(k):
        results[k] = list(launch(work, k, world_size=2, quiet=True))

    threads = [threading.Thread(target=one, args=(k,)) for k in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {1: [2.0, 2.0], 5: [10.0, 10.0]}


def test_port_29500_held_by_somebody_else():
    with socket.socket() as held:
        try:
            held.bind(("127.0.0.1", 29500))
            held.listen()
        except OSError:
            pass  # somebody else holds it: just as well
        total = launch(lambda: all_reduce(torch.ones(1), world()).item(), world_size=2, quiet=True)
    assert list(total) == [2.0, 2.0]


def test_a_host_name_that_does_not_resolve(monkeypatch):
    """gloo would look the host's name up; the ranks are told to use the loopback interface."""
    run = launch(lambda: os.environ.get("GLOO_SOCKET_IFNAME"), world_size=1, quiet=True)
    assert run[0] in ("lo", "lo0")


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_only_the_loopback_interface_and_an_unknown_host_name():
    """In a network namespace of its own the machine has nothing but lo, and a name nobody knows."""
    enter = ["unshare", "--net", "--uts", "--map-root-user"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a network namespace")
    code = """
        import fcntl, socket, struct
        with socket.socket() as s:   # what `ip link set lo up` does
            fcntl.ioctl(s, 0x8914, struct.pack("16sh14s", b"lo", 0x49, b""))
        socket.sethostname("nobody-knows-this-host")
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
        import torch
        from picotron_edu.ranks import all_reduce, launch, world
        run = launch(lambda: all_reduce(torch.ones(1), world()).item(), world_size=3, quiet=True)
        print(list(run))
    """
    done = subprocess.run(
        [*enter, sys.executable, "-"], input=textwrap.dedent(code), text=True, capture_output=True
    )
    assert done.stdout == "[3.0, 3.0, 3.0]\n", done.stderr


def test_cuda_already_initialised_in_the_parent_changes_nothing(monkeypatch):
    """Ranks are forked from a process that never touched CUDA, so nothing is inherited."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    run = launch(lambda: (torch.cuda.is_initialized(), os.getppid()), world_size=2, quiet=True)
    assert [v[0] for v in run] == [False, False]
    assert all(v[1] != os.getpid() for v in run), "a rank was forked from this very process"


def test_nccl_only_with_a_gpu_a_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert (
        pick_backend(2) == "nccl"
        and pick_backend(4) == "gloo"
        and pick_backend(2, "gloo") == "gloo"
    )
    with pytest.raises(ValueError, match=r"world_size=4, but there are 2 GPUs"):
        pick_backend(4, "nccl")


def test_spawned_ranks_do_the_same():
    """Where there is no fork (Windows) ranks are fresh processes: slower, otherwise alike."""

    def work():
        print("hello")
        return all_reduce(torch.tensor([1.0 + world().index]), world()).item()

    run = launch(work, world_size=2, quiet=True, start_method="spawn")
    assert list(run) == [3.0, 3.0] and run.output == ["hello\n"] * 2
    with pytest.raises(RanksHung, match="rank 1 has returned"):
        launch(
            lambda: world().index == 0 and all_reduce(torch.ones(1), world()),
            world_size=2,
            quiet=True,
            start_method="spawn",
        )


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"world_size": 0}, "world_size=0: must be a whole number from 1 to 64"),
        ({"world_size": 2.0}, r"world_size=2\.0"),
        ({"threads": 0}, "threads=0: must be 1 or more"),
        ({"link": 5}, "link=5: must be a Link"),
        ({"link": {"tq": Link(1, 1)}}, "link={'tq': ...}: no axis has that name"),
        ({"backend": "mpi"}, "backend='mpi': must be 'gloo', 'nccl' or None"),
        ({"start_method": "magic"}, "start_method='magic': must be 'fork' or 'spawn'"),
        ({"timeout": -1.0}, r"timeout=-1\.0: must be more than 0 seconds"),
    ],
)
def test_wrong_arguments_are_named_before_any_rank_starts(wrong, message):
    with pytest.raises(ValueError, match=message):
        launch(lambda: None, quiet=True, **wrong)
    assert not ranks_of()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"world_size": True}, "world_size=True: must be a whole number from 1 to 64"),
        ({"world_size": "2"}, "world_size='2': must be a whole number"),
        ({"timeout": "5"}, "timeout='5': must be more than 0 seconds"),
        ({"timeout": float("nan")}, "timeout=nan: must be more than 0 seconds"),
        ({"threads": "2"}, "threads='2': must be 1 or more, a whole number"),
        ({"threads": 1.5}, "threads=1.5: must be 1 or more, a whole number"),
        ({"seed": -1}, "seed=-1: must be a whole number from 0 to 4294967232"),
        ({"seed": 2**32}, "seed=4294967296: must be a whole number"),
        ({"seed": 1.5}, "seed=1.5: must be a whole number"),
        ({"seed": None}, "seed=None: must be a whole number"),
        ({"link": {1: Link(1, 1)}}, "link={1: ...}: no axis has that name"),
        ({"link": ""}, "link='': must be a Link"),
    ],
)
def test_arguments_of_a_wrong_type_are_named_too(wrong, message):
    with pytest.raises(ValueError, match=message):
        launch(lambda: None, quiet=True, **wrong)
    assert not ranks_of()


@pytest.mark.parametrize(
    "call, message",
    [
        ((None,), r"fn=None: must be a function, not its result \(launch\(work\), not launch"),
        ((3,), "fn=3: must be a function"),
        ((lambda: None, 2), r"cannot take args=\(2,\): .*; did you mean world_size=2\?"),
        ((lambda a: a,), r"fn=<lambda>\(a\) cannot take args=\(\): missing .* 'a'$"),
        ((lambda a: a, 1, 2), r"cannot take args=\(1, 2\): too many positional arguments$"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        launch(*call, quiet=True)
    assert not ranks_of()


def test_a_whole_number_may_be_numpys():
    one, two = np.int64(1), np.int64(2)
    run = launch(torch.get_num_threads, world_size=two, threads=one, seed=one, quiet=True)
    assert run.values == [1, 1]


def test_a_deleted_current_folder_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError, match=r"the current folder, where .* is deleted"):
        launch(lambda: None, quiet=True)


def test_what_cannot_travel_is_said():
    lock = threading.Lock()
    with pytest.raises(
        ValueError, match=r"fn=uses_lock cannot travel .*make that inside the function"
    ):

        def uses_lock():
            return lock

        launch(uses_lock, world_size=2, quiet=True)
    with pytest.raises(Exception, match="returned a lock, which cannot travel to the notebook"):
        launch(threading.Lock, world_size=2, quiet=True)


def test_the_folder_and_the_processes_are_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pids = list(launch(os.getpid, world_size=3, quiet=True))
    assert len(set(pids)) == 3
    assert eventually(lambda: not ranks_of()) and eventually(lambda: not list(tmp_path.iterdir()))


def test_a_rank_knows_its_device():
    assert launch(lambda: str(device()), world_size=1, quiet=True, backend="gloo")[0] == "cpu"


SCRIPT = """
import time
from dataclasses import dataclass
import torch
from picotron_edu.flags import flag
from picotron_edu.ranks import all_reduce, entrypoint, world

@dataclass(frozen=True)
class Config:
    steps: int = flag(2, "how many")
    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be 1 or more")

def main(config):
    axis = world()
    total = all_reduce(torch.tensor(float(axis.index + 1)), axis).item()
    if config.steps == 13 and axis.index == axis.size - 1:
        raise RuntimeError("unlucky")
    if config.steps == 100 and axis.index == 0:
        print("steps", flush=True)
        time.sleep(100)
    if axis.index == 0:
        print(f"world {axis.size} total {total} steps {config.steps}")

if __name__ == "__main__":
    entrypoint(main, Config)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run_script(*command: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=90
    )


@pytest.mark.parametrize("n, total", [(1, 1.0), (2, 3.0), (4, 10.0)])
def test_the_same_script_under_plain_python_and_torchrun(script, n, total):
    expected = f"world {n} total {total} steps 3"
    plain = run_script(script, "--nproc", str(n), "--steps", "3")
    assert plain.returncode == 0 and expected in plain.stdout, plain.stderr
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    elastic = run_script(*torchrun, script, "--steps", "3")
    assert elastic.returncode == 0 and expected in elastic.stdout, elastic.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--steps", "0"], "--steps=0: must be 1 or more"),
        (["--step", "3"], "unrecognized arguments: --step"),
        (["--nproc", "many"], "--nproc many: must be a whole number from 1 to 64"),
        (["--nproc"], "--nproc : must be a whole number"),
    ],
)
def test_a_wrong_flag_is_said_once_before_any_rank_starts(script, flags, message):
    done = (
        run_script(script, "--nproc", "2", *flags)
        if flags[0] != "--nproc"
        else run_script(script, *flags)
    )
    assert done.returncode != 0 and done.stderr.count(message) == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_script_whose_rank_fails_ends_with_the_report(script):
    done = run_script(script, "--nproc=2", "--steps", "13")
    assert done.returncode == 1
    assert "rank 1 failed first: RuntimeError: unlucky" in done.stderr
    assert 'raise RuntimeError("unlucky")' in done.stderr


@pytest.mark.parametrize("n", [1, 2])
def test_control_c_ends_a_script_without_a_traceback(script, n):
    command = [sys.executable, "-u", str(script), "--nproc", str(n), "--steps", "100"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        said = ""
        while "steps" not in said:
            said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130
