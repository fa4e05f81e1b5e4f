"""What is found among the points of a study: crossovers, sensitivity, and points that are worth a measurement."""
