"""Chapter 02, activation recomputation: write it, predict its bytes, a fresh mask, a budget."""

from __future__ import annotations

from picotron_edu.course.checking import exercise
from picotron_edu.course.checks import choosing_layers, recomputing

a_checkpoint = exercise("2.1")(recomputing.a_checkpoint)
bytes_that_wait = exercise("2.2", answers=3)(recomputing.bytes_that_wait)
fresh_mask = exercise("2.3")(recomputing.fresh_mask)
layers_under_a_budget = exercise("2.4")(choosing_layers.layers_under_a_budget)
