"""The message of an exception is one line while Prefect makes a state of it, and whole before and after."""

import pickle
import sys
import traceback

import pytest
from prefect_torch.tasks.rank.one_line_messages import restore_message, shorten_message


class OwnTextError(Exception):
    def __str__(self):
        return "text of\nits own"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 tracebacks show no notes")
@pytest.mark.parametrize("kind", [ValueError, RuntimeError, OSError])
@pytest.mark.parametrize("is_sent", [False, True])
def test_later_lines_are_a_note_until_the_message_is_whole_again(kind, is_sent):
    error = kind("first\nsecond\n  third")
    before = traceback.format_exception_only(error)
    assert shorten_message(error) is error
    assert str(error) == "first"
    assert "".join(traceback.format_exception_only(error)) == "".join(before)
    error = pickle.loads(pickle.dumps(error)) if is_sent else error
    assert "".join(traceback.format_exception_only(error)) == "".join(before)
    restore_message(error)
    assert (str(error), error.__dict__) == ("first\nsecond\n  third", {})


@pytest.mark.parametrize(
    "error",
    [ValueError("one line"), ValueError(), ValueError("a\nb", "c\nd"), KeyError("a\nb"), ValueError(7)],
)
def test_other_exceptions_stay_as_they_are(error):
    before = (str(error), error.args)
    shorten_message(error)
    assert ((str(error), error.args), error.__dict__) == (before, {})
    restore_message(error)
    assert ((str(error), error.args), error.__dict__) == (before, {})


def test_a_class_that_makes_its_own_text_is_stood_in_for_by_one_of_its_name():
    error = OwnTextError("a\nb")
    short = shorten_message(error)
    assert traceback.format_exception_only(short) == [f"{__name__}.OwnTextError: text of\n"]
    short.__cause__ = cause = ValueError("its cause")
    assert restore_message(short) is error
    assert error.__cause__ is cause
    sent = pickle.loads(pickle.dumps(short))
    assert type(sent) is OwnTextError
    assert restore_message(sent) is sent
