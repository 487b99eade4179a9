"""The command picotron-edu: finds its repository, says what exists, passes flags on, judges."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from jupyterlab.labapp import LabApp
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from picotron_edu import cli, doctor
from picotron_edu.course import progress
from picotron_edu.course.notebook import to_text
from picotron_edu.ranks.machine import cores, threads_per_rank


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A small course: one chapter with a script that writes down its rank and flags."""
    for folder in ("notebooks", "exercises", "solutions"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notebooks/01_one.py").write_text(
        "import os, pathlib, sys\n"
        "rank = os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]\n"
        "pathlib.Path(__file__ + rank[0]).write_text(' '.join(rank))\n"
    )
    monkeypatch.setattr(cli, "find_root", lambda: tmp_path)
    monkeypatch.setattr(progress, "exercises_of", lambda chapter: {"1.1": None, "1.2": None})
    return tmp_path


def write_exercise(root, second: str) -> None:
    notebook = new_notebook(
        cells=[
            new_code_cell("def check(number, value):\n    assert value == 1"),
            new_markdown_cell("## Exercise 1.1 · Easy"),
            new_code_cell('check("1.1", 1)'),
            new_markdown_cell("## Exercise 1.2 · Harder"),
            new_code_cell(f'check("1.2", {second})'),
        ]
    )
    (root / "exercises/01_one.ipynb").write_text(to_text(notebook))


def test_the_repository_is_found_from_any_folder_below_it(tmp_path, monkeypatch):
    below = tmp_path / "course/notebooks/images"
    below.mkdir(parents=True)
    (tmp_path / "course/pyproject.toml").write_text("")
    monkeypatch.chdir(below)
    monkeypatch.setattr(cli, "__file__", "/somewhere/site-packages/picotron_edu/cli.py")
    assert cli.find_root() == tmp_path / "course"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="not inside the repository"):
        cli.find_root()


@pytest.mark.parametrize("command", ["run", "check"])
def test_an_unknown_chapter_says_which_exist(root, capsys, command):
    write_exercise(root, "1")
    assert cli.main([command, "42"]) == 2
    assert "no chapter 42" in (error := capsys.readouterr().err)
    assert "(there: 01)" in error


def start(root, *command: str) -> subprocess.Popen[str]:
    """The command in a process of its own: torchrun changes the environment of the one it is in."""
    code = "import sys; from pathlib import Path; from picotron_edu import cli\n"
    code += f"cli.find_root = lambda: Path({str(root)!r}); sys.exit(cli.main({command!r}))"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment
    )


def picotron_edu(root, *command: str) -> subprocess.CompletedProcess[str]:
    process = start(root, *command)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_run_starts_torchrun_with_the_ranks_and_the_scripts_own_flags(root):
    done = picotron_edu(root, "run", "1", "--nproc", "2", "--steps", "-3", "--no-amp", "name")
    assert done.returncode == 0
    for rank in range(2):
        said = (root / f"notebooks/01_one.py{rank}").read_text()
        assert said == f"{rank} 2 --steps -3 --no-amp name"


def test_run_shares_the_cores_without_a_word_of_torchrun(root):
    (root / "notebooks/01_one.py").write_text("import os; print(os.environ.get('OMP_NUM_THREADS'))")
    done = picotron_edu(root, "run", "1", "--nproc", "2")
    threads = str(threads_per_rank(cores(), 2))
    assert "".join(done.stdout.split()) == threads * 2
    assert "OMP_NUM_THREADS" not in done.stderr


def test_control_c_ends_a_run_without_a_word(root):
    started = root / "started"
    (root / "notebooks/01_one.py").write_text(
        f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(100)"
    )
    process = start(root, "run", "1")
    while not started.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


def test_run_fails_when_a_rank_fails(root):
    (root / "notebooks/01_one.py").write_text("raise SystemExit(7)")
    failed = picotron_edu(root, "run", "01")
    assert failed.returncode == 1
    assert failed.stderr.endswith("picotron-edu: rank 0 failed first, exit code 7\n")


