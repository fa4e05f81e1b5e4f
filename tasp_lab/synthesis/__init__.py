"""Schedules that nobody has written: found for a question, saved as decisions, built and proved like any other."""
