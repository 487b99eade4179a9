"""Functions and values as bytes, also those that exist only in a notebook.

cloudpickle sends functions and classes of `__main__`, lambdas and closures by value. Two things are
added to it here:

* It drops the name of a function's file, which a traceback needs to show the reader's own line.
  Code objects travel in Python's own format (`marshal`), which keeps it: both ends run one Python.
* An object that comes *back* brings its class along, and cloudpickle would write the rank's copy of
  the methods, with the rank's copy of the variables they use, over the notebook's class. A class
  that this process has already stays as it is.
"""

from __future__ import annotations

import io
import marshal
import pickle
import types
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.ours: set[int] = set()  # ids of classes that were here before

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == internals.__name__ and name.startswith("_make_skeleton_"):

            def make(*args: Any) -> type:
                known = getattr(internals, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
                here = any(isinstance(arg, str) and arg in known for arg in args)
                made = found(*args)
                if here:
                    self.ours.add(id(made))
                return made

            return make
        if module == internals.__name__ and name == "_class_setstate":
            return lambda cls, state: cls if id(cls) in self.ours else found(cls, state)
        return found


def pack(value: Any) -> bytes:
    """`value` as bytes; raises whatever its parts raise when they cannot travel."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` has packed."""
    return _Unpickler(io.BytesIO(data)).load()
