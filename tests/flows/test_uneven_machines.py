"""Frameworks on two ranks on one machine and one on another."""

import pytest
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import Hosts, RunConfig, ScalingConfig, train

pytestmark = pytest.mark.timeout(200)


def test_lightning_accelerate_and_fsdp2_count_the_ranks_that_exist(tmp_path):
    cluster = Hosts(["a", "b"], command="exec", ranks_per_host=2, leader_address="127.0.0.1", wait_s=0)
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    result = train("uneven_ranks:use_all", None, ScalingConfig(num_workers=3, cluster=cluster), run)
    told = result.return_value
    assert [rank["place"] for rank in told] == [[0, 0, 0, 2], [1, 0, 1, 2], [2, 1, 0, 1]]
    for framework in ("lightning", "accelerate"):
        assert sorted(sample for rank in told for sample in rank[framework]) == list(range(9)), framework
        assert [len(rank[framework]) for rank in told] == [3, 3, 3]
    assert [rank["process"] for rank in told] == [[0, 3, 0], [1, 3, 1], [2, 3, 0]]
    assert [rank["fsdp2"] for rank in told] == [[3, 2], [3, 2], [1, 2]]
    (manifest,) = CheckpointStore.open(run.storage, "run").list()
    assert manifest.world_size == 3
