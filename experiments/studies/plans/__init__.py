"""Ten plans, from 8 to 1,024 GPUs."""
