"""Exercises: what a learner writes, and the checks that judge it."""

from picotron_edu.course.checking import (
    ExerciseError,
    assert_close,
    assert_messages,
    check,
    exercise,
    run_on_ranks,
)

__all__ = [
    "ExerciseError",
    "assert_close",
    "assert_messages",
    "check",
    "exercise",
    "run_on_ranks",
]
