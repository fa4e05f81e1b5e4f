"""Attention on the tensors of a process group: `torch.autograd`, modules, sharding, Hugging Face."""