@pytest.mark.parametrize("nproc", ["0", "two"])
def test_run_refuses_a_wrong_number_of_ranks(root, capsys, nproc):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "01", "--nproc", nproc])
    assert f"a number of ranks, 1 or more, not '{nproc}'" in capsys.readouterr().err


def test_other_commands_refuse_unknown_flags(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check", "01", "--steps", "3"])
    assert "unrecognized arguments: --steps 3" in capsys.readouterr().err


def test_check_tells_what_is_done_and_fails_until_all_is(root, capsys):
    write_exercise(root, "2")
    assert cli.main(["check", "01"]) == 1
    out = capsys.readouterr().out
    assert "✓ 1.1  Easy" in out and "✗ 1.2  Harder" in out and "1 of 2 done" in out
    write_exercise(root, "1")
    assert cli.main(["check", "01"]) == 0
    assert "2 of 2 done" in capsys.readouterr().out


def test_progress_runs_only_what_somebody_has_begun(root, capsys):
    write_exercise(root, "1")
    (root / "exercises/01_one.ipynb").rename(root / "solutions/01_one.ipynb")
    assert cli.main(["build-exercises"]) == 0
    assert cli.main(["progress"]) == 0
    assert "Chapter 01 one\n  not begun\n" in capsys.readouterr().out
    write_exercise(root, "1")
    cli.main(["progress"])
    assert "2 of 2 done" in capsys.readouterr().out


def test_build_exercises_check_fails_before_they_are_built(root, capsys):
    write_exercise(root, "1")
    (root / "exercises/01_one.ipynb").rename(root / "solutions/01_one.ipynb")
    assert cli.main(["build-exercises", "--check"]) == 1
    assert "exercises/01_one.ipynb is out of date" in capsys.readouterr().out


def test_lab_opens_chapter_00_and_does_not_look_for_a_browser_that_is_not_there(root, monkeypatch):
    (root / "notebooks/00_meet.ipynb").write_text("{}")
    flags = []
    monkeypatch.setattr(LabApp, "launch_instance", flags.extend)
    monkeypatch.setattr(cli.webbrowser, "get", lambda: None)
    assert cli.main(["lab"]) == 0
    assert f"--ServerApp.root_dir={root}" in flags and "--no-browser" not in flags
    assert "--LabApp.default_url=/lab/tree/notebooks/00_meet.ipynb" in flags

    def none_here():
        raise cli.webbrowser.Error("no browser")

    monkeypatch.setattr(cli.webbrowser, "get", none_here)
    cli.main(["lab"])
    assert "--no-browser" in flags


# ---- doctor ----


def test_doctor_says_what_is_wrong_and_how_to_mend_it(capsys):
    def no_disk() -> str:
        raise doctor.Trouble("no room", "buy a disk")

    assert not doctor.examine((("disk", no_disk), ("sky", lambda: "blue")))
    out = capsys.readouterr().out
    assert "✗ disk: no room\n    to mend it: buy a disk\n✓ sky: blue\n" in out
    assert doctor.examine((("sky", lambda: "blue"),))


def test_doctor_finds_a_temporary_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "tempdir", "/nowhere/at/all")
    with pytest.raises(doctor.Trouble, match="cannot write to /nowhere/at/all"):
        doctor.temp_folder()


def test_doctor_finds_a_kernel_of_another_python(tmp_path, monkeypatch):
    kernel = tmp_path / "kernels/python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        '{"argv": ["/opt/other/bin/python", "-f", "{connection_file}"],'
        ' "display_name": "x", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    with pytest.raises(doctor.Trouble, match="kernel python3 is /opt/other/bin/python"):
        doctor.kernel()


def test_doctor_has_no_complaint_here():
    for name, question in doctor.QUESTIONS:
        assert question(), name
    assert "an all-reduce of one number takes" in doctor.four_ranks()
