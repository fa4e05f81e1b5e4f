"""Lower bounds of the time of schedules, by theorems about their work; no engine is asked."""
