"""Studies: many points of one question, evaluated, kept, searched and reported."""
