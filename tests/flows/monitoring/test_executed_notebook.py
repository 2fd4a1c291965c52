"""A training in a cell of a real notebook: its kernel is a process, and its outputs are what a page shows."""

import re
import xml.etree.ElementTree as ET

import nbformat
import pytest
from forked_programs import Popen
from nbclient import NotebookClient
from prefect.settings import PREFECT_API_URL

CELLS = [
    """
from prefect_torch.ckpt import report
from prefect_torch.flows import CheckpointConfig, RunConfig, train

def train_fn():
    for epoch in range(4):
        report({"val_loss": 1 / (epoch + 1)}, state={"epoch": epoch}, progress=(epoch + 1) / 4)

kept = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
result = train(train_fn, run=RunConfig(name="digits", storage="./checkpoints"), checkpoint=kept)
""",
    "result",
    "result.checkpoint",
]


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Run the cells, and return the HTML that is shown below each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PREFECT_API_URL", PREFECT_API_URL.value())
        patched.setenv("IPYTHONDIR", str(folder / "ipython"))
        patched.setattr("jupyter_client.launcher.Popen", Popen)
        NotebookClient(notebook, kernel_name="python3", timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return [[it.data["text/html"] for it in cell.outputs if "text/html" in it.get("data", {})] for cell in notebook.cells]


def test_the_cell_of_a_training_has_a_bar_that_came_to_its_end(cells):
    (progress,) = [html for html in cells[0] if 'class="prefect-torch"' in html]
    root = ET.fromstring(progress)
    assert root.find(".//progress").get("value") == "1.0000"
    head, metrics, checkpoint, ended = ["".join(line.itertext()) for line in root]
    assert re.match(r"digits +100% · step 3 · 4 reports · ", head)
    assert metrics == "val_loss 0.25"
    assert re.match(r"checkpoint 000001-00000003-\w{8}  step 3 .*\(4 committed", checkpoint)
    assert ended == "attempt 1 completed"


def test_a_result_is_its_curve_its_kept_checkpoints_and_the_lines_that_load_one(cells):
    (html,) = cells[1]
    assert "completed, 1 attempt, 4 reports up to step 3" in html
    assert "<svg" in html
    assert re.findall(r"000001-(0000000\d)-\w{8}</", html) == ["00000003", "00000002"]
    assert "best_checkpoints[0]" in html


def test_a_checkpoint_is_a_table_of_what_its_manifest_says(cells):
    (html,) = cells[2]
    rows = [["".join(cell.itertext()) for cell in row] for row in ET.fromstring(html)]
    assert re.search(r"/checkpoints/digits/checkpoints/000001-00000003-\w{8}$", rows[0][1])
    assert rows[1:4] == [["step", "3"], ["attempt", "1"], ["val_loss", "0.25"]]
    assert [name for name, _ in rows[4:]] == ["size"]
