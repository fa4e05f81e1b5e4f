"""Schedules of linear attention on the emulated fabric: hops of states, crossovers, and what attention hides.

Eight processes run causal layers, forward and backward, on an emulated mesh, behind an emulated switch and on two
emulated nodes of four. ``python -m experiments.tables.linear_on_the_fabric`` writes
``experiments/results/linear_on_the_fabric.json`` after each part, its table ``.md``, and pictures and a trace of a run.
It takes about half an hour on two idle cores; ``--only PART``, several times, repeats some and keeps the others.

**Theory.** A state of 4 x KV heads x head_dim^2 bytes takes the time tau on a link. With n ranks, a chain of states in
K pieces has n - 2 + K hops of tau / K: ``tau + (n - 2) tau / K``, for LASP K = 1. A ring takes n - 1 hops of tau,
several rings share them, and straight to all it is tau on a mesh, but a port carries n - 1 states.
"""
