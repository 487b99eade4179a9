'''Exercises are written by this file, from the solutions.

    solutions/05_tensor_parallel.ipynb            exercises/05_tensor_parallel.ipynb

    ## Exercise 5.1 · A row-parallel linear       ## Exercise 5.1 · A row-parallel linear
    def row_linear(x, weight, axis):              def row_linear(x, weight, axis):
        """y = x W, W cut by rows."""                 """y = x W, W cut by rows."""
        ### BEGIN SOLUTION                            raise ExerciseError("Exercise 5.1 is not …")
        return all_reduce(x @ weight, axis)
        ### END SOLUTION

Three kinds of blocks. Inside a function, as above: a stub that raises when it is *called*, so the
cell runs and only the check fails. Outside, for "predict it": `answer = 2 * 3 * 4` becomes
`answer = ...`. And with a line `### INSTEAD`, for "find the bug": what follows it, in comments, is
what the learner finds.

    ### BEGIN SOLUTION
    return loss_sum / token_count
    ### INSTEAD
    # return loss_sum / axis.size
    ### END SOLUTION

Outputs go, cell ids stay. A fingerprint of the cells is stored inside, so that later we can tell an
exercise somebody works on (never overwritten) from one that is only out of date.
'''

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
import textwrap
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from picotron_edu.course.checking import NOT_DONE
from picotron_edu.course.notebook import read, to_text

HEADING = re.compile(r"^## Exercise (?P<number>\d+\.\d+) · (?P<title>.+)$", re.MULTILINE)
BLOCK = re.compile(
    r"^(?P<indent> *)### BEGIN SOLUTION\n(?P<solution>.*?)"
    r"(?:^ *### INSTEAD\n(?P<instead>.*?))?^ *### END SOLUTION$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"^ *### (BEGIN SOLUTION|INSTEAD|END SOLUTION)", re.MULTILINE)


def build(solution: NotebookNode) -> NotebookNode:
    """The exercise notebook that belongs to a solution notebook."""
    notebook = nbformat.from_dict(solution)  # a copy
    number = title = ""
    for cell in notebook.cells:
        heading = HEADING.search(cell.source)
        if cell.cell_type == "markdown" and heading:
            number, title = heading["number"], heading["title"]
        if cell.cell_type == "code":
            cell.source = BLOCK.sub(lambda block: stub(block, number, title), cell.source)  # noqa: B023
            if MARKER.search(cell.source):
                raise ValueError(
                    f"a solution marker without its partner in the cell:\n{cell.source}"
                )
    notebook = without_outputs(notebook)
    notebook.metadata["picotron_edu"] = {"fingerprint": fingerprint(notebook)}
    return notebook


def without_outputs(notebook: NotebookNode) -> NotebookNode:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def stub(block: re.Match[str], number: str, title: str) -> str:
    """What the learner finds in place of one solution block."""
    indent = block["indent"]
    if not number:
        raise ValueError(f"a solution before the first heading `## Exercise 1.2 · …`:\n{block[0]}")
    if block["instead"]:
        return "\n".join(map(uncomment, block["instead"].splitlines()))
    if indent:
        message = json.dumps(f"Exercise {number} {NOT_DONE}: {title}", ensure_ascii=False)
        return f"{indent}raise ExerciseError({message})  # your code in place of this line"
    names = []
    for statement in ast.parse(textwrap.dedent(block["solution"])).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            raise ValueError(
                "outside a function a solution is only `name = value`, got: "
                + ast.unparse(statement)
            )
        names.append(statement.targets[0].id)
    return "\n".join(f"{name} = ...  # your answer" for name in names)


def uncomment(line: str) -> str:
    found = re.fullmatch(r"( *)# ?(.*)", line)
    if not found:
        raise ValueError(f"after ### INSTEAD every line is a comment, got: {line!r}")
    return (found[1] + found[2]).rstrip()


def fingerprint(notebook: NotebookNode) -> str:
    """Changes when a cell's text changes; not with outputs or how the file is stored."""
    text = json.dumps([cell.source for cell in notebook.cells])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_untouched(exercise: NotebookNode) -> bool:
    """True as long as nobody has written into the exercise since it was built."""
    stored = exercise.metadata.get("picotron_edu", {}).get("fingerprint")
    return stored == fingerprint(exercise)


def build_all(
    root: Path, *, check: bool = False, force: bool = False
) -> tuple[list[str], list[str]]:
    """Write exercises/ from solutions/, or with `check` only compare.

    Returns what is wrong, and what was left alone: an exercise that somebody has written into is
    only overwritten with `force`. Solutions lose their outputs, too: source is source.
    """
    problems, left_alone, wanted = [], [], {}
    for path in sorted((root / "solutions").glob("*.ipynb")):
        solution = without_outputs(read(path))
        wanted[path.name] = build(solution)
        if to_text(solution) != path.read_text("utf-8"):
            if check:
                problems.append(f"solutions/{path.name} has outputs or noise: run `make exercises`")
            else:
                path.write_text(to_text(solution), encoding="utf-8")
    for name, notebook in wanted.items():
        target = root / "exercises" / name
        new, old = to_text(notebook), target.read_text("utf-8") if target.exists() else ""
        if new == old:
            continue
        touched = bool(old) and not force and not is_untouched(read(target))
        if not check and not touched:
            target.parent.mkdir(exist_ok=True)
            target.write_text(new, encoding="utf-8")
            continue
        if not check:
            left_alone.append(
                f"exercises/{name} holds your own answers and is left as it is "
                "(`--force` would delete them)"
            )
            continue
        if touched:
            problem = f"exercises/{name} was edited by hand: edit solutions/{name} (or --force)"
        else:
            problem = f"exercises/{name} is out of date: run `make exercises`"
        diff = difflib.unified_diff(
            old.splitlines(),
            new.splitlines(),
            f"exercises/{name}",
            "as it should be",
            lineterm="",
            n=1,
        )
        problems.append("\n".join([problem, *diff]))
    for path in sorted((root / "exercises").glob("*.ipynb")):
        if path.name not in wanted:
            problems.append(f"exercises/{path.name} has no solutions/{path.name}")
    return problems, left_alone
