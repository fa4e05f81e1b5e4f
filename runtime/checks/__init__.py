"""Checks that ``tasp-lab gpu-check`` runs on the ranks of a process group, and tests on hosts."""
