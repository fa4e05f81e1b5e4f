"""Communication libraries: how NCCL, RCCL and gloo turn a transfer of a schedule into messages."""
