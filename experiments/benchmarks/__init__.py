"""Benchmarks of tasp-lab itself; results are ratios within one run."""
