"""Training steps of whole models: stacks of layers with everything that stands beside attention.

- `plan`: what is trained and how; `rates`: how fast what is no attention is, and the memory of a GPU, with sources.
- `costs`: FLOPs and bytes of what stands between attention passes; `memory`: what each GPU holds.
- `messages`: parameters gathered, gradients reduced; `attention_passes`: the passes of layers, in groups of ranks.
- `chain`: all of these as one schedule; `phases`: the forward and the backward phase of a step.
"""
