"""Machines: a topology with its communication library and constants; the catalogue, profiles and importers."""
