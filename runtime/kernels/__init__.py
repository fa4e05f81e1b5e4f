"""Attention kernels by name: flash-attn, torch's scaled dot-product attention, and a float64 reference."""
