"""What one rank's slot on the notice board holds (see `board.py`).

Calls on an axis and messages to a neighbour are numbered, and the last `HISTORY` of them are kept
in a ring: who comes to the same number compares. Messages between two ranks are matched in the
order in which they are posted, whatever their axis.
"""

from __future__ import annotations

import numpy as np

GROUPS = 32  # axes one rank can talk over
HISTORY = 64  # calls remembered per axis and per neighbour; who is further ahead is not compared
OPPOSITE = {"send": "receive", "receive": "send", "give": "take", "take": "give"}


def slot_type(world_size: int) -> np.dtype:
    """The layout of one rank's slot."""
    fields: list[tuple] = [
        ("state", "i8"),
        ("version", "i8"),  # changes with every new wait: proves that nothing moved
        ("since", "f8"),
        ("what", "S160"),
        ("axis", "S40"),
        ("line", "S200"),
        # one entry an axis this rank talks over, in the order of first use
        ("key", "u4", GROUPS),
        ("members", "u1", (GROUPS, world_size)),
        ("calls", "i8", GROUPS),  # calls made so far
        ("signature", "u4", (GROUPS, HISTORY)),
        ("entered", "f8", (GROUPS, HISTORY)),  # when each of the last calls was made
        ("waiting", "i8", GROUPS),  # the call it is blocked in, 0 for none
    ]
    for kind in OPPOSITE:  # messages between two ranks, one entry a peer; give, take: all_to_all's
        fields += [
            (f"{kind} count", "i8", (world_size,)),  # posted so far
            (f"{kind} signature", "u4", (world_size, HISTORY)),
            (f"{kind} posted", "f8", (world_size, HISTORY)),
            (f"{kind} waiting", "i8", (world_size,)),  # the message it is blocked in, 0 for none
        ]
    return np.dtype(fields)
