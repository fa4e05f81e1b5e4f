"""Studies: many predictions, stored, searched and reported."""
