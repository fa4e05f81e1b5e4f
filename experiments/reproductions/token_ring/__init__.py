"""TokenRing's trace on four A10."""
