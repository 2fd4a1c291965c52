"""Owners of an attempt, by the state that their process gives it while no outcome is recorded."""

from dataclasses import replace

from prefect_torch.ckpt.runs.attempts.owner import Owner

HERE = Owner.current()
OWNERS = {"running": HERE, "lost": replace(HERE, started=0), "unknown": replace(HERE, host="elsewhere/boot")}
