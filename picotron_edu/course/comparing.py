"""How a check runs an answer on ranks, what it compares, and how the difference is told.

    run = run_each(fn, [(x0,), (x1,)])     fn(x0, axis) on rank 0, fn(x1, axis) on rank 1
    assert_close(10, run[1], rank=1, hints={2: "who adds twice?"}, mistakes={"a mean of means": 8})
    assert_messages(run, {"send_recv": 3}, wire_bytes=48, hints={"all_reduce": "twice the bytes"})
    assert_keeps_to_axis(fn, [(x0,), (x1,)], run)      the same where the axis is not the world

Each raises an ExerciseError: what was expected, what came, on which rank, and one hint. A hint is
worth most when it knows the mistake, so there are three ways to recognise one: by a constant factor
(`hints`), by the wrong value itself (`mistakes`), by a message that should not be there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from picotron_edu.course.checking import ExerciseError, one_line, run_on_ranks
from picotron_edu.ranks import Mesh, Run, world

NO_HINTS: Mapping[Any, str] = {}
NO_MISTAKES: Mapping[str, Any] = {}
UNSEEN = "messages count when picotron_edu.ranks sends them, and async ones once waited for"


def assert_close(
    expected: Any,
    got: Any,
    *,
    rank: int | None = None,
    what: str = "",
    dtype: torch.dtype | None = None,
    hints: Mapping[float, str] = NO_HINTS,
    mistakes: Mapping[str, Any] = NO_MISTAKES,
    hint: str = "",
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> None:
    """Compare numbers or tensors; a known mistake is recognised.

    hints: {got / expected: hint}, for the factors people really get; mistakes: {hint: the wrong
    value that deserves it}; hint: for every other mistake. what: the name of the thing compared,
    where it helps. dtype: what it must have, where that matters.
    """
    name = f"{what}: " if what else ""
    where = f" on rank {rank}" if rank is not None else ""
    wanted = torch.as_tensor(expected).detach().cpu()
    try:
        found = torch.as_tensor(got).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        question = "does your function return its result?" if got is None else hint
        fail(f"{name}expected {brief(wanted)}, got {brief(got)}{where}", question)
    if found.is_complex() and not wanted.is_complex():
        fail(
            f"{name}expected {brief(wanted)}, got {brief(found)}{where}: wrong type, complex", hint
        )
    if found.shape != wanted.shape:
        shapes = f"shape {tuple(wanted.shape)}, got {tuple(found.shape)}"
        fail(f"{name}expected {shapes}{where}", recognise(found, mistakes, wanted) or hint)
    if dtype not in (None, found.dtype):
        fail(
            f"{name}expected {dtype}, got {found.dtype}{where}",
            "torch.empty_like(x) and x.new_zeros(…) have the dtype of x",
        )
    wanted, found = wanted.double(), found.double()
    if torch.allclose(found, wanted, rtol=rtol, atol=atol):
        return
    ratio = constant_ratio(wanted, found)
    by_ratio = next((text for key, text in hints.items() if close(key, ratio)), "")
    chosen = recognise(found, mistakes, wanted) or by_ratio or hint
    at = ""
    if wanted.numel() > 8:  # too long to show: show the first place that differs
        first = (~torch.isclose(found, wanted, rtol=rtol, atol=atol)).nonzero()[0].tolist()
        wanted, found, at = wanted[tuple(first)], found[tuple(first)], f" at {first}"
    close_by = f", off by {(found - wanted).abs().max():.1g}"  # too little to be seen in print
    said = brief(found) + (close_by if brief(found) == brief(wanted) else "")
    fail(f"{name}expected {brief(wanted)}, got {said}{at}{where}{factor(ratio)}", chosen)


def recognise(found: torch.Tensor, mistakes: Mapping[str, Any], wanted: torch.Tensor) -> str:
    """The hint of the wrong value that was found, or "" for a new mistake."""

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), equal_nan=True)

    values = {text: torch.as_tensor(value) for text, value in mistakes.items()}
    hits = (
        text for text, wrong in values.items() if same(found, wrong) and not same(wrong, wanted)
    )
    return next(hits, "")  # on few ranks a mistake may give the right value


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
    hints: Mapping[str | float, str] = NO_HINTS,
    hint: str = "",
) -> None:
    """Assert *how* the ranks got there: exactly these messages on each rank, and no others.

    calls: {"all_reduce": 1} by the name in the trace. wire_bytes: what each rank puts on the wire,
    one number for all ranks or one a rank. hints: by the name of a message that should not be there
    ("all_gather"), or by how many times too many bytes there are (2); hint: for all else.
    """
    for rank in range(run.world_size):
        sent = run.trace.of(rank=rank, lane="comm")
        counts = Counter(event.name for event in sent)
        if counts != Counter(calls):
            strange = next(
                (hints[name] for name in counts if name not in calls and name in hints), ""
            )
            unseen = "" if counts else UNSEEN
            fail(
                f"expected {listing(calls)}, got {listing(counts)} on rank {rank}",
                strange or unseen or hint,
            )
        if wire_bytes is not None:
            want = wire_bytes[rank] if isinstance(wire_bytes, Sequence) else wire_bytes
            got = sum(event.wire_bytes for event in sent)
            if not math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9):
                ratio = got / want if want else math.nan
                by_ratio = (hints[k] for k in hints if not isinstance(k, str) and close(k, ratio))
                fail(
                    f"expected {want:,g} bytes on the wire, got {got:,g} on rank {rank}",
                    next(by_ratio, hint),
                )


def listing(calls: Mapping[str, int]) -> str:
    """{"send": 2} as "2 × send"."""
    return ", ".join(f"{n} × {name}" for name, n in sorted(calls.items()) if n) or "no messages"


def call_pure(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` on a rank; fails if it changes one of the tensors it was given."""
    before = [arg.clone() if isinstance(arg, torch.Tensor) else None for arg in args]
    result = fn(*args)
    for old, arg in zip(before, args):
        if old is not None and not torch.equal(old, arg):
            fail(
                f"your function changed its input from {brief(old)} to {brief(arg)} "
                f"on rank {world().index}",
                "all_reduce, broadcast, receive and += write in place: give them a copy, x.clone()",
            )
    return result


