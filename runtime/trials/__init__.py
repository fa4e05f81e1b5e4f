"""Trials: runs of a schedule on known data whose result is checked, test patterns or attention layers."""
