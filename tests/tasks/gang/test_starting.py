"""How many ranks an attempt has on the flow's machine."""

import pytest
from prefect_torch.tasks.gang import starting
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.options.config import ScalingConfig


@pytest.mark.parametrize(
    ("num_workers", "num_ranks"),
    [((2, 64), 8), ((2, 4), 4), ((16, 64), 16), (64, 64), (1, 1)],
)
def test_without_gpus_an_attempt_has_a_rank_for_each_cpu(monkeypatch, num_workers, num_ranks):
    monkeypatch.setattr(starting, "count_cpus", lambda: 8)
    assert starting.num_ranks_here(ScalingConfig(num_workers=num_workers), GpuAllocation(0, None, "a training")) == num_ranks
