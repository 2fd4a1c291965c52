"""Batches on their way to a GPU."""

import pytest
import torch
from prefect_torch.tasks import prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.gpus(1)
DATA = TensorDataset(torch.arange(64 * 4096, dtype=torch.float32).reshape(64, 4096))


def compute(batch, times=30):
    for _ in range(times):
        batch = batch * 1.0
    return batch


def test_no_step_waits_for_the_gpu():
    loader = prepare_data_loader(DataLoader(DATA, batch_size=8, pin_memory=True))
    list(loader)  # makes the stream and the first pinned memory
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = [compute(batch).sum() for (batch,) in loader]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [DATA[start : start + 8][0].double().sum().item() for start in range(0, 64, 8)]
    assert [total.item() for total in sums] == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_and_nested_batches_arrive():
    dense = [torch.eye(64) * number for number in range(1, 5)]
    kinds = [
        *(torch.sparse_coo, torch.sparse_csr, torch.sparse_csc),
        *((layout, (8, 8)) for layout in (torch.sparse_bsr, torch.sparse_bsc)),
    ]
    for kind in kinds:
        layout, blocksize = kind if isinstance(kind, tuple) else (kind, None)
        given = [tensor.to_sparse(layout=layout, blocksize=blocksize) for tensor in dense]
        loader = prepare_data_loader(DataLoader(given, batch_size=None))
        assert [torch.equal(batch.to_dense().cpu(), tensor) for batch, tensor in zip(loader, dense, strict=True)] == [True] * 4
    for layout in (torch.strided, torch.jagged):
        nested = [torch.nested.nested_tensor([tensor[0], tensor[0, :7]], layout=layout) for tensor in dense]
        loader = prepare_data_loader(DataLoader(nested, batch_size=None))
        assert [batch.unbind()[1][0].item() for batch in loader] == [1, 2, 3, 4]


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_default_device_of_torch_does_not_stop_a_loader(shuffle, resumable):
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=shuffle, generator=torch.Generator("cuda"))
    loader = prepare_data_loader(loader, resumable=resumable)
    with torch.device("cuda"):
        assert sorted(item for (batch,) in loader for item in batch.tolist()) == list(range(8))


def test_memory_is_the_same_after_40_epochs():
    loader = prepare_data_loader(DataLoader(DATA, batch_size=8, pin_memory=True))
    reserved = []
    for _ in range(40):
        for (batch,) in loader:
            compute(batch)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


def test_copies_go_on_beside_the_computation(figure, timed):
    data = TensorDataset(torch.randn(40, 4 << 20))  # 16 MiB each
    pinned = [batch.pin_memory() for (batch,) in DataLoader(data, batch_size=1)]
    matrix = torch.randn(4096, 4096, device="cuda")
    compute_on = [batch.cuda() for batch in pinned]

    def work(batches):
        for batch in batches:
            (matrix @ matrix) @ matrix
            batch.sum()

    work(compute_on)
    with timed("computation alone") as alone:
        work(compute_on)
    with timed("copies alone") as copies:
        [batch.to("cuda", non_blocking=True) for batch in pinned]
    loader = prepare_data_loader(DataLoader(data, batch_size=1, pin_memory=True, num_workers=2, persistent_workers=True))
    for _ in range(2):
        with timed("an epoch of a prepared loader"):
            work(batch for (batch,) in loader)
    figure("hidden at best", min(alone["s"], copies["s"]), "s")
