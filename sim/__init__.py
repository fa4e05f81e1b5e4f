"""The simulator: predicts the timeline of a schedule on a machine. Never imports torch."""
