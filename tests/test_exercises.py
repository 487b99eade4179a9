"""Exercises are made from solutions, and a learner's progress is read off a run of them."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from picotron_edu.course import ExerciseError
from picotron_edu.course.build import build, build_all, is_untouched
from picotron_edu.course.notebook import execute, read, to_text
from picotron_edu.course.progress import judge, summary

SOLUTION = '''def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    y = x + x
    ### END SOLUTION
    return y'''


PLANTED_BUG = """def f(x):
    ### BEGIN SOLUTION
    return x
    ### INSTEAD
    # if x:
    #     return -x
    ### END SOLUTION"""


def solution_notebook(source: str = SOLUTION) -> nbformat.NotebookNode:
    outputs = [nbformat.v4.new_output("stream", text="learner must not see this")]
    return new_notebook(
        cells=[
            new_markdown_cell("# Exercises 09 · Nine", id="a"),
            new_code_cell("from picotron_edu.course import ExerciseError", id="b"),
            new_code_cell("def check(number, fn):\n    fn(2)", id="c"),
            new_markdown_cell('## Exercise 9.1 · Double "it"', id="d"),
            new_code_cell(source, id="e", execution_count=3, outputs=outputs),
            new_code_cell('check("9.1", double)', id="f"),
            new_markdown_cell("## Exercise 9.2 · Fine as it is", id="g"),
            new_code_cell('check("9.2", abs)', id="h"),
        ]
    )


def stub_of(source: str) -> str:
    return build(solution_notebook(source)).cells[4].source


def test_a_solution_in_a_function_becomes_a_stub_that_raises_when_called():
    scope = {"ExerciseError": ExerciseError}
    exec(stub_of(SOLUTION), scope)
    with pytest.raises(ExerciseError) as caught:
        scope["double"](2)
    assert str(caught.value) == 'Exercise 9.1 is not done yet: Double "it"'
    assert scope["double"].__doc__ == "Twice x."


def test_a_predicted_value_becomes_dots():
    assert stub_of("### BEGIN SOLUTION\n# think\nanswer = 2 * 3\n### END SOLUTION") == (
        "answer = ...  # your answer"
    )


def test_a_planted_bug_stands_in_place_of_its_cure():
    assert stub_of(PLANTED_BUG) == "def f(x):\n    if x:\n        return -x"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("### BEGIN SOLUTION\nx = 1", "without its partner"),
        ("def f():\n    ### END SOLUTION\n    pass", "without its partner"),
        ("### BEGIN SOLUTION\nprint(1)\n### END SOLUTION", "only `name = value`"),
        ("### BEGIN SOLUTION\nx = 1\n### INSTEAD\nx = 2\n### END SOLUTION", "is a comment"),
    ],
)
def test_a_malformed_solution_is_refused(source, said):
    with pytest.raises(ValueError, match=said):
        stub_of(source)


def test_an_exercise_keeps_cell_ids_and_loses_outputs():
    built = build(solution_notebook())
    assert [cell.id for cell in built.cells] == list("abcdefgh")
    code = [cell for cell in built.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert "learner must not see" not in to_text(built)


def problems(root, **flags) -> list[str]:
    return build_all(root, **flags)[0]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions/09_nine.ipynb").write_text(to_text(solution_notebook()))
    assert problems(tmp_path) == []
    return tmp_path


def test_building_twice_changes_nothing(root):
    before = (root / "exercises/09_nine.ipynb").read_bytes()
    assert problems(root) == [] and problems(root, check=True) == []
    assert (root / "exercises/09_nine.ipynb").read_bytes() == before


def test_check_refuses_an_exercise_that_is_out_of_date(root):
    changed = solution_notebook(SOLUTION.replace("Twice x", "Two times x"))
    (root / "solutions/09_nine.ipynb").write_text(to_text(changed))
    *_, problem = problems(root, check=True)
    assert "out of date" in problem and "Two times x" in problem
    assert problems(root) == [] and problems(root, check=True) == []


def test_check_refuses_a_hand_edit_and_building_does_not_destroy_it(root):
    path = root / "exercises/09_nine.ipynb"
    notebook = read(path)
    assert is_untouched(notebook)
    notebook.cells[4].source = "my work"
    path.write_text(to_text(notebook))
    assert not is_untouched(read(path))
    (problem,) = problems(root, check=True)
    assert "edited by hand" in problem and "my work" in problem
    wrong, (left_alone,) = build_all(root)
    assert not wrong and "my work" in path.read_text() and "\n" not in left_alone
    assert left_alone.startswith("exercises/09_nine.ipynb holds your own answers and is left as")
    assert problems(root, force=True) == [] and "my work" not in path.read_text()


def test_a_solution_is_stored_without_outputs(root):
    path = root / "solutions/09_nine.ipynb"
    assert "learner must not see" not in path.read_text()
    path.write_text(to_text(solution_notebook()))
    (problem,) = problems(root, check=True)
    assert problem == "solutions/09_nine.ipynb has outputs or noise: run `make exercises`"


def test_check_refuses_an_exercise_without_a_solution(root):
    (root / "exercises/10_ten.ipynb").write_text("{}")
    assert problems(root, check=True) == ["exercises/10_ten.ipynb has no solutions/10_ten.ipynb"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "<<<<<<< HEAD\n{}"])
