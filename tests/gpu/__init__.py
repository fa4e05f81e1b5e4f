"""Tests that need GPUs, and their helpers: chosen by ``pytest -m gpu``, and run by ``tasp-lab gpu-check``.

Started by ``gpu-check`` on processors, they run there, too: the logic is the same, and limits of speed do not apply.
"""
