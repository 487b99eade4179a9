"""Command-line flags that are written down once: as the fields of a frozen dataclass.

    @dataclass(frozen=True)
    class Config:
        steps: int = flag(300, "optimizer steps to take")
        precision: Literal["float32", "bfloat16"] = flag("float32", "type to compute in")

    config = parse_flags(Config)        # --steps 300 --precision bfloat16

A field named `micro_batch_size` becomes `--micro-batch-size`. Its type decides what is allowed:
int, float, str, Path, bool (`--x` and `--no-x`), Literal (one of a list), and `int | None` for
"not given". What types cannot say, such as "must be positive", the dataclass says in
`__post_init__` by raising ValueError; the reader sees it as an error of the flag, with exit code
2, before any work has begun. An unknown flag is an error too.
"""

import argparse
import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def flag(default: Any, help: str) -> Any:
    """A dataclass field with its help text: `steps: int = flag(300, "optimizer steps to take")`."""
    return dataclasses.field(default=default, metadata={"help": help})


def fixed(default: Any) -> Any:
    """A field that is no flag: a setting of the base class of which a script allows one value."""
    return dataclasses.field(default=default, init=False)


def parse_flags(
    Config: type[Config],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    description: str | None = None,
    epilog: str | None = None,
) -> Config:
    """Read `argv` (None: this process's arguments) into an instance of the dataclass `Config`."""
    parser = argparse.ArgumentParser(prog, None, description, epilog, allow_abbrev=False)
    hints = get_type_hints(Config)
    flags = [f for f in dataclasses.fields(Config) if f.init]  # type: ignore[arg-type]
    for field in flags:
        add_flag(parser, field, hints[field.name])
    values = vars(parser.parse_args(argv))
    try:
        return Config(**values)
    except (ValueError, FileNotFoundError) as error:
        parser.error(in_flag_names(str(error), [f.name for f in flags]))


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: Any) -> None:
    kind = without_none(hint)
    required = field.default is dataclasses.MISSING
    options: dict[str, Any] = {"required": required}
    text = field.metadata.get("help", "")
    if not required:
        options["default"] = field.default
        shown = "not set" if field.default is None else field.default
        text = f"{text} (default: {shown})".strip()
    options["help"] = text.replace("%", "%%")  # argparse reads a lone % as a format

    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
        options["type"] = type(get_args(kind)[0])
    elif kind in (int, float, str, Path):
        options["type"] = CONVERTERS[kind]
        options["metavar"] = kind.__name__.upper()
    else:
        raise TypeError(
            f"{field.name}: {hint} cannot be a flag; use bool, int, float, str, Path, "
            "a Literal, or one of these with `| None`"
        )
    parser.add_argument(flag_name(field.name), **options)


def without_none(hint: Any) -> Any:
    """`int | None` -> int."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return hint


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


CONVERTERS: types.MappingProxyType[type, Callable[[str], Any]] = types.MappingProxyType(
    {int: whole_number, float: number, str: str, Path: Path}
)


def in_flag_names(message: str, field_names: Sequence[str]) -> str:
    """Spell the fields in an error message as the flags the reader typed.

    A name with an underscore is a field wherever it stands; a plain word such as `data` may
    be just a word, so it counts at the start only.
    """
    for name in field_names:
        if "_" in name:
            message = re.sub(rf"\b{name}\b", flag_name(name), message)
        elif re.match(rf"{name}\b", message):
            message = flag_name(name) + message[len(name) :]
    return message
