"""The pages that a process which is gone has left in Prefect's UI."""

from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect_torch.flows.monitoring.pages.head import as_lost, write_head
from prefect_torch.flows.monitoring.pages.left_pages import end_left_pages
from prefect_torch.flows.monitoring.pages.run_view import RunView
from prefect_torch.flows.monitoring.pages.setup import Setup
from prefect_torch.flows.monitoring.pages.summary import SummaryContext, write_summary
from prefect_torch.tasks.training.observers import AttemptStarted
from run_stories import BEGUN_S, claim

WHY = "Its process was killed."
OTHERS = ["# run\n\n**running** in words of one's own", "# run\n\n**completed** · attempt 1\n\nAs of now UTC · `/store`", ""]


def head(state, *facts, name="run"):
    return "\n".join(write_head(name, state, facts, "/store/run", BEGUN_S, "/store"))


def test_a_page_that_its_process_left_running_says_that_it_is_lost_and_how_far_it_got():
    left = head("running", "attempt 1", "step 133", "34% done", "about 3 min 14 s left", "goodput 44.2%", name="a | b")
    as_of = "As of 2027-01-15 08:00:00 UTC · `/store/run`"
    facts = "**lost** · attempt 1 · step 133 · 34% done · goodput 44.2%"
    assert as_lost(left, WHY) == f"# a \\| b\n\n{facts}\n\n{WHY}\n\n{as_of}"


def test_a_running_page_names_the_command_that_tells_whether_its_process_is_alive():
    assert "news; `prefect-torch show /store run` tells whether its process is alive · `/store/run`" in head("running")
    assert "prefect-torch show" not in head("completed")


@pytest.mark.parametrize("page", [head("completed", "attempt 1"), head("lost"), *OTHERS], ids=range(5))
def test_any_other_page_stays_as_it_is(page):
    assert as_lost(page, WHY) == page


def test_the_attempt_that_ran_is_lost_in_the_table_of_the_summary_too(store):
    view = RunView(store, None)
    view.record(AttemptStarted(claim(1), None), BEGUN_S)
    left = write_summary("run", view, SummaryContext("/store/run", setup=Setup("/store", None, "a CPU")), BEGUN_S)
    assert left.count("running") == 2
    ended = as_lost(left, WHY)
    assert "running" not in ended
    assert ended.count("lost |\n") == 1


def test_only_the_running_pages_of_the_given_flow_runs_are_ended(prefect_server):
    killed, alive = uuid4(), uuid4()
    with get_client(sync_client=True) as client:
        for flow_run_id in (killed, alive):
            for key, page in (("run-summary", head("running")), ("own", "# mine")):
                made = ArtifactCreate(key=key, type="markdown", description="of it", data=page, flow_run_id=flow_run_id)
                client.create_artifact(made)
        end_left_pages(client, [killed], WHY)
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[killed, alive]))
        found = {(it.flow_run_id, it.key): (it.data, it.description) for it in client.read_artifacts(artifact_filter=chosen)}
    assert found == {
        (killed, "run-summary"): (as_lost(head("running"), WHY), "of it"),
        (alive, "run-summary"): (head("running"), "of it"),
        **{(flow_run_id, "own"): ("# mine", "of it") for flow_run_id in (killed, alive)},
    }
