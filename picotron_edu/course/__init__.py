"""Exercises: what a learner writes, and the checks that judge it."""

from picotron_edu.course.checking import ExerciseError, check, exercise, run_on_ranks
from picotron_edu.course.comparing import (
    assert_close,
    assert_keeps_to_axis,
    assert_messages,
    call_pure,
    fail,
    run_each,
)

__all__ = [
    "ExerciseError",
    "assert_close",
    "assert_keeps_to_axis",
    "assert_messages",
    "call_pure",
    "check",
    "exercise",
    "fail",
    "run_each",
    "run_on_ranks",
]
