"""How an answer is judged: right, wrong, failing or hanging on ranks, always told in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from picotron_edu.course import (
    ExerciseError,
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    call_pure,
    check,
    checking,
    exercise,
    run_each,
    run_on_ranks,
)
from picotron_edu.ranks import Event, Trace, all_reduce, send, world

# ---- judging an answer ----


@exercise("9.1")
def doubles(fn) -> str:
    assert_close(4, fn(2), hint="multiply by two")
    return "twice as much"


@pytest.fixture
def chapter_nine(monkeypatch) -> None:
    monkeypatch.setattr(checking, "exercises_of", lambda chapter: {"9.1": doubles})


def message(fn, *args, **kwargs) -> str:
    with pytest.raises(ExerciseError) as caught:
        fn(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_right_answer_prints_one_line(chapter_nine, capsys):
    check("9.1", lambda x: 2 * x)
    assert capsys.readouterr().out == "9.1 ✓ twice as much\n"


def test_a_wrong_answer_is_told_expected_got_and_hint(chapter_nine):
    said = message(check, "9.1", lambda x: x + 3)
    assert said == "Exercise 9.1: expected 4, got 5. Hint: multiply by two"


def test_dots_in_place_of_an_answer_are_not_done_yet(chapter_nine):
    said = message(check, "9.1", ...)
    assert said == "Exercise 9.1 is not done yet: put your answer in place of the dots"


def test_an_exception_in_the_answer_names_the_learners_line(chapter_nine):
    def breaks(x):
        return x + "2"  # this line

    said = message(check, "9.1", breaks)
    assert said.startswith("Exercise 9.1: your code raised TypeError: unsupported operand")
    assert 'return x + "2"  # this line' in said


def test_an_unknown_exercise_says_which_exist(chapter_nine):
    with pytest.raises(ValueError, match=r"no exercise 9\.7; this chapter has 9\.1"):
        check("9.7", None)


def test_jupyter_shows_an_exercise_error_in_one_line():
    assert ExerciseError("no")._render_traceback_() == ["ExerciseError: no"]


@pytest.mark.parametrize(
    ("got", "said"),
    [
        ([2.0, 4.0], "expected [1, 2], got [2, 4] on rank 1: 2 times too large. Hint: average?"),
        ([0.25, 0.5], "expected [1, 2], got [0.25, 0.5] on rank 1: 4 times too small. Hint: else"),
        ([0.0, 0.0], "expected [1, 2], got [0, 0] on rank 1: all zeros. Hint: else"),
        ([-1.0, -2.0], "expected [1, 2], got [-1, -2] on rank 1: the sign is wrong. Hint: else"),
        ([1.0, 3.0], "expected [1, 2], got [1, 3] on rank 1. Hint: else"),
        ([1.0], "expected shape (2,), got (1,) on rank 1. Hint: else"),
        ([float("nan"), 2.0], "expected [1, 2], got [nan, 2] on rank 1. Hint: else"),
        ([float("inf")] * 2, "expected [1, 2], got [inf, inf] on rank 1. Hint: else"),
        (None, "expected [1, 2], got None on rank 1. Hint: does your function return its result?"),
        ("2", "expected [1, 2], got '2' on rank 1. Hint: else"),
    ],
)
def test_assert_close_recognises_the_mistake(got, said):
    expected = torch.tensor([1.0, 2.0])
    got = torch.tensor(got) if isinstance(got, list) else got
    assert message(assert_close, expected, got, rank=1, hints={2: "average?"}, hint="else") == said


def test_assert_close_shows_one_place_of_a_long_tensor():
    got = torch.zeros(3, 4)
    got[2, 1] = 5
    said = message(assert_close, torch.zeros(3, 4), got, what="gradient")
    assert said == "gradient: expected 0, got 5 at [2, 1]"


def test_assert_close_knows_a_wrong_value_and_its_hint():
    mistakes = {"a mean of means": 2.5, "nobody has values": float("nan"), "stacked": [[1.0, 2.0]]}
    said = message(assert_close, 1.75, 2.5, mistakes=mistakes, hint="else")
    assert said == "expected 1.75, got 2.5. Hint: a mean of means"
    assert "Hint: nobody" in message(assert_close, 1.75, float("nan"), mistakes=mistakes)
    assert "Hint: stacked" in message(assert_close, [1, 2], [[1, 2]], mistakes=mistakes)
    assert "Hint: else" in message(assert_close, 1.75, 3.5, mistakes=mistakes, hint="else")
    exact, near = torch.tensor([1.75, 1.75 + 1e-9], dtype=torch.float64)
    mistakes = {"right by chance": exact}
    said = message(assert_close, exact, near, mistakes=mistakes, hint="else", rtol=1e-12, atol=0)
    assert said == "expected 1.75, got 1.75, off by 1e-09. Hint: else"


def test_assert_close_insists_on_a_dtype_where_that_is_asked():
    got = torch.tensor([1.0, 2.0])
    assert_close([1, 2], got, dtype=torch.float32)
    said = message(assert_close, [1, 2], got, dtype=torch.int64, rank=3)
    assert said.startswith("expected torch.int64, got torch.float32 on rank 3. Hint: torch.empty_l")


def test_assert_close_accepts_numbers_and_any_precision():
    assert_close(6, 6.0)
    assert_close([1, 2], torch.tensor([1.0, 2.0], dtype=torch.bfloat16))


def run_with(*messages: tuple[int, str, float]) -> SimpleNamespace:
    events = [Event(rank, "comm", name, 0.0, 1.0, 8, wire) for rank, name, wire in messages]
    return SimpleNamespace(world_size=2, trace=Trace([*events, Event(0, "compute", "f", 0.0, 1.0)]))


def test_assert_messages_counts_kind_number_and_bytes_on_each_rank():
    run = run_with((0, "all_reduce", 8.0), (1, "all_reduce", 8.0))
    assert_messages(run, {"all_reduce": 1}, wire_bytes=8)
    assert_messages(run, {"all_reduce": 1}, wire_bytes=[8, 8])
    assert message(assert_messages, run, {"all_reduce": 2}, hint="both") == (
        "expected 2 × all_reduce, got 1 × all_reduce on rank 0. Hint: both"
    )
    assert message(assert_messages, run, {"all_reduce": 1}, wire_bytes=4) == (
        "expected 4 bytes on the wire, got 8 on rank 0"
    )


def test_assert_messages_sees_a_rank_that_sent_nothing():
    said = message(assert_messages, run_with((0, "broadcast", 1.0)), {"broadcast": 1})
    assert said.startswith(
        "expected 1 × broadcast, got no messages on rank 1. Hint: messages count"
    )


def test_assert_messages_knows_a_forbidden_message_and_a_factor_of_bytes():
    run = run_with((0, "all_reduce", 8.0), (1, "all_reduce", 8.0))
    hints = {"all_reduce": "not this one", 2: "padding"}
    said = message(assert_messages, run, {"all_gather": 1}, hints=hints, hint="else")
    assert said.endswith("got 1 × all_reduce on rank 0. Hint: not this one")
    said = message(assert_messages, run, {"all_reduce": 1}, wire_bytes=4, hints=hints, hint="else")
    assert said.endswith("got 8 on rank 0. Hint: padding")
    said = message(assert_messages, run, {"all_reduce": 1}, wire_bytes=5, hints=hints, hint="else")
    assert said.endswith("got 8 on rank 0. Hint: else")


# ---- on real ranks ----


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
