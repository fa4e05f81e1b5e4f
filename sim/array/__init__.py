"""The array engine for large worlds: simulates equivalence classes of operations; same times as `sim.event`."""
