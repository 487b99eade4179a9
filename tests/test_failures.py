"""What goes wrong on a rank is reported with its rank and line, and nobody is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from processes import eventually, gone, ranks_of

from picotron_edu.ranks import (
    Mesh,
    RankFailed,
    RanksHung,
    all_gather,
    all_reduce,
    barrier,
    copy_to,
    launch,
    receive,
    send,
    world,
)
from picotron_edu.ranks.errors import readers_frames


@pytest.fixture(autouse=True, scope="module")
def warm():
    launch(lambda: None, world_size=1, quiet=True)  # the fork server's start is not what we time


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    assert eventually(lambda: not ranks_of()), "a rank outlived its launch"
    one = launch(lambda: all_reduce(torch.ones(1), world()).item(), world_size=2, quiet=True)
    assert list(one) == [2.0, 2.0], "the launch after a failure does not work"


def fails(kind: type, fn: Callable, seconds: float = 2.0, **options):
    """The error that `fn` on 3 ranks ends in, within `seconds`."""
    begin = time.perf_counter()
    with pytest.raises(kind) as caught:
        launch(fn, world_size=3, quiet=True, **options)
    took = time.perf_counter() - begin
    assert took < seconds, f"ended only after {took:.1f} s"
    return caught.value


def raise_on_1() -> None:
    if world().index == 1:
        raise ValueError("bad luck")
    all_reduce(torch.ones(2), world())


def test_a_rank_raises_before_a_collective():
    error = fails(RankFailed, raise_on_1)
    assert error.rank == 1 and error.line.endswith("in raise_on_1")
    assert str(error).startswith("rank 1 failed first: ValueError: bad luck")
    assert 'raise ValueError("bad luck")' in error.traceback
    assert "reset" not in str(error) and "picotron_edu/ranks" not in str(error)


def test_a_rank_catches_and_returns():
    def work():
        with contextlib.suppress(ValueError):
            raise_on_1()

    error = fails(RanksHung, work)
    assert "rank 1 has returned: it will not join" in str(error)
    assert [w.blocked for w in error.waits] == [True, False, True]


def test_a_rank_catches_and_lives_on():
    """Only the time limit can tell: the rank might still come."""

    def work():
        try:
            raise_on_1()
        except ValueError:
            time.sleep(60)

    error = fails(RanksHung, work, seconds=6, timeout=4)
    assert str(error).startswith("not finished within timeout=4 s")
    assert "rank 1 is in no message" in str(error) and "in work" in error.waits[1].line
    assert error.waits[0].since > 1.0


def test_a_rank_raises_in_backward():
    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if world().index == 2:
                raise RuntimeError("in backward")
            return grad

    def work():
        x = torch.ones(2, requires_grad=True)
        Faulty.apply(copy_to(x, world())).sum().backward()

    error = fails(RankFailed, work)
    assert error.rank == 2 and error.type == "RuntimeError"
    assert 'raise RuntimeError("in backward")' in error.traceback


def test_a_rank_leaves_with_os_exit():
    def work():
        if world().index == 2:
            os._exit(3)
        all_reduce(torch.ones(2), world())

    error = fails(RankFailed, work)
    assert error.rank == 2 and "its process ended with exit code 3" in str(error)


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_a_rank_is_killed(delay):
    def work():
        if world().index == 0:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(torch.ones(2), world())

    error = fails(RankFailed, work)
    assert error.rank == 0 and "its process was killed by SIGKILL" in str(error)


def test_a_rank_crashes_in_c():
    def work():
        if world().index == 1:
            os.write(2, b"last words of the C library\n")
            ctypes.string_at(0)
        barrier(world())

    error = fails(RankFailed, work)
    assert error.rank == 1 and "SIGSEGV" in str(error)
    assert "last words of the C library" in str(error)


def test_sys_exit_with_a_code_is_a_failure():
    def work():
        if world().index == 1:
            sys.exit(7)
        barrier(world())

    error = fails(RankFailed, work)
    assert error.rank == 1 and "SystemExit: 7" in str(error)


def test_the_first_failure_by_time_is_named_and_others_follow():
    def work():
        time.sleep(0.15 * (3 - world().index))
        raise ValueError(f"mine is {world().index}")

    error = fails(RankFailed, work)
    assert error.rank == 2
    assert str(error).index("mine is 2") < str(error).index("rank 1 failed too: ValueError: mine")


def test_a_package_beside_torch_is_no_part_of_torch():
    beside = str(Path(torch.__file__).parents[1] / "torchtitan" / "model.py")
    frames = [(torch.__file__, 1, "inside"), (beside, 2, "beside")]
    assert readers_frames(frames) == [(beside, 2, "beside")]


def test_the_same_failure_on_all_ranks_is_said_once():
    error = fails(RankFailed, lambda: undefined_name)  # noqa: F821
    assert error.rank == 0 and "(and alike on rank 1, 2)" in str(error)
    assert str(error).count("Traceback of rank") == 1


def test_text_printed_before_a_failure_is_not_lost(capsys):
    def work():
        print("before", world().index)
        raise_on_1()

    with pytest.raises(RankFailed):
        launch(work, world_size=3)
    assert "rank 2 │ before 2" in capsys.readouterr().out


def test_mismatched_collectives_are_named_with_their_lines():
    def work():
        x = torch.ones(3)
        return all_gather(x, world()) if world().index == 1 else all_reduce(x, world())

    error = fails(RanksHung, work)
    lines = str(error).splitlines()
    assert lines[0] == "the ranks do not agree on what they call:"
    assert lines[1].startswith("  rank 0 calls all_reduce(float32[3], sum) over axis 'world' at ")
    assert lines[2].startswith("  rank 1 calls all_gather(float32[3], dim=0) over axis 'world' at ")
    assert "test_failures.py, line" in lines[1]


def test_mismatched_shapes_are_found_although_gloo_would_go_on():
    error = fails(RanksHung, lambda: all_reduce(torch.ones(3 - world().index), world()))
    assert "all_reduce(float32[3], sum)" in str(error) and "all_reduce(float32[2]" in str(error)


@pytest.mark.parametrize("numbers", [1, 2_000_000])
def test_both_send_first(numbers):
    """A send waits for its receiver, whatever the size."""

    def work():
        axis, other = world(), 1 - world().index
        if axis.index < 2:
            send(torch.ones(numbers), axis, other)
            receive(torch.ones(numbers), axis, other)

    error = fails(RanksHung, work)
    assert str(error).startswith("the ranks wait for each other for ever:")
    assert f"rank 0 waits in send float32[{numbers}] to rank 1 over axis 'world'" in str(error)
    assert f"rank 1 waits in send float32[{numbers}] to rank 0" in str(error)
    assert "rank 2 has returned" in str(error)


def test_a_ring_of_sends():
    def work():
        axis = world()
        send(torch.ones(3), axis, (axis.index + 1) % 3)
        receive(torch.ones(3), axis, (axis.index - 1) % 3)

    assert all(wait.blocked for wait in fails(RanksHung, work).waits)


def test_a_rank_that_never_joins_because_it_is_busy():
    def work():
        while world().index == 0:
            pass
        barrier(world())

    error = fails(RanksHung, work, seconds=4, timeout=2)
    assert "rank 0 is in no message at" in str(error) and "in work" in error.waits[0].line
    assert "rank 1 waits in barrier over axis 'world'" in str(error)


def test_a_rank_that_is_stopped_does_not_answer():
    def work():
        if world().index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        barrier(world())

    error = fails(RanksHung, work, seconds=8, timeout=2)
    assert "rank 0 does not answer: busy outside Python, or stopped" in str(error)


def test_a_collective_that_part_of_an_axis_leaves_out():
    def work():
        mesh = Mesh(dp=3)
        if mesh.rank != 2:
            all_reduce(torch.ones(1), mesh.dp)

    error = fails(RanksHung, work)
    assert "over axis 'dp'" in str(error) and "rank 2 has returned" in str(error)


def test_a_slow_but_healthy_run_is_no_deadlock():
    def work():
        if world().index == 0:
            time.sleep(1.5)
        return all_reduce(torch.ones(1), world()).item()

    assert list(launch(work, world_size=3, quiet=True)) == [3.0] * 3


# ---- the parent is interrupted, ended, killed ------------------------------------------------

SLEEPER = """
import os, sys, time
from picotron_edu.ranks import launch, world
def work():
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
print("parent", os.getpid(), flush=True)
try:
    launch(work, world_size=2, live=True, timeout=None)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(list(launch(lambda: world().index, world_size=2, quiet=True)), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_parent(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLEEPER)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    while not parent.stdout.readline().startswith("pid"):
        pass
    assert eventually(lambda: len(ranks_of(parent.pid)) == 2)
    below = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
    ranks = [p.pid for p in ranks_of(parent.pid)]
    assert len(below) == 3 and len(ranks) == 2  # the fork server and two ranks
    os.kill(parent.pid, number)
    assert eventually(lambda: gone(ranks), 5), "a rank lives 5 s after its parent was told to end"
    rest = parent.communicate(timeout=20)[0]
    if number == signal.SIGINT:
        assert rest == "interrupted\n[0, 1]\n"  # and the next launch works
    assert eventually(lambda: gone(below), 5), "the fork server outlived its parent"


def test_the_fork_server_is_killed_and_comes_back():
    from picotron_edu.ranks.start import fork_server

    fork_server().process.kill()
    fork_server().process.wait()
    assert list(launch(lambda: world().index, world_size=2, quiet=True)) == [0, 1]


def test_children_of_a_rank_are_ended_with_it():
    def work():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return child.pid

    pids = list(launch(work, world_size=2, quiet=True))
    assert eventually(lambda: gone(pids), 5)


def test_a_rank_that_lives_on_after_an_echo_is_not_said_to_wait():
    """Rank 1 is gone; rank 0 catches the broken message and computes on: nobody is stuck in it."""

    def work():
        if world().index == 1:
            os._exit(0)
        with contextlib.suppress(RuntimeError):
            barrier(world())
        raise KeyError("the consequence")

    error = fails(RankFailed, work)
    assert error.rank == 1 and "its process ended with exit code 0" in str(error)


def test_what_a_dead_rank_has_started_is_ended_and_its_death_is_seen_at_once():
    """A forked child holds the rank's pipe open: without its end, no end of the pipe."""

    def work():
        if world().index == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
            os._exit(3)
        barrier(world())

    error = fails(RankFailed, work)
    assert error.rank == 1 and "exit code 3" in str(error)
    child = int("".join(text for _, text in error.outcome.texts[1]))
    assert eventually(lambda: gone([child]), 5)


def test_files_that_lie_around_do_not_disturb_the_ranks(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('the wrong random')")
    code = "import sys; sys.path.pop(0)\nfrom picotron_edu.ranks import launch\n"
    code += "print(list(launch(lambda: 1, world_size=2, quiet=True)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[1, 1]\n", done.stderr


def test_a_report_points_at_the_readers_line_and_not_into_pythons_library():
    def work():
        while world().index == 0:
            sys.stdout.write("x\n")
        barrier(world())

    error = fails(RanksHung, work, seconds=8, timeout=2)
    assert "in work" in error.waits[0].line and "test_failures.py" in error.waits[0].line


def test_a_very_long_report_is_folded():
    def deeper(n):
        return deeper(n + 1)

    error = fails(RankFailed, lambda: deeper(0))
    assert "RecursionError" in str(error) and "times" in str(error)
    assert len(str(error).splitlines()) < 40

    def long():
        raise ValueError("x" * 100_000)

    assert len(str(fails(RankFailed, long))) < 10_000


def test_an_exception_without_a_readable_message_is_reported():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("no words")

    def work():
        raise Mute

    assert "Mute: (its message cannot be read: KeyError)" in str(fails(RankFailed, work))


def test_an_earlier_call_left_open_is_told_when_it_does_not_match():
    def work():
        if world().index == 1:
            all_reduce(torch.ones(2), world(), async_op=True)  # and nobody waits for it
        all_gather(torch.ones(1), world())

    error = fails(RanksHung, work, seconds=5)
    assert "makes another call than" in str(error) or "do not agree" in str(error)


def test_large_results_may_arrive_after_the_time_limit():
    def work():
        time.sleep(1.3)
        return torch.ones(20_000_000)

    run = launch(work, world_size=2, quiet=True, timeout=2.5)
    assert run[1].numel() == 20_000_000
