"""Check of a choice of layers to recompute: small cases, each against all possible choices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from picotron_edu.course.comparing import brief, fail

Case = tuple[list[int], list[int], list[int], int]  # kept, inputs, seconds, budget

CASES: tuple[Case, ...] = (
    ([10, 10, 10, 10], [2, 2, 2, 2], [1, 1, 1, 1], 40),  # fits without
    ([10, 10, 10, 10], [2, 2, 2, 2], [1, 1, 1, 1], 32),  # one is enough, unless it is the last
    ([10, 10, 10, 10], [2, 2, 2, 2], [1, 1, 1, 1], 16),  # all but the last, which is at work first
    ([30, 10, 10, 10], [1, 1, 1, 1], [9, 1, 1, 1], 50),  # the largest is the dearest
    ([10, 40, 12, 8], [4, 3, 6, 1], [3, 5, 2, 4], 50),
    ([6, 9, 14, 20, 11], [5, 1, 2, 8, 3], [2, 4, 3, 6, 1], 41),
    ([6, 9, 14, 20, 11], [5, 1, 2, 8, 3], [2, 4, 3, 6, 1], 38),
    ([6, 37, 27, 21, 26], [1, 2, 5, 2, 2], [3, 9, 8, 2, 2], 60),  # cheapest first is too dear
    ([35, 31, 22, 13], [2, 3, 2, 5], [9, 7, 5, 3], 93),  # and so is most bytes a second
    ([10, 10, 10, 10], [2, 2, 2, 2], [1, 1, 1, 1], 15),  # not even all
)


def peak(case: Case, layers: Sequence[int]) -> int:
    """Most bytes alive while backward goes from the last layer to the first."""
    kept, inputs, _, _ = case
    waits = [inputs[i] if i in layers else kept[i] for i in range(len(kept))]
    return max(sum(waits[:i]) + kept[i] for i in range(len(kept)))


def best(case: Case) -> int | None:
    """The fewest seconds of any choice that fits; None if none does."""
    numbers = range(len(case[0]))
    choices = [some for n in range(len(numbers) + 1) for some in combinations(numbers, n)]
    times = [sum(case[2][i] for i in some) for some in choices if peak(case, some) <= case[3]]
    return min(times, default=None)


def layers_under_a_budget(choose_layers: Callable[..., Any]) -> str:
    if not callable(choose_layers):
        fail(f"expected a function, got {brief(choose_layers)}", "give its name alone")
    for case in CASES:
        kept, inputs, seconds, budget = case
        said, fewest = choose_layers(list(kept), list(inputs), list(seconds), budget), best(case)
        where = f"kept {kept}, inputs {inputs}, seconds {seconds}, budget {budget}"
        if fewest is None:
            if said is not None:
                fail(f"{where}: expected None, got {brief(said)}", "no choice fits: say so")
            continue
        try:
            layers = sorted({operator.index(layer) for layer in said})
        except TypeError:
            layers = [-1]
        if not set(layers) <= set(range(len(kept))):
            known = f"numbers from 0 to {len(kept) - 1}"
            fail(f"{where}: expected a list of {known}, got {brief(said)}", "some choice does fit")
        if peak(case, layers) > budget:
            waits = sum(inputs[i] if i in layers else kept[i] for i in range(len(kept)))
            fail(
                f"{where}: expected a peak of at most {budget}, got {peak(case, layers)} "
                f"with layers {layers}",
                "an input that is kept takes memory, too"
                if waits > budget
                else "when backward is in a recomputed layer, all that it keeps is there again, "
                "beside what the layers below still keep",
            )
        time = sum(seconds[i] for i in layers)
        if time != fewest:
            fail(
                f"{where}: expected {fewest} seconds more, got {time} with layers {layers}",
                "few layers suffice: try out all choices, there are only 2 to the number of layers",
            )
    return "in eight cases no choice is cheaper, and yours fit"
