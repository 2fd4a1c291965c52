"""Pictures of curves: valid SVG of bounded size, whatever was reported."""

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.flows.monitoring.pages.attempt_log import BEGINNING, END
from prefect_torch.flows.monitoring.pages.drawing import curves as module
from prefect_torch.flows.monitoring.pages.drawing.axis import step_axis, value_axis
from prefect_torch.flows.monitoring.pages.drawing.chart import MAX_PANELS, draw_curves, draw_time
from prefect_torch.flows.monitoring.pages.drawing.curves import MAX_CURVES, MAX_POINTS, Curve, Curves, thin
from prefect_torch.flows.monitoring.pages.goodput import TimeSpent
from run_stories import record

SVG = "{http://www.w3.org/2000/svg}"
MOST_HELD = 8 * 4 * MAX_POINTS + 20 * MAX_POINTS  # of the newest attempts, and of all before


def curves_of(**metrics):
    curves = Curves()
    for step in range(max(len(values) for values in metrics.values())):
        curves.add(record(1, step, **{name: values[step] for name, values in metrics.items() if step < len(values)}))
    return curves.sorted(None)


def drawn(curves, until=None, begun=None):
    picture = draw_curves(curves, until or {1: END}, begun or {1: 0})
    return None if picture is None else ET.fromstring(picture)


def words(picture):
    return ["".join(text.itertext()).strip() for text in picture.iter(f"{SVG}text")]


def lines(picture):
    return [line.get("points").split() for line in picture.iter(f"{SVG}polyline")]


def test_each_metric_has_a_panel_with_its_name_last_value_and_ticks():
    picture = drawn(curves_of(loss=[4.0, 2.0, 1.0], **{"<b>&\x1b\ud83d": [1, 2, 3]}))
    assert {"loss", "1", "<b>&\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}", "3"} <= set(words(picture))
    assert {"0", "1", "2"} <= set(words(picture))
    assert [len(line) for line in lines(picture)] == [3, 3]


@pytest.mark.parametrize("values", [[1e-7, -9.9999e-06], [1e-8, math.nan, 1e-5, 1.0, 0.0012346], [1, 10**30]])
@pytest.mark.parametrize("num_panels", [1, 2])
def test_a_long_name_is_clear_of_the_value_after_it(values, num_panels):
    names = ["validation/cross_entropy_of_the_first_group", "validation/cross_entropy_of_the_second_group"][:num_panels]
    picture = drawn(curves_of(**dict.fromkeys(names, values)))
    letter, note = 7.8, 6.2  # mean widths, as Chromium draws a title and its notes
    titles = [text for text in picture.iter(f"{SVG}text") if text.get("font-size") == "13"]
    for name, value in zip(titles[::2], titles[1::2], strict=True):
        width = letter * len(name.text) + sum(note * len(part.text or "") for part in name)
        assert float(name.get("x")) + width <= float(value.get("x")) - letter * len(value.text)
        assert name.text.startswith("validatio")


def test_a_line_of_very_many_reports_keeps_its_spikes_and_few_points():
    values = [math.sin(step / 500) for step in range(20_000)]
    values[7_777], values[12_345] = 50.0, -50.0
    [curve] = curves_of(loss=values)
    points = curve.kept({1: END})
    assert len(points) <= MAX_POINTS
    assert {(7_777, 50.0), (12_345, -50.0)} <= set(points)
    assert points[-1][0] == 19_999
    assert len(curve.points[1]) <= 4 * MAX_POINTS


