"""MagiAttention's benchmark of baselines on 8 to 64 H100."""
