"""Show the code that runs: the source of a function, class or module of the package, in the cell.

A chapter never copies an implementation, it shows it. The output is Markdown, so that JupyterLab,
VS Code and GitHub each highlight it in their own (light or dark) colours, with the bare source as
the plain-text form. The heading holds the file inside the package, the name and the number of
lines; no absolute path and no line number, which would change with every edit elsewhere in the
file.
"""

import inspect
import textwrap
from typing import Any

from picotron_edu.show.figure import emit, in_notebook


def source(obj: Any, *, from_: str | None = None, to: str | None = None) -> None:
    """Show the source of `obj`: a function, method, class or module.

    from_ and to cut a piece out of a long source: from the first line that contains `from_` to the
    first line at or after it that contains `to`, both included.

        show.source(RMSNorm)
        show.source(Llama, from_="def forward", to="return")
    """
    heading, code = read_source(obj, from_, to)
    if in_notebook():
        emit({"text/markdown": f"{heading}\n\n```python\n{code}\n```", "text/plain": code})
    else:
        print(f"{heading}\n\n{code}")


def read_source(obj: Any, from_: str | None, to: str | None) -> tuple[str, str]:
    """The heading and the code that `source` shows."""
    obj = inspect.unwrap(obj)
    lines = textwrap.dedent(inspect.getsource(obj)).rstrip().splitlines()
    first, last = 0, len(lines) - 1
    if from_ is not None:
        first = _find(lines, from_, 0, "from_", obj)
    if to is not None:
        last = _find(lines, to, first, "to", obj)
    piece = lines[first : last + 1]
    count = f"{len(piece)} line{'s' if len(piece) != 1 else ''}"
    if len(piece) < len(lines):
        count += f" of {len(lines)}"
    parts = [_file_name(obj)]
    if not inspect.ismodule(obj):
        parts.append(f"`{obj.__qualname__}`")
    heading = " · ".join([*parts, count])
    return heading, textwrap.dedent("\n".join(piece))


def _find(lines: list[str], text: str, start: int, argument: str, obj: Any) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(
        f"{argument}={text!r} is in no line of {obj.__name__} from its line {start + 1} on; "
        f"give a piece of text that stands in one of its {len(lines)} lines"
    )


def _file_name(obj: Any) -> str:
    """`picotron_edu/model.py` for things of an imported module, else `this notebook`."""
    module = obj.__name__ if inspect.ismodule(obj) else obj.__module__
    if module == "__main__":
        return "this notebook"
    name = module.replace(".", "/")
    is_package = (inspect.getsourcefile(obj) or "").endswith("__init__.py")
    return f"{name}/__init__.py" if is_package else f"{name}.py"
