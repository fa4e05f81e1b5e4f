"""Which layout trains a model fastest on a machine, and which fits.

- `candidates`: all layouts of a number of GPUs, with closed-form bounds of their time.
- `search`: those that fit are simulated, the most promising first, until bounds exclude the others.
- `plan`: the question, and its answer as a report.
- `flags`: the flags of the chosen layout in libraries that train with it.
"""
