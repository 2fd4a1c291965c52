"""What is told of an exception."""

import sys

import pytest
import torch
from prefect_torch.tasks.rank.tracebacks import message_line, user_traceback


def caught(code):
    try:
        exec(code)
    except BaseException as exc:  # noqa: BLE001 - any
        return exc
    raise AssertionError(code)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise ValueError('first\\nsecond')", "ValueError: first"),
        ("raise ValueError", "ValueError"),
        (
            "import json; raise json.JSONDecodeError('no value', '', 0)",
            "json.decoder.JSONDecodeError: no value: line 1 column 1 (char 0)",
        ),
        ("for", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("has_note", [False, True])
def test_it_is_the_type_and_the_first_line_of_the_message(code, line, has_note):
    error = caught(code)
    if has_note and sys.version_info >= (3, 11):
        error.add_note("while reading shard 7")
    assert message_line(error) == line


def test_a_function_that_the_compiler_leaves_out_has_no_frame_of_the_compiler():
    def fail():
        raise ValueError("too many")

    with pytest.raises(ValueError, match="too many") as raised:
        torch.compiler.disable(fail)()
    assert any("/torch/_dynamo/" in str(entry.path) for entry in raised.traceback)
    assert "/torch/" not in user_traceback(raised.value)
