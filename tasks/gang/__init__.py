"""Starting, watching and stopping the ranks of an attempt."""
