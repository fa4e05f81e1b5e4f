"""Training steps of whole models: attention passes of all layers with the rest of the model.

- `layout`: the model and how it is trained; `rates`: rates of matrix products and memory of GPUs, with sources.
- `costs`: FLOPs and bytes of everything but attention; `memory`: memory use of each GPU.
- `messages`: gathered parameters, reduced gradients; `phases`: the passes of layers, in groups of ranks, and all of
  these as one schedule, the forward or the backward phase of a step.
"""
