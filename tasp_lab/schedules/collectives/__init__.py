"""Collectives: schedules and lower bounds of AllGather, ReduceScatter, AllReduce, AllToAll and SendRecv."""
