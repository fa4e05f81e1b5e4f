"""Softmax attention: schedules of its forward and backward passes, and lower bounds of their time."""
