"""An answer that runs on real ranks: what it prints, how it fails, and how long it may hang."""

from __future__ import annotations

import pytest
import torch

from picotron_edu.course import (
    ExerciseError,
    assert_keeps_to_axis,
    assert_messages,
    call_pure,
    run_each,
    run_on_ranks,
)
from picotron_edu.ranks import all_reduce, send, world


def message(fn, *args, **kwargs) -> str:
    with pytest.raises(ExerciseError) as caught:
        fn(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_run_on_ranks_returns_the_run():
    run = run_on_ranks(lambda x: float(all_reduce(x + world().index, world())), 2, torch.ones(1))
    assert run.values == [3.0, 3.0]
    assert_messages(run, {"all_reduce": 1}, wire_bytes=4)


def test_only_what_the_learner_prints_is_printed(capsys):
    def talks():
        if world().index == 1:
            print("here I am")

    run_on_ranks(talks, 2)
    assert capsys.readouterr().out == "rank 1 │ here I am\n"
    with pytest.raises(ExerciseError):
        run_on_ranks(lambda: print("before") or 1 / world().index, 2)
    assert "rank 0 │ before\n" in capsys.readouterr().out


def test_a_stub_called_on_the_ranks_is_not_done_yet():
    def stub():
        raise ExerciseError("Exercise 9.1 is not done yet: all-reduce")

    assert message(run_on_ranks, stub, 2) == "Exercise 9.1 is not done yet: all-reduce"


def test_an_exception_on_one_rank_is_one_line_with_its_rank():
    def fails_on_rank_1():
        if world().index == 1:
            raise KeyError("weights")
        all_reduce(torch.ones(1), world())

    said = message(run_on_ranks, fails_on_rank_1, 2)
    assert "on 2 ranks, rank 1 failed first: KeyError: 'weights'" in said


def test_ranks_that_wait_for_ever_are_told_who_waits_where():
    def rank_1_never_comes():
        if world().index == 0:
            all_reduce(torch.ones(1), world())

    said = message(run_on_ranks, rank_1_never_comes, 2, timeout=5, hint="come along")
    assert said.startswith("on 2 ranks, ")
    assert "rank 0 waits in all_reduce" in said and "rank 1 has returned" in said
    assert said.endswith(". Hint: come along")


def test_ranks_that_wait_in_the_same_line_stand_together():
    def all_send_first():
        send(torch.ones(1), world(), to=(world().index + 1) % 3)  # this line

    said = message(run_on_ranks, all_send_first, 3, timeout=5)
    assert "wait for each other for ever: ranks 0, 1, 2 wait in send at " in said


def test_a_function_that_changes_its_input_is_told_from_what_to_what():
    def in_place(x):
        return all_reduce(x, world())

    assert run_on_ranks(lambda: call_pure(torch.neg, torch.ones(1)).item(), 2).values == [-1, -1]
    said = message(run_on_ranks, lambda: call_pure(in_place, torch.ones(1)), 2)
    assert said.startswith("your function changed its input from [1] to [2] on rank ")
    assert "x.clone()" in said


def sum_over_axis(x, axis):
    return all_reduce(x.clone(), axis)


def sum_over_world(x, axis):
    return all_reduce(x.clone(), world()) / world().size * axis.size


def place_in_the_world(x, axis):
    return all_reduce(x + world().index - axis.index, axis)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (sum_over_world, "expected messages over axis 'dp', got one over 'world'"),
        (
            place_in_the_world,
            "in two pairs, 0 with 2 and 1 with 3: expected [3], got [4] on rank 0",
        ),
    ],
)
def test_an_answer_that_asks_the_world_in_place_of_its_axis_is_found_out(fn, said):
    inputs = [(torch.tensor([1.0]),), (torch.tensor([2.0]),)]
    run = run_each(sum_over_axis, inputs)
    assert run.values == [3, 3]
    assert_keeps_to_axis(sum_over_axis, inputs, run)
    assert message(run_each, 3.0, inputs).startswith(
        "expected a function, got 3. Hint: give its na"
    )
    assert said in message(assert_keeps_to_axis, fn, inputs, run_each(fn, inputs))
