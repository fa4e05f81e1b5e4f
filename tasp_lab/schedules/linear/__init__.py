"""Linear attention: its tasks and sequence-parallel schedules."""