def test_a_line_of_very_many_attempts_keeps_its_spikes_few_points_and_what_the_newest_have_lost():
    """Each attempt held up to 800 points of each metric: gigabytes in the leader of a run with a thousand attempts."""
    curves, resumed = Curves(), {}
    for attempt in range(1, 101):
        for step in range((attempt - 1) * 400, attempt * 400 + 100):  # each loses 100 reports
            curves.add(record(attempt, step, loss=50.0 if step == 7_777 else math.sin(step / 500)))
        resumed[attempt] = (attempt, attempt * 400 - 1)
    [curve] = curves.sorted(None)
    assert len(curve.older) + sum(map(len, curve.points.values())) <= MOST_HELD
    points = curve.kept(resumed)
    assert (7_777, 50.0) in points
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert all(len(line) > MAX_POINTS // 5 for line in curve.lost(resumed, 6))


def test_a_value_that_one_of_very_many_attempts_has_lost_takes_no_place_of_the_best_that_was_kept():
    curves, resumed = Curves(), {}
    for attempt in range(1, 101):
        for step in range((attempt - 1) * 400, attempt * 400 + 100):
            is_lost = step >= attempt * 400
            curves.add(record(attempt, step, loss=0.0 if is_lost else 0.5 if step == 3_999 else 1.0))
        resumed[attempt] = (attempt, attempt * 400 - 1)
    [curve] = curves.sorted(None)
    assert curve.best(resumed, "min") == (3_999, 0.5)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_attempts_without_end_cost_the_same_each_and_hold_no_more(monkeypatch, is_resumed):
    """From the 1,001st on, each looked at those of all before: half a year of hourly trainings took minutes at each start."""
    looked_at, plain = [], module.thin
    monkeypatch.setattr(module, "thin", lambda points, most: looked_at.append(len(points)) or plain(points, most))
    curve = Curve("loss")
    for attempt in range(1, 4001):
        for step in range(4):
            curve.add(attempt, 4 * attempt + step if is_resumed else step, float(attempt), 4 * attempt + step)
    assert len(curve.older) + sum(map(len, curve.points.values())) <= MOST_HELD
    assert len(curve.begins) <= MOST_HELD
    assert sum(looked_at) <= 3 * 4 * 4000
    points = curve.kept(dict.fromkeys(range(1, 4001), END))
    assert min(value for _, value in points) == 1.0
    assert max(value for _, value in points) == 4000.0


def test_what_all_but_the_newest_of_very_many_fresh_starts_have_lost_takes_little_room():
    curve = Curve("loss")
    for attempt in range(1, 2001):
        for step in range(4):
            curve.add(attempt, step, float(attempt), step)
    resumed = dict.fromkeys(range(1, 2000), BEGINNING) | {2000: END}
    assert curve.kept(resumed) == [(step, 2000.0) for step in range(4)]
    assert curve.lost(resumed, 2) == [[(step, float(attempt)) for step in range(4)] for attempt in (1998, 1999)]


def test_only_what_is_drawn_of_very_many_metrics_is_prepared(monkeypatch):
    prepared, kept = [], Curve.kept
    monkeypatch.setattr(Curve, "kept", lambda curve, resumed: prepared.append(curve.name) or kept(curve, resumed))
    picture = drawn(curves_of(text=["a"], **{f"loss-{number}": [1.0, 2.0] for number in range(MAX_CURVES - 1)}))
    assert len(lines(picture)) == MAX_PANELS
    assert len(prepared) == MAX_PANELS + 1  # the first has no number


def test_what_is_not_finite_is_left_out_and_counted():
    picture = drawn(curves_of(loss=[1.0, math.nan, math.inf, 2.0, -math.inf, 10**400, True, None, "text", 3.0]))
    assert [len(line) for line in lines(picture)] == [3]
    assert any("4 not finite" in text for text in words(picture))


def test_nothing_is_drawn_without_a_number():
    assert drawn(curves_of(name=["a", "b"], loss=[math.nan])) is None
    assert drawn([]) is None


def test_attempts_have_boundaries_and_what_was_lost_is_pale():
    curves = Curves()
    for step in range(10):
        curves.add(record(1, step, loss=1.0 - step / 10))
    for step in range(7, 12):
        curves.add(record(2, step, loss=1.0 - step / 9))
    picture = drawn(curves.sorted(None), {1: (1, 6), 2: END}, {1: 0, 2: 7})
    lost, kept = picture.findall(f"{SVG}polyline")
    assert (len(lost.get("points").split()), lost.get("stroke-opacity")) == (3, "0.35")
    assert (len(kept.get("points").split()), kept.get("stroke-opacity")) == (12, "1")
    assert [line.get("stroke-dasharray") for line in picture.iter(f"{SVG}line")].count("3 3") == 1
    assert "#2" in words(picture)


def test_the_best_of_the_score_is_marked_with_its_step_where_it_was_kept():
    curves = Curves()
    for attempt, step, loss in [(1, 0, 3.0), (1, 1, 2.0), (1, 2, 0.1), (2, 2, 1.0), (2, 3, 1.5)]:
        curves.add(record(attempt, step, loss=loss))
    (curve,) = curves.sorted("loss")
    points = {1: (1, 1), 2: END}  # the report of 0.1 was lost
    assert curve.best(points, "min") == (2, 1.0)
    assert curve.best(points, "max") == (0, 3.0)
    picture = ET.fromstring(draw_curves([curve], points, {1: 0, 2: 2}, {"loss": (2, 1.0)}))
    assert "best at 2" in words(picture)
    assert [circle.get("fill") for circle in picture.iter(f"{SVG}circle")].count("none") == 1


@pytest.mark.parametrize("value", [lambda x: 1 - x, lambda x: x, lambda x: math.exp(-5 * x), lambda x: (x - 0.3) ** 2])
def test_the_label_of_the_best_is_clear_of_the_line(value):
    (curve,) = curves_of(loss=[value(step / 100) for step in range(100)])
    picture = ET.fromstring(draw_curves([curve], {1: END}, {1: 0}, {"loss": curve.best({1: END}, "min")}))
    (label,) = (it for it in picture.iter(f"{SVG}text") if (it.text or "").startswith("best at"))
    start, baseline, width = float(label.get("x")), float(label.get("y")), 5.5 * len(label.text)
    left, right = (start - width, start) if label.get("text-anchor") == "end" else (start, start + width)
    (points,) = lines(picture)
    beside = [y for x, y in (map(float, point.split(",")) for point in points) if left <= x <= right]
    assert beside
    assert not [y for y in beside if baseline - 9 <= y <= baseline]


def test_more_metrics_than_fit_are_neither_drawn_nor_held():
    curves = Curves()
    curves.add(record(1, 0, **{f"m{number}": number for number in range(MAX_CURVES + 5)}))
    assert len(curves.sorted(None)) == MAX_CURVES
    assert len(curves.left_out) == 5
    assert curves.sorted("m7")[0].name == "m7"
    assert sum(text.startswith("m") for text in words(drawn(curves.sorted(None)))) == 8


def test_an_axis_is_logarithmic_only_where_that_helps():
    decay = [2.3 * math.exp(-step / 20) + 1e-3 for step in range(1000)]
    cosine = [1e-3 * (1 + math.cos(math.pi * step / 1000)) for step in range(1000)]
    assert value_axis(decay).is_log
    assert value_axis(decay).ticks == (0.001, 0.01, 0.1, 1.0)
    assert not value_axis(cosine).is_log
    assert not value_axis([*decay, -1.0]).is_log
    assert value_axis([step**-3 for step in range(1, 9)]).is_log  # few points
    assert value_axis([10 ** (-step / 10) for step in range(31)]).is_log
    assert value_axis([1.0] * 20 + [0.1] * 20 + [0.01] * 20).is_log
    assert not value_axis([step / 100 for step in range(1, 101)]).is_log  # a warmup
    assert not value_axis([1.0, 0.9, 1.1, 1.05, 0.95] * 10 + [0.01]).is_log  # one outlier
    assert value_axis([0.1, 0.3]).ticks == (0.1, 0.2, 0.3)
    assert all(tick == int(tick) for tick in step_axis(0, 3).ticks)


@pytest.mark.parametrize("first", [2**53, 10**17, 10**18 - 1])
def test_steps_that_floats_do_not_tell_apart_have_an_axis(first):
    for last in (first, first + 1):
        axis = step_axis(first, last)
        assert 0 <= axis.position(float(last)) <= 1
        assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


extreme = st.floats() | st.integers() | st.sampled_from([5e-324, 1e-300, 1e300, 1.7e308, 0.0, 1.0, 1.0 + 2e-16])


@given(st.lists(extreme, min_size=1, max_size=30))
def test_whatever_numbers_are_reported_the_picture_is_sound(values):
    picture = draw_curves(curves_of(loss=values), {1: END}, {1: 0})
    if picture is not None:
        ET.fromstring(picture)
        places = re.findall(r' (?:points|cx|cy|x1|y1|x|y)="([^"]*)"', picture)
        numbers = [float(number) for place in places for number in re.split("[ ,]", place)]
        assert all(-100 <= number <= 1000 for number in numbers)


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(-1e9, 1e9)), max_size=300), st.integers(4, 50))
def test_thinning_keeps_the_extremes_and_the_order(points, most):
    points = sorted(points, key=lambda point: point[0])
    kept = thin(points, most)
    assert len(kept) <= most
    if points:
        values, left = [value for _, value in points], [value for _, value in kept]
        assert (min(left), max(left)) == (min(values), max(values))
        assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_the_bar_of_time_is_divided_as_the_time_was():
    picture = ET.fromstring(draw_time(TimeSpent(60, 20, 15, 5, 1000).parts))
    widths = [float(part.get("width")) for part in picture.find(f"{SVG}g")]
    assert widths == pytest.approx([432, 144, 108, 36])
    assert words(picture)[0] == "training 1 min 00 s (60.0%)"
    assert draw_time(TimeSpent().parts) is None
