"""LASP-2's headline and its Tables 5 and 6."""
