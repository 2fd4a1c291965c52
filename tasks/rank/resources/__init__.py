"""What a rank computes on: its accelerator, its share of the CPUs, and the kernel's limits on memory."""
