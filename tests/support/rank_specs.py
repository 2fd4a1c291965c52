"""The spec of a rank that is not started, or runs another program than a rank's."""

from prefect_torch.ckpt import StorageSpec
from prefect_torch.tasks.rank.rendezvous import Address
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.rank.user_code.function import PackedFunction


def rank_spec(**more):
    """Return the spec of a single rank, but for what is given."""
    usual = {
        "world_size": 1,
        "local_world_size": 1,
        "rendezvous": Address("127.0.0.1", 9),
        "storage": StorageSpec("/"),
        "run": "run",
        "attempt": 1,
        "restored": None,
        "function": PackedFunction("m:f", b"", (), "/", "f"),
        "use_gpu": False,
        "backend": None,
    }
    return RankSpec(**{**usual, **more})
