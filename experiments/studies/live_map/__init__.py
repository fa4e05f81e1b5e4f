"""The grid of the live map in the documents."""
