"""What a run does besides the loop: its length, non-finite steps, memory, preemption."""
