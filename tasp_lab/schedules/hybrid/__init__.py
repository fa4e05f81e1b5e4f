"""Hybrid stacks: layers of linear and of softmax attention on one sequence."""
