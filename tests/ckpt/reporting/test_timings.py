"""What a commit says that it cost."""

from types import SimpleNamespace

import pytest
from prefect_torch.ckpt.reporting.commit import _timings
from prefect_torch.ckpt.reporting.rank_part import RankPart


@pytest.mark.parametrize(
    ("stalls_s", "stall_s"), [((0.1, 0.4), 0.4), ((0.4, 0.1), 0.4), ((None, 0.1), 5.0), ((None, None), 5.0)]
)
def test_a_commit_costs_what_its_slowest_rank_has_waited(stalls_s, stall_s):
    """A rank that waits for the commit has waited until the manifest: 4 s until all was stored, and 1 s since."""
    parts = [RankPart([], None, waited_s, stored_s) for waited_s, stored_s in zip(stalls_s, (4.0, 2.0), strict=True)]
    staged = SimpleNamespace(elapsed_s=lambda: 3.5)
    assert _timings(staged, parts, 2.5) == {"stall_s": stall_s, "durable_s": 5.0}
