"""Linux: load of the host, and namespaces."""
