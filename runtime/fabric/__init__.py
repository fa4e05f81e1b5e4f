"""The emulated fabric: a topology of network namespaces, veth pairs and token buckets."""
