"""Overrides: constants and numbers of a named machine or layer, changed by their path."""
