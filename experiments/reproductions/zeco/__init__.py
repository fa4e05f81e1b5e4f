"""ZeCO's gathers and scans of states on 8 to 256 H100."""
