"""Schedules: blocks, steps and kernel calls; proofs of validity; per-rank buffer layout."""
