"""The committed notebooks and exercises: complete, free of noise, and the truth table.

solution                    passes            (`make test` runs pytest --nbval-lax solutions)
exercise, untouched         fails             with exactly its own exercises, one line each
exercise, a wrong answer    fails             with the words meant for that mistake
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest

from picotron_edu.course import ExerciseError, check
from picotron_edu.course.build import HEADING
from picotron_edu.course.checking import exercises_of
from picotron_edu.course.notebook import read, readme_pictures, to_text

ROOT = Path(__file__).parents[1]
NOTEBOOKS, SOLUTIONS, EXERCISES = (
    sorted((ROOT / folder).glob("*.ipynb")) for folder in ("notebooks", "solutions", "exercises")
)
HEADER = re.compile(  # the line below an exercise's heading
    r"^(?=.{5} )●+○* · \d+ minutes · (?P<kind>write it|predict it|find the bug|break and explain)"
    r" · trains .+$",
    re.MULTILINE,
)
CHECK = re.compile(r'^check\("(\d+\.\d+)"', re.MULTILINE)


def by_name(path: Path) -> str:
    return path.stem


def load_wrong_answers() -> list[tuple[str, object, str]]:
    """The tables of all files in wrong_answers/; their functions travel to the ranks by value."""
    table = []
    for path in sorted((ROOT / "tests/wrong_answers").glob("ch*.py")):
        spec = importlib.util.spec_from_file_location(f"wrong_answers_{path.stem}", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        cloudpickle.register_pickle_by_value(module)
        table += module.WRONG_ANSWERS
    return table


WRONG_ANSWERS = load_wrong_answers()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_chapter_has_all_its_parts(path):
    for part in (f"notebooks/{path.stem}.py", f"solutions/{path.name}", f"exercises/{path.name}"):
        assert (ROOT / part).is_file(), f"{path.name} has no {part}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_is_stored_without_noise(path):
    assert path.read_text("utf-8") == to_text(read(path)), (
        f"store it with: python -m picotron_edu.course.notebook {path.relative_to(ROOT)}"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_no_warning_in_any_output_and_cells_ran_in_order(path):
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    errors = [o.text for cell in code for o in cell.outputs if o.get("name") == "stderr"]
    assert errors == []


@pytest.mark.parametrize("path", SOLUTIONS, ids=by_name)
def test_an_exercise_has_the_form_learners_know(path):
    notebook = read(path)
    numbers = []
    for cell in notebook.cells:
        heading = HEADING.search(cell.source)
        if cell.cell_type == "markdown" and heading:
            numbers.append(heading["number"])
            assert HEADER.search(cell.source), (
                f"{numbers[-1]}: ●●○○○ · 15 minutes · kind · trains …"
            )
            assert cell.source.count("<details>") == 3, f"{numbers[-1]}: three graded hints"
        if cell.cell_type == "code":
            for checked in CHECK.findall(cell.source):
                assert checked == numbers[-1], f"check {checked} stands in {numbers[-1]}"
                assert len(CHECK.findall(cell.source)) == 1, "one check a cell"
    checked = CHECK.findall("\n".join(c.source for c in notebook.cells if c.cell_type == "code"))
    assert checked == numbers == list(exercises_of(path.name[:2]))
    assert 3 <= len(numbers) <= 6


@pytest.mark.parametrize("path", SOLUTIONS, ids=by_name)
def test_a_write_it_exercise_has_three_wrong_answers(path):
    count = Counter(number for number, _, _ in WRONG_ANSWERS)
    for cell in read(path).cells:
        header = HEADER.search(cell.source)
        if header and header["kind"] == "write it":
            number = HEADING.search(cell.source)["number"]
            assert count[number] >= 3, f"{number} has {count[number]} wrong answers"


@pytest.mark.parametrize("path", EXERCISES, ids=by_name)
def test_an_untouched_exercise_notebook_fails_with_exactly_its_own_exercises(path, tmp_path):
    failed = failing_cells(path, tmp_path)
    numbers = [n for cell in read(path).cells for n in CHECK.findall(cell.source)]
    assert [CHECK.search(source)[1] for source, _ in failed] == numbers
    for number, (_, message) in zip(numbers, failed):
        assert message.startswith(f"ExerciseError: Exercise {number}") and "\n" not in message


def failing_cells(path: Path, folder: Path) -> list[tuple[str, str]]:
    """(source, error message) of each cell that fails under pytest --nbval-lax."""
    report = folder / "report.xml"
    options = ["-p", "no:cacheprovider", "--color=no", "--nbval-lax", "--nbval-current-env"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", str(path)],
        cwd=ROOT,
        capture_output=True,
    )
    code = [cell.source for cell in read(path).cells if cell.cell_type == "code"]
    cases = list(xml.parse(report).iter("testcase"))
    assert len(cases) == len(code)
    return [
        (source, failure.text.split("Traceback:\n")[1].strip())
        for source, case in zip(code, cases)
        for failure in [case.find("failure")]
        if failure is not None
    ]


def name_of(answer: object) -> str:
    """The same in every process."""
    if isinstance(answer, tuple | set):
        parts = sorted(answer) if isinstance(answer, set) else answer
        return " and ".join(map(name_of, parts))
    return getattr(answer, "__name__", repr(answer))


@pytest.mark.parametrize(
    ("number", "answer", "words"),
    WRONG_ANSWERS,
    ids=[f"{number}-{name_of(answer)}" for number, answer, _ in WRONG_ANSWERS],
)
def test_a_wrong_answer_is_told_what_is_wrong(number, answer, words):
    answers = answer if isinstance(answer, tuple) else (answer,)
    with pytest.raises(ExerciseError) as caught:
        check(number, *answers)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_picture_in_the_readme_is_the_one_the_course_has_made():
    made = {name: png for path in NOTEBOOKS for name, png in readme_pictures(read(path)).items()}
    shown = re.findall(r"!\[[^\]]+\]\(notebooks/images/([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(shown) == 1 and shown == list(made)
    assert (ROOT / "notebooks/images" / shown[0]).read_bytes() == made[shown[0]]
