"""How fast tasp-lab itself is, as ratios within one run."""
