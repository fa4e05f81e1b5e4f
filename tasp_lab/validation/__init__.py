"""Schedules executed on real ranks and compared with their prediction."""
