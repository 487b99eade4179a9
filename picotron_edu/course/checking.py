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
import io
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from picotron_edu.ranks import RankFailed, RanksHung, Run, launch

PACKAGE = Path(__file__).parent.parent
NOT_DONE = "is not done yet"
NO_HINTS: Mapping[float, str] = {}


class ExerciseError(Exception):
    """An exercise that is wrong, or not done yet; Jupyter shows one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"ExerciseError: {self}"]


@dataclass(frozen=True)
class Exercise:
    """A numbered check: `judge(*answers)` returns a line of praise or raises."""

    number: str
    judge: Callable[..., str]


def exercise(number: str) -> Callable[[Callable[..., str]], Exercise]:
    """Mark the function below as the check of exercise `number`."""
    return partial(Exercise, number)


def exercises_of(chapter: str) -> dict[str, Exercise]:
    """The checks of chapter "05" by number, in the order of their file."""
    module = importlib.import_module(f"picotron_edu.course.checks.ch{int(chapter):02d}")
    return {found.number: found for found in vars(module).values() if isinstance(found, Exercise)}


def check(number: str, *answers: object) -> None:
    """Judge `answers` to exercise `number`: print one line of praise, or raise ExerciseError."""
    known = exercises_of(number.split(".")[0])
    if number not in known:
        raise ValueError(f"there is no exercise {number}; this chapter has {', '.join(known)}")
    if any(answer is ... for answer in answers):
        raise ExerciseError(f"Exercise {number} {NOT_DONE}: put your answer in place of the dots")
    try:
        praise = known[number].judge(*answers)
    except ExerciseError as error:
        text = str(error)
        raise ExerciseError(
            text if text.startswith("Exercise ") else f"Exercise {number}: {text}"
        ) from None
    except Exception as error:
        raise ExerciseError(f"Exercise {number}: {describe(error)}") from error
    print(f"{number} ✓ {praise}")


def describe(error: Exception) -> str:
    """One line for an exception in the learner's code: what was raised, and at which line of it."""
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and PACKAGE not in Path(frame.filename).parents
    ]
    where = f" at line {theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    return one_line(f"your code raised {type(error).__name__}: {error}") + where


def run_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: object, timeout: float = 20.0
) -> Run:
    """`launch` with a time limit, whose failures become an ExerciseError of one line.

    What the learner's code prints is shown; the line about backend and ranks is left out.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return launch(fn, *args, world_size=world_size, timeout=timeout)
    except RankFailed as failed:
        own = re.search(r"^(?:\w+\.)*ExerciseError: (.*)", failed.traceback, re.MULTILINE)
        if own:  # an unfinished stub, or a check that runs on the ranks
            raise ExerciseError(own[1]) from None
        first_line = str(failed).strip().splitlines()[0]
        where = f" ({one_line(str(failed.line))})" if failed.line else ""
        raise ExerciseError(f"on {world_size} ranks, {one_line(first_line)}{where}") from failed
    except RanksHung as hung:
        raise ExerciseError(f"on {world_size} ranks, {describe_hang(hung)}") from hung
    finally:
        print(printed.getvalue().partition("\n")[2], end="")


def describe_hang(hung: RanksHung) -> str:
    """Why they hang, and who waits where: ranks that wait in the same place together."""
    why = str(hung).splitlines()[0]
    places: dict[str, list[str]] = {}
    for wait in hung.waits:
        place = f"{wait.what} at {wait.line}" if wait.line else wait.what
        places.setdefault(place, []).append(str(wait.rank))
    waits = (f"rank {', '.join(ranks)} {place}" for place, ranks in places.items())
    return one_line(f"{why} {'; '.join(waits)}")


def assert_close(
    expected: Any,
    got: Any,
    *,
    rank: int | None = None,
    what: str = "",
    hints: Mapping[float, str] = NO_HINTS,
    hint: str = "",
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> None:
    """Compare numbers or tensors; a mistake that is a constant factor is recognised.

    hints: {got / expected: hint}, for the factors people really get; hint: for every other mistake.
    what: the name of the thing compared, where it helps.
    """
    name = f"{what}: " if what else ""
    where = f" on rank {rank}" if rank is not None else ""
    wanted = torch.as_tensor(expected).detach().cpu()
    try:
        found = torch.as_tensor(got).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        question = "does your function return its result?" if got is None else hint
        fail(f"{name}expected {brief(wanted)}, got {brief(got)}{where}", question)
    if found.shape != wanted.shape:
        shapes = f"shape {tuple(wanted.shape)}, got {tuple(found.shape)}"
        fail(f"{name}expected {shapes}{where}", hint)
    wanted, found = wanted.double(), found.double()
    if torch.allclose(found, wanted, rtol=rtol, atol=atol):
        return
    ratio = constant_ratio(wanted, found)
    chosen = next((text for key, text in hints.items() if close(key, ratio)), hint)
    at = ""
    if wanted.numel() > 8:  # too long to show: show the first place that differs
        first = (~torch.isclose(found, wanted, rtol=rtol, atol=atol)).nonzero()[0].tolist()
        wanted, found, at = wanted[tuple(first)], found[tuple(first)], f" at {first}"
    fail(f"{name}expected {brief(wanted)}, got {brief(found)}{at}{where}{factor(ratio)}", chosen)


def constant_ratio(expected: torch.Tensor, got: torch.Tensor) -> float:
    """got / expected, if that is one number for all elements; otherwise nan."""
    some = expected != 0
    ratios = got[some] / expected[some]
    if not some.any() or got[~some].any() or not torch.allclose(ratios, ratios[0], rtol=1e-3):
        return math.nan
    return float(ratios[0]) if ratios.isfinite().all() else math.nan


def factor(ratio: float) -> str:
    """The ratio in words, if it is one that means something."""
    if close(0, ratio):
        return ": all zeros"
    if close(-1, ratio):
        return ": the sign is wrong"
    for times, word in ((ratio, "large"), (1 / ratio, "small")):
        if times > 1.5 and close(round(times), times):
            return f": {round(times)} times too {word}"
    return ""


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-9)


def assert_messages(
    run: Run,
    calls: Mapping[str, int],
    *,
    wire_bytes: float | Sequence[float] | None = None,
    hint: str = "",
) -> None:
    """Assert *how* the ranks got there: exactly these messages on each rank, and no others.

    calls: {"all_reduce": 1} by the name in the trace. wire_bytes: what each rank puts on the wire,
    one number for all ranks or one a rank.
    """
    for rank in range(run.world_size):
        sent = run.trace.of(rank=rank, lane="comm")
        counts = Counter(event.name for event in sent)
        if counts != Counter(calls):
            fail(f"expected {listing(calls)}, got {listing(counts)} on rank {rank}", hint)
        if wire_bytes is not None:
            want = wire_bytes[rank] if isinstance(wire_bytes, Sequence) else wire_bytes
            got = sum(event.wire_bytes for event in sent)
            if not math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9):
                fail(f"expected {want:,g} bytes on the wire, got {got:,g} on rank {rank}", hint)


def listing(calls: Mapping[str, int]) -> str:
    """{"send": 2} as "2 × send"."""
    return ", ".join(f"{n} × {name}" for name, n in sorted(calls.items()) if n) or "no messages"


def fail(text: str, hint: str = "") -> NoReturn:
    raise ExerciseError(f"{text}. Hint: {hint}" if hint else text)


def brief(value: object) -> str:
    """A value as a learner would write it, short."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return "[" + ", ".join(map(brief, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else one_line(repr(value), 60)


def one_line(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
