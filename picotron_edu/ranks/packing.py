"""Functions and values as bytes, also those that exist only in a notebook.

cloudpickle sends functions of `__main__`, lambdas and closures by value. It drops the name of their
file, which a traceback needs to show the reader's own line; code objects therefore travel in
Python's own format (`marshal`), which keeps it: notebook and ranks run the same interpreter.
"""

from __future__ import annotations

import io
import marshal
import types
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def pack(value: Any) -> bytes:
    """`value` as bytes; raises whatever its parts raise when they cannot travel."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


unpack = cloudpickle.loads
