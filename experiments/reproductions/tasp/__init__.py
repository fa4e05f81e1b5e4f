"""TASP's speed-ups and the compute to communication ratio of Ring Attention on eight MI300X."""
