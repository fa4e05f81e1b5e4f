"""The account of the error: measured tables, TASP's step on NVSwitch, and the emulated fabric, beside predictions."""
