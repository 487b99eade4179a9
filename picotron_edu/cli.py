"""The command `picotron-edu`, which works in the repository and in any folder below it.

picotron-edu lab                          open the course in JupyterLab
picotron-edu run 01 --nproc 2 --steps 50  torchrun a chapter's script; --steps is the script's own
picotron-edu check 01                     how many exercises of a chapter are done
picotron-edu progress                     the same for all chapters
picotron-edu doctor                       is this machine ready, and if not, how to mend it
picotron-edu build-exercises              write exercises/ from solutions/ (for authors)
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return COMMANDS[arguments.command](arguments, rest)
    except (ValueError, FileNotFoundError) as error:
        print(f"picotron-edu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="picotron-edu", description="A course that runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    add("lab", "open the course in JupyterLab")
    run = add("run", "torchrun a chapter's script; flags it does not know go to the script")
    run.add_argument("chapter", help="01")
    run.add_argument("--nproc", type=ranks, default=1, metavar="N", help="ranks to start (1)")
    check = add("check", "run your exercises of a chapter and say which are done")
    check.add_argument("chapter", help="01")
    add("progress", "which exercises of the whole course are done")
    add("doctor", "is this machine ready, and if not, how to mend it")
    build = add("build-exercises", "write exercises/ from solutions/")
    build.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    build.add_argument("--force", action="store_true", help="also over an edited exercise")
    return parser


def ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks, 1 or more, not {text!r}")
    return int(text)


def find_root() -> Path:
    """The repository: where the package lies, or a folder above the current one."""
    here = Path.cwd()
    for folder in (Path(__file__).parents[1], here, *here.parents):
        if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError(
        f"{here} is not inside the repository of the course (the folder with notebooks/ in it)"
    )


def chapter_file(folder: Path, chapter: str, suffix: str = ".ipynb") -> Path:
    """The file of chapter "01" (or "1") in `folder`; the error says which there are."""
    files = {path.name[:2]: path for path in sorted(folder.glob(f"[0-9][0-9]_*{suffix}"))}
    if chapter.zfill(2) not in files:
        there = ", ".join(files) or "none yet"
        raise ValueError(f"there is no chapter {chapter} in {folder.name}/ (there: {there})")
    return files[chapter.zfill(2)]


def lab(arguments: argparse.Namespace, rest: list[str]) -> int:
    from jupyterlab.labapp import LabApp

    root = find_root()
    first = chapter_file(root / "notebooks", "00")
    flags = [
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/notebooks/{first.name}",
    ]
    try:
        webbrowser.get()
    except webbrowser.Error:
        flags.append("--no-browser")
        print("No browser here: open the address that JupyterLab prints below.", flush=True)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # a container; Jupyter insists on being told
        flags.append("--allow-root")
    LabApp.launch_instance(flags)
    return 0


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from picotron_edu.ranks.machine import cores, threads_per_rank

    script = chapter_file(find_root() / "notebooks", arguments.chapter, ".py")
    threads = threads_per_rank(cores(), arguments.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # or torchrun says that it takes 1
    ending = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    ending.setLevel(logging.ERROR)  # its warnings only say that it ends the other ranks
    flags = [
        "--standalone",
        f"--nproc-per-node={arguments.nproc}",
        "--signals-to-handle=SIGTERM,SIGHUP,SIGQUIT",  # not Ctrl-C: the ranks would all print it
    ]
    try:
        torchrun.main([*flags, str(script), *rest])
    except ChildFailedError as error:  # each rank has printed its own traceback
        rank, failure = error.get_first_failure()
        print(
            f"picotron-edu: rank {rank} failed first, exit code {failure.exitcode}", file=sys.stderr
        )
        return 1
    except SignalException as stopped:  # somebody ended us; torchrun has ended the ranks
        return 128 + stopped.sigval
    return 0


def check(arguments: argparse.Namespace, rest: list[str]) -> int:
    from picotron_edu.course.notebook import CELL_SECONDS
    from picotron_edu.course.progress import check_notebook, summary

    path = chapter_file(find_root() / "exercises", arguments.chapter)
    print(f"Chapter {path.stem.replace('_', ' ')}: running exercises/{path.name} …", flush=True)
    print(f"(a cell may take {CELL_SECONDS} s)", flush=True)
    results = check_notebook(path)
    print(summary(results))
    return int(any(result.state != "done" for result in results))


def progress(arguments: argparse.Namespace, rest: list[str]) -> int:
    from picotron_edu.course.build import is_untouched
    from picotron_edu.course.notebook import read
    from picotron_edu.course.progress import check_notebook, summary

    for path in sorted((find_root() / "exercises").glob("[0-9][0-9]_*.ipynb")):
        print(f"Chapter {path.stem.replace('_', ' ')}", flush=True)
        print("  not begun" if is_untouched(read(path)) else summary(check_notebook(path)))
    return 0


def doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    from picotron_edu.doctor import examine

    return 0 if examine() else 1


def build_exercises(arguments: argparse.Namespace, rest: list[str]) -> int:
    from picotron_edu.course.build import build_all

    problems, left_alone = build_all(find_root(), check=arguments.check, force=arguments.force)
    print("\n\n".join(left_alone + problems) or "exercises/ agrees with solutions/")
    return int(bool(problems))


COMMANDS = {
    "lab": lab,
    "run": run,
    "check": check,
    "progress": progress,
    "doctor": doctor,
    "build-exercises": build_exercises,
}

if __name__ == "__main__":
    sys.exit(main())
