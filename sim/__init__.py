"""The simulator: how long a schedule takes on a machine. Never imports torch."""
