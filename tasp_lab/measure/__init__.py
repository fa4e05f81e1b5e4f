"""Measured tables and logs, fits to them, and how far predictions are from them."""