def run_each(fn: Callable[..., Any], inputs: Sequence[Sequence[Any]], hint: str = "") -> Run:
    """`fn(*inputs[rank], world())` on each rank, which must leave its inputs as they are."""
    if not callable(fn):
        fail(f"expected a function, got {brief(fn)}", "give its name alone, without calling it")
    return run_on_ranks(
        lambda: call_pure(fn, *inputs[world().index], world()), len(inputs), hint=hint
    )


def assert_keeps_to_axis(
    fn: Callable[..., Any], inputs: Sequence[Sequence[Any]], alone: Run
) -> None:
    """On four ranks in two pairs, 0 with 2 and 1 with 3, `fn` gives what it gave two ranks `alone`.

    Finds answers that ask `world()`, or torch, in place of the axis they are given.
    """

    def in_pairs() -> Any:
        axis = Mesh(dp=2, tp=2).dp
        return fn(*inputs[axis.index], axis)

    hint = "use only the axis that you are given: its index and size; it may be a part of world()"
    where = "in two pairs, 0 with 2 and 1 with 3"
    try:
        run = run_on_ranks(in_pairs, 4)
    except ExerciseError as error:
        fail(f"right on 2 ranks, but {where}: {error}", hint)
    for event in run.trace.of(lane="comm"):
        if event.axis != "dp":
            fail(f"{where}: expected messages over axis 'dp', got one over '{event.axis}'", hint)
    for rank in range(4):
        assert_close(alone[rank // 2], run[rank], rank=rank, what=where, hint=hint)


def fail(text: str, hint: str = "") -> NoReturn:
    raise ExerciseError(f"{text}. Hint: {hint}" if hint else text)


def brief(value: object) -> str:
    """A value as a learner would write it, short."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return one_line("[" + ", ".join(map(brief, value)) + "]", 60)
    return f"{value:.6g}" if isinstance(value, float) else one_line(repr(value), 60)
