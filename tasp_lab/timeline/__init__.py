"""Timelines: events of a simulated or measured run, its critical path and its Chrome trace."""
