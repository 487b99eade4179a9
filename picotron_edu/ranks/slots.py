"""What one rank's slot on the notice board holds (see `board.py`).

Calls on an axis and messages to a neighbour are numbered, and the last `HISTORY` of them are kept
in a ring: who comes to the same number compares. Messages between two ranks are matched in the
order in which they are posted, whatever their axis.
"""

from __future__ import annotations

import numpy as np

AXES = 32  # axes one rank can talk over
HISTORY = 64  # calls remembered per axis and per neighbour; who is further ahead is not compared
# the kinds of messages between two ranks: a send meets a receive; give and take are the parts of an
# all_to_all, compared, but not counted as sends
OPPOSITE = {"send": "receive", "receive": "send", "give": "take", "take": "give"}


def slot_type(world_size: int) -> np.dtype:
    """The layout of one rank's slot."""
    fields: list[tuple] = [
        ("state", "i8"),
        ("version", "i8"),  # grows with every new wait: where it stands still, nothing moved
        ("since", "f8"),  # when the state was set
        ("what", "S160"),  # the last message it began, for the report
        ("axis", "S40"),
        ("line", "S200"),
        # one row an axis this rank talks over, in the order of first use
        ("key", "u4", AXES),  # a checksum of its name and ranks, 0 for a free row
        ("members", "u1", (AXES, world_size)),
        ("calls", "i8", AXES),  # calls made so far
        ("signature", "u4", (AXES, HISTORY)),
        ("entered", "f8", (AXES, HISTORY)),  # when each of the last calls was made
        ("waiting", "i8", AXES),  # the call it is blocked in, 0 for none
    ]
    for kind in OPPOSITE:  # one row a peer
        fields += [
            (f"{kind} count", "i8", (world_size,)),  # posted so far
            (f"{kind} signature", "u4", (world_size, HISTORY)),
            (f"{kind} posted", "f8", (world_size, HISTORY)),
            (f"{kind} waiting", "i8", (world_size,)),  # the message it is blocked in, 0 for none
        ]
    return np.dtype(fields)
