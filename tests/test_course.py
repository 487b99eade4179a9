"""How an answer is judged: right, wrong or failing, always told in one line."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from picotron_edu.course import (
    ExerciseError,
    assert_close,
    assert_messages,
    check,
    checking,
    exercise,
)
from picotron_edu.ranks import Event, Trace

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


def test_an_answer_that_calls_exit_is_told(chapter_nine):
    with pytest.raises(ExerciseError, match=r"Exercise 9\.1: your code raised SystemExit"):
        check("9.1", lambda *_: exit())


def test_an_unknown_exercise_says_which_exist(chapter_nine):
    with pytest.raises(ValueError, match=r"no exercise 9\.7; this chapter has 9\.1"):
        check("9.7", None)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("99.1", "no exercises of chapter 99; the chapters with exercises: 00, 01"),
        ("abc", "check('abc', …): the number of an exercise is a string like \"0.2\", in quotes"),
        (0.2, 'check(0.2, …): the number of an exercise is a string like "0.2", in quotes'),
    ],
)
def test_a_wrong_number_says_what_would_be_right(number, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(number, abs)


def test_the_number_of_answers_is_that_of_the_judge(chapter_nine):
    assert message(check, "9.1") == "Exercise 9.1: its check takes 1 answer, got 0"
    assert message(check, "9.1", 1, 2) == "Exercise 9.1: its check takes 1 answer, got 2"
    assert exercise("9.2", answers=4)(lambda *predicted: "").takes() == 4
    assert exercise("9.2")(lambda *predicted: "").takes() is None


def test_no_answer_at_all_asks_for_one(chapter_nine):
    said = message(check, "9.1", None)
    assert said.startswith("Exercise 9.1: answer 1 of 1 is None. Hint: put a number there, or the")


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
        (1j, "expected [1, 2], got 1j on rank 1: wrong type, complex. Hint: else"),
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
