"""Builders of schedules, independent of machines."""
