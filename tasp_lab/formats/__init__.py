"""Schedules in the formats of other engines: MSCCL XML both ways; MSCCL++ plans, Chakra traces and NCCL's files out."""
