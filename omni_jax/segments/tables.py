"""Tables in a text: Markdown, HTML, and lines of cells."""

import re
from collections.abc import Iterator

_TAG = re.compile(r"<(/?)table\b", re.IGNORECASE)
_LINE = re.compile(r"[^\n\f]+")  # a non-empty line; a form feed stands for a control token
_QUOTED = re.compile(r'"[^"]*"')
_TAG_SPACE = 16  # characters within which a tag must close; an unbounded search at each tag could take quadratic time
_MIN_ROWS = 3  # consecutive lines with equally many cells that make a table
_MAX_WORDS = 4  # words in a cell, if commas are followed by spaces; a line with longer cells is prose

Span = tuple[int, int]
Kind = tuple[str, int]


def table_spans(text: str) -> list[Span]:
    """Character ranges of the tables in a text, in order, without overlap; each is whole lines or an HTML table.

    A table is `<table>...</table>`, or a Markdown header with separator row and rows, or at least three consecutive
    lines with the same number of cells (at least two) between tabs, pipes or commas.
    """
    html = list(_html_tables(text))
    spans: list[Span] = []
    for span in sorted([*html, *_line_tables(text)], key=lambda span: (span[0], -span[1])):
        if not spans or span[0] >= spans[-1][1]:
            spans.append(span)
    return spans


def _html_tables(text: str) -> Iterator[Span]:
    depth, start = 0, 0
    for tag in _TAG.finditer(text):
        if tag[1]:
            if depth == 1:
                stop = text.find(">", tag.end(), tag.end() + _TAG_SPACE)
                yield start, tag.end() if stop < 0 else stop + 1
            depth = max(0, depth - 1)
        else:
            if depth == 0:
                start = tag.start()
            depth += 1


def _line_tables(text: str) -> Iterator[Span]:
    lines = [match.span() for match in _LINE.finditer(text)]
    kinds = [_kind(text[start:stop]) for start, stop in lines]
    first = 0
    while first < len(lines):
        last = first + 1
        if _has_separator(text, lines, kinds, first):
            last = first + 2
            while last < len(lines) and _adjoin(lines, last) and "|" in text[slice(*lines[last])]:
                last += 1
            yield _whole_lines(text, lines[first][0], lines[last - 1][1])
        elif kinds[first] is not None:
            while last < len(lines) and kinds[last] == kinds[first] and _adjoin(lines, last):
                last += 1
            if last - first >= _MIN_ROWS:
                yield _whole_lines(text, lines[first][0], lines[last - 1][1])
        first = last


def _has_separator(text: str, lines: list[Span], kinds: list[Kind | None], first: int) -> bool:
    """Whether a line has cells and the next line is a Markdown separator row."""
    below = kinds[first + 1] if first + 1 < len(lines) else None
    return below is not None and below[0] == "-" and "|" in text[slice(*lines[first])] and _adjoin(lines, first + 1)


def _adjoin(lines: list[Span], index: int) -> bool:
    """Whether no empty line lies between a line and the one before it."""
    return lines[index][0] == lines[index - 1][1] + 1


def _whole_lines(text: str, start: int, stop: int) -> Span:
    return start, stop + (text[stop : stop + 1] == "\n")


def _kind(line: str) -> Kind | None:
    """(separator of the cells, number of cells) of a line, or None if it has fewer than two cells."""
    line = line.strip(" \r")
    if "|" in line:
        if "-" in line and not set(line) - set("|:- \t"):
            return "-", line.count("|")
        if "\t" not in line:
            cells = line.replace("\\|", "").strip("|").count("|") + 1
            return ("|", cells) if cells > 1 else None
    if "\t" in line.lstrip("\t"):  # leading tabs are indentation
        return "\t", line.count("\t") + 1
    if "," in line:
        cells = _QUOTED.sub("", line).split(",")
        prose = ", " in line and (line[-1] in ".!?:;" or any(len(cell.split()) > _MAX_WORDS for cell in cells))
        return None if prose or len(cells) < 2 else (",", len(cells))
    return None
