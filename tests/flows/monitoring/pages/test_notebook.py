"""What a notebook shows of results and checkpoints: one HTML element that fetches nothing, and breaks on nothing stored."""

import math
import xml.etree.ElementTree as ET

from prefect_torch.ckpt import Checkpoint
from prefect_torch.flows import Result
from prefect_torch.flows.monitoring.pages.notebook import curves_svg, first_step_of_attempts, kept_until, result_html
from run_stories import logged, record

HISTORY = [*(record(1, step, loss=1 / (step + 1)) for step in range(6)), *(record(2, step, loss=0.1) for step in range(4, 8))]
BEST = [("/place/run/checkpoints/000002-00000007-aaaaaaaa", {"loss": 0.1, "n": {"<b>": math.nan}})]


def result(**changes):
    fields = {"metrics": {}, "checkpoint": None, "best_checkpoints": [], "history": [], "path": "/place/run", "attempts": 1}
    return Result(**{**fields, **changes})


def test_a_result_has_curves_checkpoints_and_the_lines_that_load_one():
    html = result_html("/pl&ce/run", "completed", HISTORY, BEST)
    root = ET.fromstring(html)  # well-formed: what is stored is escaped
    assert root.find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert [cell.text for cell in root.findall(".//th")] == ["checkpoint", "loss", "n/<b>"]
    assert "Result.from_storage('/pl&ce', 'run').best_checkpoints[0]" in root.find(".//pre").text
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_what_was_trained_again_is_pale():
    assert first_step_of_attempts(HISTORY) == {1: 0, 2: 4}
    assert kept_until({1: 0, 2: 4, 3: 2}) == {1: (1, 1), 2: (2, 1), 3: (3, math.inf)}
    assert curves_svg(HISTORY).count("<polyline") == 2


def test_what_a_logger_records_by_its_own_steps_is_kept_with_the_report_after_it():
    history = [*(it for step in range(3) for it in (logged(1, 100 * step, train=step), record(1, step, loss=step)))]
    assert first_step_of_attempts(history) == {1: 0}
    assert first_step_of_attempts([*history, logged(2, 300, train=3)]) == {1: 0}
    again = [*history, logged(2, 300, train=3), logged(2, 350, train=3), logged(3, 300, train=3), record(3, 3, loss=3)]
    pale = [picture.count('stroke-opacity="0.35"') for picture in map(curves_svg, (history, again))]
    assert pale == [0, 1]  # attempt 2 made no report


def test_only_reports_are_counted():
    html = result(history=[record(1, 0, loss=1), logged(1, 500, lr=1)])._repr_html_()
    assert ", 1 report up to step 0</p>" in html


def test_a_result_without_numbers_and_one_that_failed_are_shown():
    assert "not completed, 1 attempt</p>" in result()._repr_html_()
    failed = result(error=RuntimeError("<one>\n\nTraceback\ntwo"), attempts=2, history=[record(2, 3, note="x")])._repr_html_()
    assert "failed, 2 attempts, 1 report up to step 3; &lt;one&gt;</p>" in failed
    assert "<svg" not in failed


def test_a_checkpoint_says_where_it_is_and_what_it_holds(tmp_path):
    (tmp_path / "a&b").mkdir()
    assert f">{tmp_path}/a&amp;b</td>" in Checkpoint(tmp_path / "a&b")._repr_html_()
    gone = Checkpoint(tmp_path / "run/checkpoints/000001-00000000-aaaaaaaa")._repr_html_()
    assert "not readable" in gone
    ET.fromstring(gone)
