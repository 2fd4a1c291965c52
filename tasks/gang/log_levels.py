"""The level of a line that a rank has printed, if a logger wrote it."""

import logging
import re

# Such as "WARNING:root:text", "2026-01-31 23:59:59,000 - name - ERROR - text", "[INFO] text"; and of torch and glog, with
# or without a rank before it: "[rank0]:[W1122 20:41:00.123 file.cpp:1] text", "E1122 20:41:00.123 4711 file.py:1] text".
_NAMED = re.compile(
    r"^(?:\[[^]]*\]\s*){0,3}(?:\S*\d[:.,TZ+-]*\s+){0,3}(?:[-|:]\s+)?(?:[\w.]+\s+[-|:]\s+){0,2}"
    r"[\s\[(|:-]*(?P<level>DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b[\])]?[\s:|-]"
)
_LONGEST_PREFIX = 256  # of a line; a match may try a quadratic number of ways, in a lock that stops the whole process
_LETTER = re.compile(r"^(?:\[rank\d+\]:\s*)?\[?(?P<level>[DIWEF])\d{4} \d\d:\d\d:\d\d")
_TRACEBACK = re.compile(r"^(?:\[rank\d+\]:\s*)?(?:Traceback \(most recent call last\):|Fatal Python error: )")
LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_BY_LETTER = {**{name[0]: level for name, level in LEVELS.items()}, "C": logging.CRITICAL, "F": logging.CRITICAL}


class LineLevels:
    """Determines the levels of a rank's lines, one after the other."""

    def __init__(self) -> None:
        self._is_in_traceback = False

    def level_of(self, line: str) -> int:
        """Return the level that the next line begins with, ERROR within a traceback, else INFO."""
        if _TRACEBACK.match(line):
            self._is_in_traceback = True
            return logging.ERROR
        match = _NAMED.match(line[:_LONGEST_PREFIX]) or _LETTER.match(line)
        if match is not None:
            self._is_in_traceback = False
            return _BY_LETTER[match["level"][0]]
        if not self._is_in_traceback:
            return logging.INFO
        self._is_in_traceback = line.startswith((" ", "[rank"))  # the line of the exception itself is the last one
        return logging.ERROR
