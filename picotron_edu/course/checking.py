"""How an exercise is judged.

A learner's notebook says `check("0.1", my_all_reduce)`. The check itself lives in `checks/ch00.py`,
out of the learner's way: a function that gets the answer and returns one line of praise.

    @exercise("0.1")
    def recursive_doubling(all_reduce) -> str:
        for n in (2, 4):
            run = run_on_ranks(lambda: all_reduce(torch.tensor(world().index + 1.0)), n)
            for rank in range(n):
                assert_close(n * (n + 1) / 2, run[rank], rank=rank, hints={2: "who adds twice?"})
            assert_messages(run, {"send_recv": log2(n)}, hint="every round doubles the reach")
        return "log2(n) rounds in place of n - 1"

Whatever goes wrong (a wrong number, too many messages, an exception on rank 3, ranks that wait for
each other for ever) reaches the learner as an `ExerciseError` of a single line: expected, got, on
which rank, and one hint. Only raised errors count: what a notebook prints is the learner's own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from picotron_edu.ranks import RankFailed, RanksHung, Run, launch
from picotron_edu.ranks.board import Wait

PACKAGE = Path(__file__).parent.parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
CHECKS = Path(__file__).parent / "checks"
NOT_DONE = "is not done yet"


class ExerciseError(Exception):
    """An exercise that is wrong, or not done yet; Jupyter shows one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"ExerciseError: {self}"]


@dataclass(frozen=True)
class Exercise:
    """A numbered check: `judge(*answers)` returns a line of praise or raises."""

    number: str
    judge: Callable[..., str]
    answers: int | None = None

    def takes(self) -> int | None:
        """How many answers: as many as the judge has parameters; None for any number."""
        parameters = inspect.signature(self.judge).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return self.answers
        return len(parameters)


def exercise(number: str, answers: int | None = None) -> Callable[[Callable[..., str]], Exercise]:
    """Mark the function below as the check of exercise `number`.

    answers: how many it takes, for a function of `*args`, which does not tell.
    """
    return partial(Exercise, number, answers=answers)


def exercises_of(chapter: str) -> dict[str, Exercise]:
    """The checks of chapter "05" by number, in the order of their file."""
    there = [path.stem.removeprefix("ch") for path in sorted(CHECKS.glob("ch[0-9][0-9].py"))]
    if chapter.zfill(2) not in there:
        raise ValueError(
            f"there are no exercises of chapter {chapter}; the chapters with exercises: "
            + ", ".join(there)
        )
    module = importlib.import_module(f"picotron_edu.course.checks.ch{int(chapter):02d}")
    return {found.number: found for found in vars(module).values() if isinstance(found, Exercise)}


def check(number: str, *answers: object) -> None:
    """Judge `answers` to exercise `number`: print one line of praise, or raise ExerciseError."""
    if not isinstance(number, str) or not re.fullmatch(r"\d+\.\d+", number):
        raise ValueError(
            f'check({number!r}, …): the number of an exercise is a string like "0.2", in quotes'
        )
    known = exercises_of(number.split(".")[0])
    if number not in known:
        raise ValueError(f"there is no exercise {number}; this chapter has {', '.join(known)}")
    takes = known[number].takes()
    if takes not in (None, len(answers)):
        raise ExerciseError(
            f"Exercise {number}: its check takes {takes} answer{'s' * (takes != 1)}, "
            f"got {len(answers)}"
        )
    if any(answer is ... for answer in answers):
        raise ExerciseError(f"Exercise {number} {NOT_DONE}: put your answer in place of the dots")
    for place, answer in enumerate(answers, 1):
        if answer is None:
            raise ExerciseError(
                f"Exercise {number}: answer {place} of {len(answers)} is None. "
                "Hint: put a number there, or the name of your function if it asks for one"
            )
    try:
        praise = known[number].judge(*answers)
    except ExerciseError as error:
        text = str(error)
        raise ExerciseError(
            text if text.startswith("Exercise ") else f"Exercise {number}: {text}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ExerciseError(f"Exercise {number}: {describe(error)}") from error
    print(f"{number} ✓ {praise}")


def describe(error: BaseException) -> str:
    """One line for an exception in the learner's code: what was raised, and at which line of it."""
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not {PACKAGE, STANDARD_LIBRARY} & {*Path(frame.filename).parents}
    ]
    where = f" at line {theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    return one_line(f"your code raised {type(error).__name__}: {error}") + where


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout: float = 20.0,
    hint: str = "",
) -> Run:
    """`launch` with a time limit, whose failures become an ExerciseError of one line.

    hint: for ranks that wait for ever. What the learner's code prints is shown; the line about
    backend and ranks is left out. Always on the CPU, so that a check says the same on any machine.
    """
    printed = io.StringIO()
    ranks = f"on {world_size} rank{'s' * (world_size > 1)}"
    try:
        with contextlib.redirect_stdout(printed):
            return launch(fn, *args, world_size=world_size, timeout=timeout, backend="gloo")
    except RankFailed as failed:
        own = re.search(r"^(?:\w+\.)*ExerciseError: (.*)", failed.traceback, re.MULTILINE)
        if own:  # an unfinished stub, or a check that runs on the ranks
            raise ExerciseError(own[1]) from None
        first_line = str(failed).strip().splitlines()[0]
        where = f" ({one_line(str(failed.line))})" if failed.line else ""
        raise ExerciseError(f"{ranks}, {one_line(first_line)}{where}") from failed
    except RanksHung as hung:
        text = f"{ranks}, {describe_hang(hung)}"
        busy = all("in no message" in wait.what for wait in hung.waits)  # an endless loop
        raise ExerciseError(f"{text}. Hint: {hint}" if hint and not busy else text) from hung
    finally:
        print(printed.getvalue().partition("\n")[2], end="")


def describe_hang(hung: RanksHung) -> str:
    """Why they hang, and who waits where; ranks that wait in the same line stand together."""
    why = str(hung).splitlines()[0]
    places: dict[tuple[str, str], list[Wait]] = {}
    for wait in hung.waits:
        kind = re.sub(r"(waits in \w+).*", r"\1", wait.what)
        places.setdefault((kind, wait.line), []).append(wait)
    parts = []
    for (shared, line), waits in places.items():
        who, does = f"rank {waits[0].rank}", waits[0].what
        if len(waits) > 1:
            who = "ranks " + ", ".join(str(wait.rank) for wait in waits)
            does = re.sub("^(wait|call)s", r"\1", shared)
            does = does.replace("has ", "have ").replace("is in", "are in")
        parts.append(f"{who} {does}" + (f" at {line}" if line else ""))
    return one_line(f"{why} {'; '.join(parts)}", 400).replace(" over axis 'world'", "")


def one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
