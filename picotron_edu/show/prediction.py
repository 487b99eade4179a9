"""Prediction before measurement: what the reader said, what it is, how far apart they are.

my_guess = 64                                   the reader commits to a number
prediction(my_guess, run.trace.wire_bytes(rank=0), "bytes")

you said 64 bytes, it is 96 bytes: 1.5 times too low
"""

from picotron_edu.show.ledger import duration, number

CLOSE = 1.1  # within this factor a guess at a measured quantity is right


def prediction(yours: float, measured: float, unit: str = "") -> None:
    """Print `yours` beside the `measured` (or counted) number, and the factor between them.

    unit   "seconds" chooses a readable unit (µs, ms, s); any other is written after the numbers
    """
    if yours is ...:
        raise TypeError("your guess is still ...: put a number in place of the dots")
    for name, value in (("your guess", yours), ("what was measured", measured)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}: it must be a number")
    print(f"you said {_text(yours, unit)}, it is {_text(measured, unit)}: ", end="")
    print(verdict(yours, measured))


def verdict(yours: float, measured: float) -> str:
    """How far off: "exactly right", "close", or the factor."""
    if yours == measured:
        return "exactly right"
    if yours <= 0 or measured <= 0:
        return f"{number(abs(measured - yours))} off"
    factor = max(yours, measured) / min(yours, measured)
    if factor < CLOSE:
        return f"close, within {100 * (factor - 1):.2g} %"
    times = f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"
    return f"{times} times too {'low' if yours < measured else 'high'}"


def _text(value: float, unit: str) -> str:
    return duration(value) if unit == "seconds" else f"{number(value)} {unit}".strip()
