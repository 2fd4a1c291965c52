"""The memory that states are copied into, and the copies; knows no names and no plan."""
