import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.tasks.options.storage import configured_storage


@pytest.fixture
def site(monkeypatch, tmp_path):
    """A working folder in which this test's settings are the only ones."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_settings_a_storage_has_two_minutes(site):
    assert configured_storage("s3://bucket").retry == RetryPolicy(120, 0.2, 10)


def test_variables_are_heard(site, monkeypatch):
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_STORAGE_DEADLINE_S", "7")
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_STORAGE_LONGEST_WAIT_S", "3")
    assert configured_storage("s3://bucket").retry == RetryPolicy(7, 0.2, 3)


def test_prefect_toml_is_heard_and_a_variable_counts_more(site, monkeypatch):
    (site / "prefect.toml").write_text("[integrations.torch]\nstorage_deadline_s = 9\nstorage_first_wait_s = 1\n")
    assert configured_storage("s3://bucket").retry == RetryPolicy(9, 1, 10)
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_STORAGE_DEADLINE_S", "7")
    assert configured_storage("s3://bucket").retry == RetryPolicy(7, 1, 10)


def test_what_is_given_counts_most(site, monkeypatch):
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_STORAGE_DEADLINE_S", "7")
    assert configured_storage("s3://bucket", deadline_s=2).retry.deadline_s == 2
    spec = StorageSpec("s3://bucket", retry=RetryPolicy(1))
    assert configured_storage(spec) is spec


def test_a_setting_that_makes_no_sense_is_refused(site, monkeypatch):
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_STORAGE_DEADLINE_S", "-1")
    with pytest.raises(ValueError, match="storage_deadline_s"):
        configured_storage("s3://bucket")
