import errno
import pickle

import pytest
from prefect_torch.ckpt import errors
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError

ALL = [value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", ALL)
def test_errors_pickle(kind):
    again = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(again) is kind
    assert str(again) == "what happened"
    assert isinstance(again, errors.CheckpointError)


@pytest.mark.parametrize(
    "kind", [errors.FencedError, errors.ReportMismatchError, errors.CommitFailedError, errors.PeerGoneError]
)
def test_an_error_for_all_ranks_keeps_its_kind(kind):
    assert type(RemoteError.of(kind("x")).exception()) is kind


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), errors.StorageError("503"), KeyError("x")])
def test_any_other_error_fails_the_commit(error):
    refused = RemoteError.of(error).exception()
    assert type(refused) is errors.CommitFailedError
    assert type(error).__name__ in str(refused)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_an_error_of_its_own(number):
    assert type(RemoteError.of(OSError(number, "no room")).exception()) is errors.StorageFullError


def test_errors_are_also_what_handlers_of_the_standard_library_expect():
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(errors.ReportMismatchError, ValueError)
