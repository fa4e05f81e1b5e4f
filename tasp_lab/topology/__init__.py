"""Topologies: ranks and switches joined by directed links; builders, routes and capacity limits."""
