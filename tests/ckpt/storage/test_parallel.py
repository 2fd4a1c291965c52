"""Items that are drawn by a thread while the caller works on those before."""

import threading
from itertools import islice

import pytest
from prefect_torch.ckpt.storage.parallel import drawn_ahead

PAGE = 3


class Source:
    """Yields numbers, and notes which thread drew each; fails before `fails_at`."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at = count, fails_at
        self.drawn_by = []
        self.has_drawn = threading.Semaphore(0)

    def __iter__(self):
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("no answer")
            self.drawn_by.append(threading.current_thread())
            self.has_drawn.release()
            yield number


@pytest.mark.parametrize("count", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 10 * PAGE + 1])
def test_every_item_comes_once_and_in_order(count):
    assert list(drawn_ahead(Source(count), PAGE)) == list(range(count))


def test_the_next_page_is_drawn_while_the_caller_works_on_one():
    source = Source(2 * PAGE)
    items = drawn_ahead(source, PAGE)
    assert next(items) == 0
    for _ in range(2 * PAGE):
        assert source.has_drawn.acquire(timeout=60)
    assert list(items) == list(range(1, 2 * PAGE))
    assert threading.current_thread() not in source.drawn_by[PAGE:]


def test_few_items_need_no_thread():
    source = Source(PAGE - 1)
    assert list(drawn_ahead(source, PAGE)) == [0, 1]
    assert set(source.drawn_by) == {threading.current_thread()}


@pytest.mark.parametrize("fails_at", [0, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_an_error_is_raised_after_the_whole_pages_before_it(fails_at):
    items = drawn_ahead(Source(4 * PAGE, fails_at), PAGE)
    whole = fails_at // PAGE * PAGE
    assert list(islice(items, whole)) == list(range(whole))
    with pytest.raises(OSError, match="no answer"):
        next(items)


def test_a_caller_that_stops_leaves_no_thread():
    before = threading.active_count()
    items = drawn_ahead(Source(10 * PAGE), PAGE)
    assert next(items) == 0
    items.close()
    assert threading.active_count() == before
