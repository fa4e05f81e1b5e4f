"""What ``tasp-lab gpu-check`` measures and checks on the ranks of a process group."""
