"""Sequence-parallel training of a small GPT on text: ``torchrun --nproc-per-node 4 -m experiments.train_gpt``.

docs/training.md describes the implementation and the required changes to a model.
"""
