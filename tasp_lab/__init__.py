"""tasp-lab: what ring and multi-ring collectives cost on a machine, predicted, executed and compared."""
