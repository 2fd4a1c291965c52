"""The rows of the table of checkpoints; no server."""

from prefect_torch.flows.monitoring.pages.stored_checkpoints import MAX_ROWS, StoredCheckpoint, checkpoint_rows
from run_stories import checkpoint_id


def saved(step, /, **metrics):
    return StoredCheckpoint(checkpoint_id(1, step), step, metrics, 3 * 2**20, 1_800_000_000.0 + step)


def rows(checkpoints, kept, first=None):
    return checkpoint_rows(checkpoints, kept, first, 1_800_000_000.0 + 7200)


def test_a_row_tells_what_a_checkpoint_is_and_why_it_is_kept():
    found = rows(
        [saved(1, loss=0.5, acc=0.25), saved(2, loss=float("nan"))],
        {checkpoint_id(1, 1): ("best", "pinned")},
        "acc",
    )
    assert found[0]["kept because"] == "not kept; the next prune deletes it"
    assert found[0]["loss"] == "nan"
    assert found[1] == {
        "id": checkpoint_id(1, 1),
        "step": 1,
        "kept because": "best, pinned",
        "acc": "0.25",
        "size": "3.0 MiB",
        "age": "1 h",
        "loss": "0.5",
        "committed (UTC)": "2027-01-15 08:00:01",
    }
    assert list(found[1])[:4] == ["id", "step", "kept because", "acc"]


def test_a_metric_with_the_name_of_a_column_hides_no_column():
    (found,) = rows([saved(7, id=5, step=70000, size=3.5, age=9)], {}, "size")
    assert (found["id"], found["step"], found["size"], found["age"]) == (checkpoint_id(1, 7), 7, "3.0 MiB", "1 h")
    assert [found[f"metric {name}"] for name in ("id", "step", "size", "age")] == ["5", "70000", "3.5", "9"]
    assert list(found)[3] == "metric size"


def test_of_very_many_checkpoints_the_newest_and_those_with_a_reason_are_shown():
    many = [saved(step) for step in range(MAX_ROWS + 50)]
    found = rows(many, {it.id: ("all", "pinned") if it.step == 3 else ("all",) for it in many})
    assert [row["step"] for row in found] == [*range(MAX_ROWS + 49, 50, -1), 3]


def test_a_long_text_among_metrics_is_cut():
    (row,) = rows([saved(1, sample="x" * 10**6)], {})
    assert len(row["sample"]) < 200
