"""Models by name: their layers in numbers, with sources."""
