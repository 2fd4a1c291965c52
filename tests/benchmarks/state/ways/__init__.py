"""The ways of checkpointing that are measured; each module has one class with `save`, `wait`, `forget`, `load`, `reload`.

save(number)   what the training calls; when it returns, the state may change
wait()         returns once another process would resume from that checkpoint, even after a power cut
forget()       deletes all checkpoints but the newest; not measured
load()         puts the newest checkpoint into a fresh state
reload()       the same again, with whatever the leader does before its ranks start
"""

from dataclasses import dataclass

ITSELF = "synced by itself"
BY_US = "not synced: `durable` holds an fsync of ours"


@dataclass(frozen=True)
class Way:
    """How a way is started, and what it promises.

    Attributes:
        module: Below `ways`.
        option: Which of the module's ways.
        gives: What is sure once it says that a checkpoint is done.
        needs_peers: Whether it runs in the peers' own environment.
        is_on_s3: Whether it can write there.
        starts_ranks: Whether it starts its ranks itself.
        joins_group: Whether it joins the ranks' process group itself.

    A way whose trainer starts ranks or joins them itself places them on devices itself, too: those are measured on CPUs only.
    """

    module: str
    option: str
    gives: str
    needs_peers: bool = True
    is_on_s3: bool = True
    starts_ranks: bool = False
    joins_group: bool = False

    @property
    def is_on_gpu(self):
        return not self.starts_ranks and not self.joins_group

    @property
    def is_ours(self):
        return self.module == "ours"


_OURS = f"{ITSELF}, files and folders; every byte verified by digest before a resume"
_DCP = f"{ITSELF}, the files; nothing verified"
_RAY = f"{BY_US}; nothing verified; done when the controller has written its list of checkpoints"

WAYS = {
    "ours: state, async": Way("ours", "state", _OURS, needs_peers=False),
    "ours: directory, sync": Way("ours", "sync", _OURS, needs_peers=False),
    "ours: directory, async": Way("ours", "async", _OURS, needs_peers=False),
    "torch.save + copy": Way("torch_save", "", f"{ITSELF}, file and folder; nothing verified", False, is_on_s3=False),
    "dcp.save": Way("dcp", "sync", _DCP),
    "dcp.async_save": Way("dcp", "async", _DCP),
    "dcp.async_save, reused": Way("dcp", "reused", _DCP),
    "Ray Train SYNC": Way("ray_train", "SYNC", _RAY, starts_ranks=True),
    "Ray Train ASYNC": Way("ray_train", "ASYNC", _RAY, starts_ranks=True),
    "Lightning": Way("lightning_trainer", "sync", f"{BY_US}; nothing verified", joins_group=True),
    "Lightning async": Way("lightning_trainer", "async", f"{BY_US}; nothing verified", joins_group=True),
}
STATE, RAY_SYNC, TORCH = "ours: state, async", "Ray Train SYNC", "torch.save + copy"
QUICK = [STATE]
