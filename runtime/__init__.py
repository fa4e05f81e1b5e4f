"""The runtime: executes schedules on torch.distributed. Never imports simpy."""
