"""Flags come from a dataclass's fields, and a wrong value says what is allowed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from picotron_edu.flags import fixed, flag, parse_flags


@dataclass(frozen=True)
class Config:
    steps: int = flag(300, "optimizer steps to take (100 % of them)")
    lr: float = flag(1e-3, "peak learning rate")
    data: str = flag("manual", "what to read")
    out: Path = flag(Path("runs"), "where to write")  # noqa: RUF009
    tied: bool = flag(False, "tie the embeddings")
    precision: Literal["float32", "bfloat16"] = flag("float32", "type to compute in")
    micro_batch_size: int | None = flag(None, "rows at a time")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.micro_batch_size is not None and self.micro_batch_size > self.steps:
            raise ValueError(
                f"data: micro_batch_size {self.micro_batch_size} must be ≤ {self.steps} of data"
            )


def error_of(capsys: pytest.CaptureFixture, *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse_flags(Config, argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_without_flags_the_defaults_are_used():
    assert parse_flags(Config, []) == Config()


def test_every_kind_of_field_is_read():
    argv = (
        "--steps 5 --lr 0.5 --data a.txt --out x/y --tied --precision bfloat16 --micro-batch-size 2"
    )
    config = parse_flags(Config, argv.split())
    assert config == Config(5, 0.5, "a.txt", Path("x/y"), True, "bfloat16", 2)
    assert parse_flags(Config, ["--no-tied"]).tied is False


def test_a_value_outside_the_list_is_answered_with_the_list(capsys):
    message = error_of(capsys, "--precision", "fp8")
    assert "--precision" in message
    assert "float32" in message and "bfloat16" in message and "fp8" in message


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--steps", "many"), "--steps: 'many' is not a whole number"),
        (("--steps", "1.5"), "--steps: '1.5' is not a whole number"),
        (("--lr", "fast"), "--lr: 'fast' is not a number"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--micro-batch-size", "900"), "--data: --micro-batch-size 900 must be ≤ 300 of data"),
        (("--stepz", "3"), "--stepz"),
        (("--step", "3"), "--step"),  # no silent abbreviations
    ],
)
def test_a_wrong_flag_names_itself_and_exits_with_2(capsys, argv, reason):
    assert reason in error_of(capsys, *argv)


def test_help_shows_the_text_and_the_default_of_each_field(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_flags(Config, ["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "optimizer steps to take (100 % of them) (default: 300)" in text
    assert "rows at a time (default: not set)" in text


def test_a_field_without_default_is_a_required_flag(capsys):
    @dataclass(frozen=True)
    class Needs:
        data: str

    with pytest.raises(SystemExit):
        parse_flags(Needs, [])
    assert "--data" in capsys.readouterr().err
    assert parse_flags(Needs, ["--data", "x"]) == Needs("x")


def test_a_type_that_cannot_be_a_flag_is_refused_by_name():
    @dataclass(frozen=True)
    class Odd:
        sizes: dict[str, int] = flag(None, "")  # noqa: RUF009

    with pytest.raises(TypeError, match=r"sizes.*cannot be a flag"):
        parse_flags(Odd, [])


def test_what_a_script_has_fixed_is_no_flag(capsys):
    @dataclass(frozen=True)
    class Narrow(Config):
        tied: bool = fixed(True)

    assert parse_flags(Narrow, []).tied is True
    with pytest.raises(SystemExit) as stopped:
        parse_flags(Narrow, ["--no-tied"])
    assert stopped.value.code == 2 and "--no-tied" in capsys.readouterr().err
