"""Calibration: fitting the constants of a profile to measurements, with confidence intervals."""
