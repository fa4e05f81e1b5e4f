"""A module per command: parse, call, print."""
