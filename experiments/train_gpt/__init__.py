"""A small GPT on text, trained sequence-parallel: ``torchrun --nproc-per-node 4 -m experiments.train_gpt``.

How it is done, and what changes in a model, is in docs/training.md.
"""
