"""Executes one rank's part of a schedule over a process group, per lane or per step, on streams on a GPU."""
