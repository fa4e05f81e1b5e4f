"""The protocol between launcher and ranks: set-up, jobs, records and heartbeats. Never imports torch."""
