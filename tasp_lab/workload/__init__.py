"""Workloads: the size of an attention layer, its distribution over ranks, and its kernel calls."""
