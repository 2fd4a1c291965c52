"""The output of a process as lines for a log; a progress bar that rewrites its line becomes a line every ten seconds."""

import codecs
import re

_MAX_LINE = 8192  # characters; a longer one is split, since a log record has a limit
_REFRESH_S = 10.0  # between two log lines of a line that is rewritten
# Cursor movements and erasures (ECMA-48); colours, which end with "m", are text.
_CONTROL = re.compile(r"\r|\n|\x1b\[(\d{0,4})A|\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b[78]")
_CUT_CONTROL = re.compile(r"\x1b(\[[0-?]{0,16})?\Z")


class OutputLines:
    """Splits output into lines as a terminal would show them, without empty ones.

    A carriage return starts the line again, so that only its last text counts; while it is rewritten, its newest text becomes
    a line every ten seconds. Bars below each other (tqdm's `position`) go down by line feeds and up by a cursor movement: those
    line feeds end no line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""  # perhaps a part of a control sequence
        self._text = ""  # of this line, since its last carriage return
        self._is_rewritten = False  # whether this line had a carriage return
        self._bar = ""  # the last text that was rewritten
        self._is_bar_elsewhere = False  # in a line below or above
        self._num_below = 0  # lines below this one
        self._passed_on = ""  # the last text of the bar that was logged
        self._refresh_s: float | None = None  # since when no text of the bar was logged

    def feed(self, data: bytes, now_s: float, *, final: bool = False) -> list[str]:
        """Return the lines that `data` completes, and a rewritten line that is due; all that is left if `final`."""
        output = self._rest + self._decoder.decode(data, final)
        cut = None if final else _CUT_CONTROL.search(output)
        end = len(output) if cut is None else cut.start()
        lines, place = [], 0
        for control in _CONTROL.finditer(output, 0, end):
            lines += self._write(output[place : control.start()])
            lines += self._move(control, now_s)
            place = control.end()
        lines += self._write(output[place:end])
        self._rest = output[end:]
        return lines + (self._end_line() if final else self._due(now_s))

    def _write(self, text: str) -> list[str]:
        """Append to the line, and return the parts that exceed the limit."""
        self._text += text
        num_cut = max(0, len(self._text) - 1) // _MAX_LINE * _MAX_LINE
        cut, self._text = self._text[:num_cut], self._text[num_cut:]
        return [cut[start : start + _MAX_LINE] for start in range(0, num_cut, _MAX_LINE)]

    def _move(self, control: re.Match[str], now_s: float) -> list[str]:
        if control[0] == "\n":
            if not self._num_below or (self._text and not self._is_rewritten):
                return self._end_line()
            self._num_below -= 1
        elif control[0].endswith("A"):
            self._num_below += int(control[1] or 1)
        elif control[0] != "\r":
            return []
        if self._refresh_s is None:
            self._refresh_s = now_s
        if self._text:
            self._bar, self._is_bar_elsewhere = self._text.rstrip(), False  # blanks erase a bar
        self._is_bar_elsewhere |= control[0] != "\r"
        self._is_rewritten = control[0] == "\r"
        self._text = ""
        return []

    def _end_line(self) -> list[str]:
        left = [self._text] if self._text.strip() else []
        if self._bar and (self._is_bar_elsewhere or not self._text):
            left.insert(0, self._bar)
        lines = [line for line in left if line != self._passed_on]
        self._text, self._bar, self._passed_on = "", "", ""
        self._is_rewritten = self._is_bar_elsewhere = False
        self._refresh_s = None
        return lines

    def _due(self, now_s: float) -> list[str]:
        """Return the newest text of a line that is rewritten, if the last one was logged long ago."""
        if self._refresh_s is None or now_s - self._refresh_s < _REFRESH_S:
            return []
        newest = self._text if self._is_rewritten and self._text.strip() else self._bar
        if not newest or newest == self._passed_on:
            return []
        self._passed_on, self._refresh_s = newest, now_s
        return [newest]
