"""The resources of a rank: its accelerator, its share of the CPUs, and the kernel's limits on memory."""
