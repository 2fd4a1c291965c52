"""The flow `train` in a process whose leases are renewed every 3 s instead of every 225: limited_training.train."""

from prefect.concurrency import _leases
from prefect_torch.flows import train

__all__ = ["train"]
_leases._RENEWAL_FRACTION = 0.01  # of 300 s, which Prefect's engine leaves nobody a choice about
