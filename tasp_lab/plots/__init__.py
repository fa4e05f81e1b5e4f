"""Plots of timelines, rings and the accuracy report."""
