"""The reference engine: discrete events in SimPy."""
