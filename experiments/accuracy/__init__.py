"""Accuracy reports: predictions against measured tables, TASP's step on NVSwitch, and the emulated fabric."""
