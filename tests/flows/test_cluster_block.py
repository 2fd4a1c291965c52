"""Clusters as saved blocks."""

import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.filesystems import LocalFileSystem
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from prefect_torch.flows import (
    DaskCluster,
    Hosts,
    KubernetesCluster,
    NotEnoughMachinesError,
    RayCluster,
    RunConfig,
    ScalingConfig,
    SlurmCluster,
    TorchCluster,
    train,
)
from prefect_torch.flows.arguments import machines_for
from prefect_torch.tasks.gang.engines.choice import KINDS
from prefect_torch.tasks.gang.engines.cluster_block import load_cluster
from pydantic import ValidationError

CLUSTERS = [
    Hosts(["a", "b"], command="ssh -p 2222 {host}", environment={"NAME": "value"}),
    RayCluster(address="ray://head:10001", resources_per_worker={"GPU": 1}),
    SlurmCluster(partition="gpu", gpus_per_node=8, srun_arguments=["--time=2:00:00"]),
    DaskCluster(address="tcp://head:8786", ranks_per_worker=2),
    KubernetesCluster(image="own/image:1", limits={"nvidia.com/gpu": "8"}),
]


@pytest.fixture
def name():
    return f"cluster-{uuid.uuid4().hex[:8]}"


def test_every_kind_of_cluster_is_here():
    assert {type(cluster) for cluster in CLUSTERS} == set(KINDS.values())


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.kind)
def test_a_cluster_is_saved_and_named_by_trainings(name, cluster):
    TorchCluster(cluster=cluster).save(name)
    assert TorchCluster.load(name).cluster == cluster
    scaling = ScalingConfig.model_validate_json(ScalingConfig(cluster=f"torch-cluster/{name}").model_dump_json())
    assert scaling.cluster == f"torch-cluster/{name}"
    assert load_cluster(scaling.cluster) == cluster
    assert ScalingConfig(cluster=TorchCluster.load(name)).cluster == cluster


def test_a_saved_cluster_has_only_the_fields_that_were_given(name):
    """An older version refuses others."""
    block_id = TorchCluster(cluster=SlurmCluster(partition="gpu")).save(name)
    with get_client(sync_client=True) as client:
        stored = client.read_block_document(block_id).data
    assert stored == {"cluster": {"kind": "slurm", "partition": "gpu"}}


def test_a_training_takes_its_machines_from_the_saved_cluster(name, tmp_path, caplog):
    TorchCluster(cluster=Hosts(["gone"], command="exit 7 #", leader_address="127.0.0.1", wait_s=0)).save(name)
    scaling = ScalingConfig(cluster=f"torch-cluster/{name}")
    failure = {"max_infrastructure_failures": 1}
    with pytest.raises(NotEnoughMachinesError, match="gone: its command ended with 7"):
        train("trainings:train_epochs", {"epochs": 1}, scaling, RunConfig(storage=str(tmp_path)), failure=failure)
    assert (
        "gone: its command ended with 7; give num_workers=(fewest, most), or give the cluster a longer wait_s; "
        "restart 1 of 1 (max_infrastructure_failures); the training starts again" in caplog.text
    )


def test_a_name_without_a_block_is_refused():
    with pytest.raises(
        ValueError, match=r"there is no block 'torch-cluster/none': save one with TorchCluster\(cluster=\.\.\.\)"
    ):
        machines_for(ScalingConfig(cluster="torch-cluster/none"))
    with pytest.raises(ValidationError, match="give a cluster, or torch-cluster/NAME of a saved block"):
        ScalingConfig(cluster="slurm")


class TestTorchCluster(BlockStandardTestSuite):
    """What Prefect asks of the blocks of every integration."""

    @pytest.fixture
    def block(self):
        return TorchCluster

    def test_has_a_valid_image(self, block):
        """The picture is Prefect's own, which its suite would fetch from the internet."""
        assert block._logo_url == LocalFileSystem._logo_url
