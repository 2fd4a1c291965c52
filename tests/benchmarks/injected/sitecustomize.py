"""Loaded by every Python process that has this folder on its PYTHONPATH: watches it as its environment says."""

import file_faults

file_faults.arm_from_environment()
