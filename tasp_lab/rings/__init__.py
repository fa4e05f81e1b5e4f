"""Decompositions: the rings, paths and trees of a topology, found by closed forms or search and verified."""
