"""One palette for the whole course: a colour per rank, a colour per kind of operation.

The eight rank colours alternate dark and light, so that neighbours differ in a greyscale print
too, and they stay apart for readers with protanopia, deuteranopia or tritanopia (the tests
measure both). A picture never relies on colour alone: ranks carry their number and operations
their name.

    operation            colour
    forward              light blue
    backward             dark blue
    weight gradient      green         (the half of a backward pass that can wait)
    optimizer            plum
    communication        orange
    waiting              pale grey, hatched
    other                dark grey
"""

from typing import Any

RANK_COLOURS = (
    "#4C6392",  # 0 slate
    "#E3A44E",  # 1 ochre
    "#902A21",  # 2 brick
    "#4FD4F9",  # 3 sky
    "#008857",  # 4 green
    "#FD6A9C",  # 5 pink
    "#2D19BD",  # 6 indigo
    "#D0E0A9",  # 7 pale lime
)

KIND_COLOURS = {
    "forward": "#8FBDEA",
    "backward": "#2F5C9E",
    "weight gradient": "#35A873",
    "optimizer": "#5A2550",
    "communication": "#EE8A3A",
    "waiting": "#E2E2E2",
    "other": "#6B6B6B",
}

# What occupies memory, the longest-lived at the bottom of a stack. Order and colours are the same
# in every chapter, so that a shrinking part (ZeRO, tensor parallel) is seen at a glance.
MEMORY_COLOURS = {
    "parameters": "#4C6392",
    "optimizer states": "#902A21",
    "gradients": "#E3A44E",
    "activations": "#4FD4F9",
    "other": "#B8B8B8",
}

TEXT = "#222222"
FRAME = "#8A8A8A"
PAPER = "#FFFFFF"

# A word in a span's or collective's name tells its kind; the first match counts.
_WORDS = (
    ("wait", "waiting"),
    ("barrier", "waiting"),
    ("weight", "weight gradient"),
    ("optim", "optimizer"),
    ("adam", "optimizer"),
    ("recompute", "forward"),
    ("back", "backward"),
    ("forward", "forward"),
    ("loss", "forward"),
)


def rank_colour(rank: int) -> str:
    """The colour of `rank`; nine and more ranks begin again at the first colour."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def word_kind(name: str) -> str:
    """The kind of operation that a name tells: "backward dp" → "backward"; "other" if none.

    The short names of pipeline schedules count too: "F3" or "F" is a forward pass, "B3" a backward
    pass, "W3" a weight gradient.
    """
    name = name.lower()
    for word, kind in _WORDS:
        if word in name:
            return kind
    if name[1:] == "" or name[1:].isdigit():
        short = {"f": "forward", "b": "backward", "w": "weight gradient"}
        return short.get(name[:1], "other")
    return "other"


def kind_of(event: Any) -> str:
    """The kind of a trace event: its name decides; what is left in lane "comm" is communication."""
    kind = word_kind(event.name)
    return "communication" if kind == "other" and event.lane == "comm" else kind


def luminance(colour: str) -> float:
    """Relative luminance of "#RRGGBB" from 0 (black) to 1 (white), as in the WCAG rules."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(colour: str) -> str:
    """The text colour, near-black or white, with the larger contrast on a `colour` background."""
    light = luminance(colour)
    contrast_white = 1.05 / (light + 0.05)
    contrast_dark = (light + 0.05) / (luminance(TEXT) + 0.05)
    return PAPER if contrast_white > contrast_dark else TEXT
