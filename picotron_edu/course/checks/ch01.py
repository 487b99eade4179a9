"""Chapter 01, single GPU: memory, accumulation, master weights, FLOPs, and two faults to find.

The judges live in files by what they look at, since two exercises often share it.
"""

from __future__ import annotations

from picotron_edu.course.checking import exercise
from picotron_edu.course.checks import accumulating, counting, master_weights

memory_of_a_model = exercise("1.1")(counting.memory_of_a_model)
accumulation = exercise("1.2")(accumulating.accumulation)
weights_that_move = exercise("1.3")(master_weights.weights_that_move)
flops_of_a_step = exercise("1.4")(counting.flops_of_a_step)
clipping = exercise("1.5")(accumulating.clipping)
main_gradients = exercise("1.6")(accumulating.main_gradients)
