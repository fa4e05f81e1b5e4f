"""``tasp-lab gpu-check``: the first hour on real GPUs as one command, step by step, with one record."""
