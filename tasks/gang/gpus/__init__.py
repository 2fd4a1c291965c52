"""The GPUs of a machine, each of which one training or evaluation at a time has for itself."""
