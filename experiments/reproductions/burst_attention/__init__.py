"""BurstAttention on eight A100."""
