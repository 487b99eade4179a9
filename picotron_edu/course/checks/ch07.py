"""Chapter 07, context parallelism: a merge, tiles, positions, a ring, three bugs, bytes."""

from __future__ import annotations

from picotron_edu.course.checking import exercise
from picotron_edu.course.checks import context_counts, merging, ring_bugs, ringing, zigzag

merge_two_attentions = exercise("7.1")(merging.merge_two_attentions)
tiles_of_the_mask = exercise("7.2")(zigzag.tiles_of_the_mask)
positions_of_a_rank = exercise("7.3")(zigzag.positions_of_a_rank)
attention_in_a_ring = exercise("7.4")(ringing.attention_in_a_ring)
three_bugs = exercise("7.5")(ring_bugs.find_the_bugs)
bytes_of_a_layer = exercise("7.6")(context_counts.bytes_of_a_layer)
