"""Which partitions of a data set there are, and which of them a training reads.

A partition is a file or a folder whose path holds its number (its span, as TFX calls it) or its
date. The span of a date is the number of days since 1970-01-01, again as in TFX.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import takewhile
from pathlib import Path

from rowstep.components.data_errors import DataError, cut, nearest
from rowstep.configs import RunConfig
from rowstep.configs.schema import CsvSpans

__all__ = [
    "Partitions",
    "Window",
    "at_span",
    "choose_window",
    "csv_files",
    "find_partitions",
    "parse_span",
    "span_text",
]

_EPOCH = date(1970, 1, 1)
_TOKEN = re.compile(r"\{SPAN(?::(?P<width>\d+))?\}|\{YYYY\}|\{MM\}|\{DD\}|\*|\?")
_REGEX = {
    "{YYYY}": r"(?P<year>[0-9]{4})",
    "{MM}": r"(?P<month>[0-9]{2})",
    "{DD}": r"(?P<day>[0-9]{2})",
    "*": ".*",
    "?": ".",
}
_MANY = 5


def parse_span(text: str) -> int:
    """Return the span that a number or a date such as `2026-01-31` stands for.

    Raises:
        DataError: the text is neither, or a date before 1970-01-01.
    """
    try:
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            span = (date.fromisoformat(text) - _EPOCH).days
        else:
            span = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else -1
    except ValueError:  # February 30
        span = -1
    if span < 0:
        raise DataError(
            "--span: it must be the number of a partition, or a date from 1970-01-01 on. "
            f"Got {cut(text)}. Write, say, 17 or 2026-01-31."
        )
    return span


def at_span(config: RunConfig, span: int) -> RunConfig:
    """Return the config of the window that ends with a span; other data than spans has none."""
    if not isinstance(config.data, CsvSpans):
        return config
    data = config.data.model_copy(update={"span": span})
    return config.model_copy(update={"data": data})


@dataclass(frozen=True)
class Partitions:
    """Hold the partitions that match a pattern, and word their spans as the pattern does."""

    pattern: str
    files: Mapping[int, tuple[Path, ...]]
    """The files of each span in name order; spans rise."""

    def show(self, *spans: int) -> str:
        """Word spans as dates or numbers, neighbours as one range, a long list cut short."""
        ranges: list[list[int]] = []
        for span in sorted(spans):
            if ranges and span == ranges[-1][1] + 1:
                ranges[-1][1] = span
            else:
                ranges.append([span, span])
        words = [
            self._word(first) if first == last else f"{self._word(first)} to {self._word(last)}"
            for first, last in ranges
        ]
        more = len(words) - _MANY
        return ", ".join(words[:_MANY]) + (f" and {more} more" if more > 0 else "")

    def _word(self, span: int) -> str:
        return span_text(self.pattern, span)


def span_text(pattern: str, span: int) -> str:
    """Word a span as a pattern writes it: a date where it holds `{YYYY}`, else a number."""
    if "{YYYY}" not in pattern:
        return str(span)
    try:
        return (_EPOCH + timedelta(days=span)).isoformat()
    except OverflowError:  # a number that no date has; it is worded to be refused
        return str(span)


def find_partitions(pattern: str) -> Partitions:
    """List the partitions that match a pattern; without any, the list is empty.

    `{SPAN}` stands for digits, `{SPAN:5}` for five of them, `{YYYY}`, `{MM}`, `{DD}` for a date,
    `*` and `?` for any text within one name, and every other character for itself. A name that
    begins with a dot is not matched by a wildcard. A folder stands for its `*.csv`; one without
    any is no partition, since its writer has only just made it.

    Raises:
        DataError: a path holds no possible date, one span is written in two ways, or a folder may
            not be listed.

    Cost:
        One listing for each folder on the way; no file is opened.
    """
    files: dict[int, list[Path]] = {}
    names: dict[int, str] = {}
    fixed = _fixed(pattern)
    for path, values in _matches(fixed, Path(pattern).parts[len(fixed.parts) :], {}):
        name = values.get("span") or "-".join(values[part] for part in ("year", "month", "day"))
        span = _span_of(path, name)
        if names.setdefault(span, name) != name:
            raise DataError(
                f"{path}: the span of a partition must be written in one way. Got {name!r} and "
                f"{names[span]!r}. Remove one of them, or say how many digits: "
                f"{{SPAN:{len(name)}}}."
            )
        found = csv_files(path)
        if found:
            files.setdefault(span, []).extend(found)
    return Partitions(pattern, {span: tuple(sorted(files[span])) for span in sorted(files)})


def csv_files(path: Path) -> list[Path]:
    """Return a file itself, or the visible `*.csv` of a folder in name order."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.glob("*.csv") if p.is_file() and not p.name.startswith("."))


