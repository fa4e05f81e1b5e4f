"""UltraAttn's benchmark of ring-flash-attention on A800, H800 and A100."""
