"""%%ranks in a real notebook kernel: names stay, text is grouped, failures name the cell's line."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from processes import eventually, gone, ranks_of

from picotron_edu.ranks import magic


class Kernel:
    """A notebook that is run cell by cell."""

    def __init__(self) -> None:
        self.notebook = new_notebook()
        self.client = NotebookClient(
            self.notebook, timeout=60, allow_errors=True, kernel_name="python3"
        )
        self.client.create_kernel_manager()
        self.client.start_new_kernel()
        self.client.start_new_kernel_client()

    def run(self, source: str) -> str:
        """Execute a cell; its text, and its error as Jupyter shows it."""
        cell = new_code_cell(source)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        text = ""
        for output in cell.outputs:
            if output.output_type == "stream":
                text += output.text
            elif output.output_type == "error":
                text += "\n".join(output.traceback)
            else:
                text += output.data["text/plain"] + "\n"
        return text

    @property
    def pid(self) -> int:
        return int(self.run("import os; os.getpid()"))

    def close(self) -> None:
        if self.client.kc is not None:
            self.client._cleanup_kernel()


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    assert kernel.run("%load_ext picotron_edu.ranks") == "%%ranks N: gloo on CPU\n"
    yield kernel
    kernel.close()


def test_names_stay_from_cell_to_cell_and_last_expressions_are_printed(kernel):
    assert kernel.run(
        "%%ranks 2\nx = torch.full((2,), rank + 1)\nprint(world_size)"
    ).splitlines() == [
        "rank 0 │ 2",
        "rank 1 │ 2",
    ]
    assert kernel.run("%%ranks 2\nall_reduce(x, world())").splitlines() == [
        "rank 0 │ tensor([3, 3])",
        "rank 1 │ tensor([3, 3])",
    ]
    # the number may be left out once there are ranks
    assert kernel.run("%%ranks\ndist.get_rank() * 10").splitlines() == ["rank 0 │ 0", "rank 1 │ 10"]
    assert kernel.run("%%ranks\nx = 1;").strip() == "" and kernel.run("%%ranks\nNone").strip() == ""


def test_definitions_of_one_cell_are_used_in_the_next(kernel):
    kernel.run("%%ranks 2\nclass Box:\n    size = rank\ndef size():\n    return Box.size")
    assert kernel.run("%%ranks\nsize()").splitlines() == ["rank 0 │ 0", "rank 1 │ 1"]


def test_twenty_repeats_print_the_same(kernel):
    cell = "%%ranks 2\nfor i in range(3):\n    print(i, all_reduce(torch.ones(1), world()).item())"
    assert len({kernel.run(cell) for _ in range(20)}) == 1


def test_an_error_on_all_ranks_names_the_line_and_keeps_the_names(kernel):
    kernel.run("%%ranks 2\nkept = 5")
    text = kernel.run("%%ranks\na = 1\nb = a / 0")
    assert text.startswith("RankFailed: rank 0 failed first: ZeroDivisionError: division by zero")
    assert "%%ranks cell, line 2" in text and "b = a / 0" in text and "alike on rank 1" in text
    assert "picotron_edu" not in text and "ranks were ended" not in text
    assert kernel.run("%%ranks\nkept").splitlines() == ["rank 0 │ 5", "rank 1 │ 5"]


def test_a_syntax_error_names_its_line(kernel):
    text = kernel.run("%%ranks 2\na = 1\nb = = 2")
    assert "SyntaxError" in text and "%%ranks cell, line 2" in text


def test_a_failure_that_leaves_ranks_waiting_starts_them_anew(kernel):
    kernel.run("%%ranks 2\nkept = 5")
    begin = time.perf_counter()
    text = kernel.run(
        "%%ranks\nif rank == 1:\n    raise KeyError('mine')\nall_reduce(torch.ones(1), world())"
    )
    assert time.perf_counter() - begin < 3
    assert "rank 1 failed first: KeyError: 'mine'" in text and "%%ranks cell, line 2" in text
    assert "The ranks were ended; the next %%ranks cell starts new ones" in text
    assert "NameError: name 'kept' is not defined" in kernel.run("%%ranks\nkept")
    assert kernel.run("%%ranks\nrank").splitlines()[-1] == "rank 1 │ 1"


def test_a_hang_is_reported_with_cell_lines(kernel):
    text = kernel.run("%%ranks 2\nx = torch.ones(1)\nif rank == 0:\n    all_reduce(x, world())")
    assert text.startswith("RanksHung: the ranks wait for each other for ever:")
    assert (
        "rank 0 waits in all_reduce(float32[1], sum) over axis 'world' at %%ranks cell, line 3"
        in text
    )


def test_another_number_of_ranks_or_fresh_ones(kernel):
    kernel.run("%%ranks 2\nkept = 5")
    assert "rank 2 │ 3" in kernel.run("%%ranks 3\nworld_size")
    assert "NameError" in kernel.run("%%ranks 2 --fresh\nkept")


def test_wrong_arguments_of_the_magic(kernel):
    kernel.run("%%ranks 2\nkept = 5")
    assert "%%ranks: argument n: invalid int value: 'two'" in kernel.run("%%ranks two\n1")
    assert "world_size=0: must be a whole number from 1 to 64" in kernel.run("%%ranks 0\n1")
    assert "timeout=-1.0: must be more than 0 seconds" in kernel.run("%%ranks 2 --timeout -1\n1")
    assert "--link fast: must be LATENCY_US,GBPS" in kernel.run("%%ranks 2 --link fast\n1")
    assert "rank 1 │ 5" in kernel.run("%%ranks\nkept")  # a slip does not cost the names


def test_where_there_is_no_fork_no_fork_server_is_started(monkeypatch):
    def refuse():
        raise AssertionError("a fork server on Windows")

    monkeypatch.setattr(magic, "CAN_FORK", False)
    monkeypatch.setattr(magic, "fork_server", refuse)
    magic.load_ipython_extension(SimpleNamespace(register_magics=lambda magics: None))


def test_a_link_slows_the_cell(kernel):
    cell = "\nimport time\nt = time.perf_counter()\nall_reduce(torch.ones(1), world())\n"
    cell += "time.perf_counter() - t > 0.2"
    assert "rank 0 │ True" in kernel.run("%%ranks 2 --link 100000,1" + cell)


def test_a_launch_in_a_cell_shows_the_cells_line(kernel):
    text = kernel.run(
        "from picotron_edu.ranks import launch, world\n"
        "def work():\n    if world().index == 1:\n        raise ValueError('bad luck')\n"
        "launch(work, world_size=2)"
    )
    assert "RankFailed: rank 1 failed first: ValueError: bad luck" in text
    assert "notebook cell, line 4, in work" in text and "raise ValueError('bad luck')" in text
    assert "ipykernel" not in text and "pool.py" not in text


def test_an_interrupted_cell_ends_its_ranks_and_the_next_works(kernel):
    pid = kernel.pid
    kernel.run("import threading, signal")
    later = "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
    text = kernel.run(later + "launch(lambda: __import__('time').sleep(60), world_size=2)")
    assert "KeyboardInterrupt" in text
    kernel.run("%%ranks 2\nimport time")
    kernel.run(later + "get_ipython().run_cell_magic('ranks', '', 'time.sleep(60)')")
    assert eventually(lambda: not ranks_of(pid))
    assert "rank 1 │ 1" in kernel.run("%%ranks 2\nrank")


def test_a_killed_kernel_takes_its_ranks_along():
    kernel = Kernel()
    kernel.run("%load_ext picotron_edu.ranks")
    kernel.run("%%ranks 2\nimport os")
    pid = kernel.pid
    ranks = [p.pid for p in ranks_of(pid)]
    assert len(ranks) == 2
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: gone(ranks), 5)
    kernel.close()


def test_a_restarted_kernel_takes_its_ranks_along():
    kernel = Kernel()
    kernel.run("%load_ext picotron_edu.ranks")
    kernel.run("%%ranks 2\nimport os")
    ranks = [p.pid for p in ranks_of(kernel.pid)]
    assert len(ranks) == 2
    kernel.close()
    assert eventually(lambda: gone(ranks), 5)


def test_the_notebook_is_valid(kernel):
    nbformat.validate(kernel.notebook)
