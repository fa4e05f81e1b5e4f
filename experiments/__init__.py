"""Experiments, run by hand. Results are committed together with a record of the machine that produced them."""
