"""ring-flash-attention on eight A100 and eight H800."""
