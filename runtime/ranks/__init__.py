"""Ranks: processes started by the launcher through its fork server, or by torchrun."""
