"""The command `doctor`, and the checks that it makes of a machine, its software and a storage."""
