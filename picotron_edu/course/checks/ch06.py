"""Chapter 06, sequence parallelism: two messages, partial gradients, two bugs, two predictions."""

from __future__ import annotations

from picotron_edu.course.checking import exercise
from picotron_edu.course.checks import partial_sums, sequence_counts, sequence_pieces

gather_and_its_transpose = exercise("6.1")(sequence_pieces.messages_with_gradients)
parts_and_the_norm = exercise("6.2")(partial_sums.parts_and_the_norm)
two_bugs = exercise("6.3")(sequence_pieces.find_the_bugs)
what_is_whole = exercise("6.4")(sequence_counts.activations_of_a_layer)
how_many_bytes = exercise("6.5")(sequence_counts.messages_of_llama)
