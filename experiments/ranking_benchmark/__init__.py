"""A benchmark of rankings: which schedule is the fastest, for measured layers on machines, by any predictor."""
