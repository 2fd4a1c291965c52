"""How many files and sockets this process may have open: more ranks than the usual limit of 1,024 suffices for."""

import errno
import resource

# Trainings of two ranks on S3 need 36 to 48; with fewer, code that needs one more may wait for it forever.
_FEWEST = 64
_OWN = 128
_OF_RANK = 9  # its connection to the store, and what the only rank of a machine needs besides: links, pipes, its task run's end


def allow_open_files(fewest_ranks: int, most_ranks: int) -> None:
    """Raise this process's limit of open files to what its ranks need, as far as the hard limit lets it; never lower it.

    Without that, the last ranks to connect are dropped, which looks as if a firewall separated them.

    Args:
        fewest_ranks: The number of ranks with which the training can start.
        most_ranks: The number of ranks that it may have.

    Raises:
        OSError: EMFILE if the limit is too low for the fewest ranks, so that a training would hang.

    """
    needed = _OWN + _OF_RANK * most_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < max(_FEWEST, fewest_ranks):
        raise OSError(
            errno.EMFILE,
            f"this process may have {soft} files and sockets open, too few for a training of {fewest_ranks} ranks: "
            f"raise its hard limit, ulimit -Hn {_OWN + _OF_RANK * fewest_ranks}",
        )
