"""The parts of a run outside the loop: length, non-finite steps, memory, preemption."""