def _fixed(pattern: str) -> Path:
    """Return the folders of a pattern in front of its first placeholder or wildcard."""
    return Path(*takewhile(lambda part: not _TOKEN.search(part), Path(pattern).parts))


def _matches(
    folder: Path, names: Sequence[str], values: dict[str, str]
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield every path below `folder` that matches the names, with what the placeholders held."""
    if not names:
        yield folder, values
        return
    if not _TOKEN.search(names[0]):
        if (folder / names[0]).exists():
            yield from _matches(folder / names[0], names[1:], values)
        return
    regex = re.compile(_regex(names[0]), re.DOTALL)
    for entry in _listed(folder):
        match = regex.fullmatch(entry)
        if match and (not entry.startswith(".") or names[0].startswith(".")):
            yield from _matches(folder / entry, names[1:], {**values, **match.groupdict()})


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(
            f"{folder}: it must be possible to list it. Got: {error.strerror}. "
            "Check its permissions."
        ) from error


def _regex(name: str) -> str:
    parts, end = [], 0
    for token in _TOKEN.finditer(name):
        width = f"{{{token['width']}}}" if token["width"] else "+"
        parts.append(re.escape(name[end : token.start()]))
        parts.append(_REGEX.get(token[0]) or f"(?P<span>[0-9]{width})")
        end = token.end()
    return "".join([*parts, re.escape(name[end:])])


def _span_of(path: Path, name: str) -> int:
    try:
        return parse_span(name)
    except DataError:
        raise DataError(
            f"{path}: its name must hold a date from 1970-01-01 on, or a number of at most 18 "
            f"digits. Got {cut(name)}. Rename it, or move it away."
        ) from None


@dataclass(frozen=True)
class Window:
    """Say which partitions a training reads."""

    span: int
    """The newest one; it names the window."""
    spans: tuple[int, ...]
    """All of them, rising."""
    files: tuple[Path, ...]
    notice: str | None
    """What people should know: spans in the middle that are missing."""


def choose_window(config: CsvSpans) -> Window:
    """Choose the partitions of a window: `window` numbers that end with `span`, as TFX counts.

    A span that is missing makes the window poorer, not longer; only its newest span must be there.

    Raises:
        DataError: there is no partition at all, or none of the asked span.
    """
    found = find_partitions(config.path)
    if not found.files:
        folder = _fixed(config.path)
        there = nearest(Path(config.path).parts[len(folder.parts)], _listed(folder))
        raise DataError(
            f"data.path: there must be at least one partition. Got none for {config.path!r}. "
            f"{there} in {str(folder)!r}. Correct the path, or run again when the first is there."
        )
    span = max(found.files) if config.span is None else config.span
    if span not in found.files:
        raise DataError(
            f"data.span: there must be a partition of it. Got {found.show(span)}, for which "
            f"{config.path!r} finds nothing. Found: {found.show(*found.files)}. "
            "Name one of these, or run again when it is there."
        )
    first = max(span - config.window + 1, min(found.files))
    spans = tuple(number for number in found.files if first <= number <= span)
    missing = [number for number in range(first, span) if number not in found.files]
    notice = None
    if missing:
        notice = (
            f"no partition of {found.show(*missing)} between {found.show(first)} and "
            f"{found.show(span)}: the training goes on without"
        )
    files = tuple(path for number in spans for path in found.files[number])
    return Window(span, spans, files, notice)
