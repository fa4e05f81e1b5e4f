"""Studies whose results are committed."""
