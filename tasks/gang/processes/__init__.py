"""Ranks as processes of this machine: their start, by a fork or a command, their output, and the results that they leave."""
