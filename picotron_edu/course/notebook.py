"""Notebooks as files: read them, write them the same way everywhere, run them.

A notebook that is saved on two machines should be the same file, or every commit is noise. So what
says nothing to a reader is dropped on the way to disk: the version of the interpreter, time stamps,
scroll positions, and the output of widgets, whose random ids are dead without their kernel.

`python -m picotron_edu.course.notebook notebooks/*.ipynb` re-executes in place (`make course`). The
picture of a cell tagged `readme` is also written to images/ beside the notebook, for README.md.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode, ValidationError

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
KEPT_IN_CELLS = ("tags", "jupyter")
CELL_SECONDS = 120
WIDGET = "application/vnd.jupyter.widget-view+json"


def read(path: Path) -> NotebookNode:
    """The notebook at `path`; a file that is none is named, and how to get it back."""
    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, AttributeError, KeyError, TypeError, ValidationError) as error:
        name = f"{path.parent.name}/{path.name}"
        raise ValueError(
            f"{name} is not a notebook (no longer JSON?); "
            f"to get the last good one back: git checkout {name}"
        ) from error


def to_text(notebook: NotebookNode) -> str:
    """The notebook as it is stored: indented JSON without the noise."""
    notebook = nbformat.from_dict(notebook)  # a copy
    ours = notebook.metadata.get("picotron_edu")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    if ours:
        notebook.metadata["picotron_edu"] = ours
    notebook.nbformat_minor = 5  # the first version in which cells have ids
    for cell in notebook.cells:
        cell.metadata = {k: cell.metadata[k] for k in KEPT_IN_CELLS if k in cell.metadata}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def execute(
    notebook: NotebookNode,
    folder: Path,
    *,
    allow_errors: bool = False,
    seconds: int = CELL_SECONDS,
) -> NotebookNode:
    """Run all cells in a fresh kernel, in `folder`; outputs land in `notebook`.

    A cell that takes longer than `seconds` ends with a KeyboardInterrupt. With `allow_errors` the
    rest runs on after an error, and a kernel that dies leaves the cells after it without a count.
    """
    client = NotebookClient(
        notebook,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # kernels talk about their own transport
        timeout=seconds,
        interrupt_on_timeout=True,
        allow_errors=allow_errors,
        record_timing=False,
        store_widget_state=False,
        on_cell_start=let_interrupt,
    )
    try:
        client.execute()
    except DeadKernelError:
        if not allow_errors:
            raise
    except KeyboardInterrupt:
        client.shutdown_kernel = "immediate"  # it would complain about its unfinished cell
        raise
    return notebook


def let_interrupt(**_: object) -> None:
    """Ctrl-C ends us; nbclient would only end the kernel, then wait for its answers."""
    with contextlib.suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def readme_pictures(notebook: NotebookNode) -> dict[str, bytes]:
    """File name → PNG of each cell tagged `readme`; the cell's id is the name."""
    pictures = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []) if "readme" in cell.metadata.get("tags", []) else []:
            if "image/png" in output.get("data", {}):
                pictures[f"{cell.id}.png"] = base64.b64decode(output.data["image/png"])
    return pictures


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"running {name}", flush=True)
        path = Path(name)
        notebook = execute(read(path), path.parent)
        path.write_text(to_text(notebook), encoding="utf-8")
        for picture, png in readme_pictures(notebook).items():
            (path.parent / "images").mkdir(exist_ok=True)
            (path.parent / "images" / picture).write_bytes(png)
