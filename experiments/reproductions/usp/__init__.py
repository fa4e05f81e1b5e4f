"""USP on eight A100."""