def test_a_file_that_is_no_notebook_is_named_with_the_way_back(root, text):
    (root / "exercises/09_nine.ipynb").write_text(text or " ")
    with pytest.raises(ValueError, match=r"git checkout exercises/09_nine\.ipynb"):
        build_all(root)
    assert problems(root, force=True) == []


# ---- progress ----


def test_progress_tells_done_not_yet_and_wrong(tmp_path):
    notebook = build(solution_notebook())
    wrong = 'raise ExerciseError("Exercise 9.3: expected 4, got 5")'
    notebook.cells += [
        new_markdown_cell("## Exercise 9.3 · Wrong"),
        new_code_cell(f'def check(number, fn):\n    {wrong}\ncheck("9.3", abs)'),
        new_markdown_cell("## Exercise 9.4 · Typing error"),
        new_code_cell('check("9.4", nonsense)'),
        new_markdown_cell("## Exercise 9.5 · Check deleted"),
        new_code_cell("1 + 1"),
    ]
    results = judge(execute(notebook, tmp_path, allow_errors=True))
    assert [r.state for r in results] == ["not yet", "done", "wrong", "wrong", "wrong"]
    assert results[2].message == "Exercise 9.3: expected 4, got 5"
    assert results[3].message == "NameError: name 'nonsense' is not defined"
    assert "its check is gone" in results[4].message
    text = summary(results)
    assert "  ✗ 9.3  Wrong\n         expected 4, got 5\n" in text
    assert text.endswith("1 of 5 done")


def test_progress_does_not_give_away_a_planted_bug_that_nobody_has_touched(tmp_path):
    hint = 'raise ExerciseError("Exercise 9.1: expected 2, got -2. Hint: look at the sign")'
    notebook = build(solution_notebook(PLANTED_BUG))
    notebook.cells[5].source = f'def check(number, fn):\n    {hint}\ncheck("9.1", f)'
    given = nbformat.from_dict(notebook)
    untouched, _ = judge(execute(notebook, tmp_path, allow_errors=True), given=given)
    assert untouched.state == "not yet" and "Hint" not in untouched.message
    notebook.cells[4].source = "def f(x):\n    return -x"
    tried, _ = judge(execute(notebook, tmp_path, allow_errors=True), given=given)
    assert tried.state == "wrong" and "look at the sign" in tried.message


def test_progress_survives_a_kernel_that_dies(tmp_path):
    notebook = solution_notebook("import os; os._exit(1)")
    results = judge(execute(notebook, tmp_path, allow_errors=True))
    assert [r.state for r in results] == ["wrong", "wrong"]
    assert "the kernel died" in results[1].message


def test_progress_misses_an_exercise_whose_heading_was_edited(tmp_path):
    notebook = solution_notebook()
    notebook.cells[6].source = "## My exercise 9.2"
    notebook.cells[7].source = 'check("9.2", None)'
    results = judge(execute(notebook, tmp_path, allow_errors=True), ["9.1", "9.2"])
    assert [(r.number, r.state) for r in results] == [("9.1", "done"), ("9.2", "wrong")]
    assert results[1].message == "not found; its heading must begin with: ## Exercise 9.2 ·"
    assert "1 of 2 done" in summary(results)


def test_progress_tells_an_endless_loop_and_where_the_syntax_is_wrong(tmp_path):
    notebook = new_notebook(
        cells=[
            new_markdown_cell("## Exercise 9.1 · For ever"),
            new_code_cell("while True: pass"),
            new_markdown_cell("## Exercise 9.2 · Typing error"),
            new_code_cell("x = = 1"),
        ]
    )
    loop, typing_error = judge(execute(notebook, tmp_path, allow_errors=True, seconds=1))
    assert loop.message == "ran longer than 120 s: an endless loop?"
    assert typing_error.message == "SyntaxError: invalid syntax (notebook cell, line 1)"
