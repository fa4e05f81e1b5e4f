"""Training steps of whole models: stacks of layers with everything that stands beside attention."""
