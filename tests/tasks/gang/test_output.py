import io
import os
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.tasks.gang.processes.output import OutputLines
from prefect_torch.tasks.rank.main import _write_utf8
from tqdm import tqdm


def lines_of(*chunks: bytes, every_s: float = 0.0) -> list[str]:
    output = OutputLines()
    lines = [line for number, chunk in enumerate(chunks) for line in output.feed(chunk, number * every_s)]
    return lines + output.feed(b"", len(chunks) * every_s, final=True)


class Terminal(io.StringIO):
    """Keeps each refresh of a bar apart."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[bytes] = []

    def write(self, text: str) -> int:
        self.chunks.append(text.encode())
        return len(text)


def bar(terminal: Terminal, num: int, **options: object) -> "tqdm[int]":
    return tqdm(range(num), file=terminal, mininterval=0, miniters=1, ascii=True, bar_format="{desc}{n}/{total}", **options)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"a\nb", ["a", "b"]),
        (b"20%\r\nnext\r\n", ["20%", "next"]),
        (b"10%\r20%\r", ["20%"]),
        (b"\r10%\r20%\n", ["20%"]),
        (b"", []),
        (b"\n\n \n\t\r\n", []),
        (b"  indented \n", ["  indented "]),
        (b"bar\r   \r\nnext\n", ["next"]),
        (b"\x1b[?25l\x1b[2Kone\x1b[0K\x1b7\n\x1b[1;31mred\x1b[0m\n\x1b[?25h", ["one", "\x1b[1;31mred\x1b[0m"]),
        (b"\xff\xfe tail", ["\ufffd\ufffd tail"]),
        (b"x" * 20_000 + b"\ny", ["x" * 8192, "x" * 8192, "x" * 3616, "y"]),
        (b"x" * 20_000, ["x" * 8192, "x" * 8192, "x" * 3616]),
        (b"an unfinished escape \x1b[", ["an unfinished escape \x1b["]),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_output_becomes_the_lines_that_a_terminal_would_be_left_with(text, lines, size):
    assert lines_of(*(text[start : start + size] for start in range(0, len(text), size))) == lines


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n\x1b", exclude_categories=["Cs"]), max_size=20)), st.integers(1, 9)
)
def test_text_without_controls_comes_through_whole_however_it_is_cut(lines, size):
    data = "\n".join(lines).encode()
    assert lines_of(*(data[start : start + size] for start in range(0, len(data), size))) == [li for li in lines if li.strip()]


def test_a_bar_leaves_one_line():
    terminal = Terminal()
    for _ in bar(terminal, 500):
        pass
    assert len(terminal.chunks) > 500
    assert lines_of(*terminal.chunks, b"after\n") == ["500/500", "after"]


def test_a_bar_that_removes_itself_leaves_none():
    terminal = Terminal()
    for _ in bar(terminal, 500, leave=False):
        pass
    assert lines_of(*terminal.chunks, b"after\n") == ["after"]


def test_a_bar_that_goes_on_is_told_of_every_ten_seconds():
    terminal = Terminal()
    for _ in bar(terminal, 500):
        pass
    lines = lines_of(*terminal.chunks, every_s=0.1)
    assert 5 <= len(lines) <= 12
    assert lines[-1] == "500/500"
    assert lines == sorted(set(lines), key=lambda line: int(line.split("/")[0]))


def test_the_last_text_of_a_bar_that_stands_still_is_told_once():
    output = OutputLines()
    assert output.feed(b"\r 1%\r 2%", 0.0) == []
    assert [output.feed(b"", now_s) for now_s in (5.0, 10.0, 15.0, 60.0)] == [[], [" 2%"], [], []]
    assert output.feed(b"\n", 61.0) == []


def test_lines_that_are_written_above_a_bar_are_all_told():
    terminal = Terminal()
    for number in bar(terminal, 20):
        tqdm.write(f"line {number}", file=terminal)
    assert lines_of(*terminal.chunks) == [*(f"line {number}" for number in range(20)), "20/20"]


@pytest.mark.parametrize("leave", [True, False])
def test_bars_below_each_other_leave_few_lines_and_hide_none(leave):
    terminal = Terminal()
    for epoch in bar(terminal, 3, desc="outer "):
        for _ in bar(terminal, 200, desc="inner ", position=1, leave=leave):
            pass
        terminal.write(f"epoch {epoch} done\n")
    lines = lines_of(*terminal.chunks)
    assert len(terminal.chunks) > 600
    assert len(lines) < 15
    assert [line[-12:] for line in lines if "done" in line] == [f"epoch {epoch} done" for epoch in range(3)]


def test_a_cursor_movement_of_any_length_is_one():
    assert lines_of(b"\x1b[" + b"1" * 5000 + b"Aabove\r\nbelow\n") == ["above", "below"]


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_a_rank_prints_any_text_in_any_locale(monkeypatch, tmp_path, encoding):
    """Also where the stream was made for a file and is a pipe now, as in a forked rank."""
    reads, writes = os.pipe()
    with ExitStack() as opened:
        for name in ("stdout", "stderr"):
            raw = opened.enter_context((tmp_path / name).open("wb", 0))
            stream = io.TextIOWrapper(raw, encoding, write_through=True)
            for known_as in (name, f"__{name}__"):
                monkeypatch.setattr(sys, known_as, stream)
            os.dup2(writes, raw.fileno())
        os.close(writes)
        _write_utf8()
        print("é 世界")
        print("ü", file=sys.stderr)
        if encoding != "utf-8":
            print("\udcff")
    assert os.read(reads, 100).decode() == "é 世界\nü\n" + ("\\udcff\n" if encoding != "utf-8" else "")
    os.close(reads)
