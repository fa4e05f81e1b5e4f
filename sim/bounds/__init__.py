"""Lower bounds of the time of schedules, computed from their work and machine without a simulation."""
