"""How far a learner is: run an exercise notebook in a fresh kernel and read off what failed.

An exercise is everything from its heading to the next one. It is *done* if none of its cells raises
and its check was among them; *not yet* if its stub, or the dots, are still there, or its code is as
it was handed out (a planted bug that nobody has looked for yet: an error would give it away);
otherwise the first error says what is wrong. An exercise whose heading is gone is wrong, too, and
says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from picotron_edu.course.build import HEADING, build
from picotron_edu.course.checking import NOT_DONE, exercises_of, one_line
from picotron_edu.course.notebook import CELL_SECONDS, execute, read

SIGNS = {"done": "✓", "not yet": "·", "wrong": "✗"}


@dataclass(frozen=True)
class Result:
    """One exercise: `state` is "done", "not yet" or "wrong"; `message` says why in one line."""

    number: str
    title: str
    state: str
    message: str = ""


def check_notebook(path: Path) -> list[Result]:
    """Run the exercise notebook at `path` (which stays as it is) and judge each exercise."""
    expected = exercises_of(path.name[:2])
    executed = execute(read(path), path.parent, allow_errors=True)
    return judge(executed, expected, handed_out(path.parent.parent / "solutions" / path.name))


def handed_out(solution: Path) -> NotebookNode | None:
    """The exercises as they were before anybody wrote into them; None if that cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        return build(read(solution))
    return None


def judge(
    executed: NotebookNode, expected: Iterable[str] = (), given: NotebookNode | None = None
) -> list[Result]:
    """The results in an executed notebook; an error before the first exercise counts for all.

    expected: the numbers of the exercises that should be there.
    given: the notebook as it was handed out; an exercise with the same code is not done yet.
    """
    sections = sections_of(executed)
    untouched = {number: sources(cells) for number, _, cells in sections_of(given) if number}
    set_up = first_error(sections[0][2])
    results = []
    for number, title, section in sections[1:]:
        other = rf'^check\("(?!{number}")'  # of the exercise below, whose heading is gone
        cells = [cell for cell in section if not re.search(other, cell.source, re.M)]
        checks = [cell for cell in cells if re.search(rf'^check\("{number}"', cell.source, re.M)]
        error = set_up or first_error(cells)
        if not error and not checks:
            error = f'its check is gone; add a cell: check("{number}", …)'
        if error and not set_up and sources(section) == untouched.get(number):
            error = f"Exercise {number} {NOT_DONE}"
        state = "done" if not error else "not yet" if NOT_DONE in error else "wrong"
        results.append(Result(number, title, state, error))
    for number in expected:
        if number not in [result.number for result in results]:
            error = f"not found; its heading must begin with: ## Exercise {number} · "
            results.append(Result(number, "(without its heading)", "wrong", error.strip()))
    return sorted(results, key=lambda result: [int(part) for part in result.number.split(".")])


def sections_of(notebook: NotebookNode | None) -> list[tuple[str, str, list[NotebookNode]]]:
    """(number, title, code cells) of each exercise; before them, without a number, the set-up."""
    sections: list[tuple[str, str, list[NotebookNode]]] = [("", "", [])]
    for cell in notebook.cells if notebook else []:
        heading = HEADING.search(cell.source) if cell.cell_type == "markdown" else None
        if heading:
            sections.append((heading["number"], heading["title"], []))
        if cell.cell_type == "code" and cell.source.strip():
            sections[-1][2].append(cell)
    return sections


def sources(cells: list[NotebookNode]) -> list[str]:
    return [cell.source for cell in cells]


def first_error(cells: list[NotebookNode]) -> str:
    """The first error among the cells' outputs in one line, or "" if they all ran well."""
    for cell in cells:
        if cell.execution_count is None:
            return "did not run: the kernel died before"
        for output in cell.outputs:
            if output.output_type == "error":
                return error_text(output.ename, output.evalue)
    return ""


def error_text(name: str, message: str) -> str:
    """An error of a cell in one line, in a learner's words."""
    if name == "ExerciseError":
        return one_line(message)
    if name == "KeyboardInterrupt":  # it is we who interrupt
        return f"ran longer than {CELL_SECONDS} s: an endless loop?"
    message = re.sub(r"\(\d+\.py, line (\d+)\)", r"(notebook cell, line \1)", message)
    return one_line(f"{name}: {message}")


def summary(results: list[Result]) -> str:
    """One line for each exercise, and how many are done."""
    lines = []
    for result in results:
        lines.append(f"  {SIGNS[result.state]} {result.number}  {result.title}")
        if result.state == "wrong":
            lines.append(f"         {result.message.removeprefix(f'Exercise {result.number}: ')}")
    done = sum(result.state == "done" for result in results)
    bar = "█" * done + "░" * (len(results) - done)
    return "\n".join([*lines, f"  {bar} {done} of {len(results)} done"])
