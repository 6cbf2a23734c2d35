"""Which texts contain tables. In CASES, ⟦ and ⟧ mark each table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.segments.tables import table_spans

CASES = {
    "markdown": "Look:\n⟦| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3 | 4 |\n⟧\nDone | here.",
    "markdown without outer pipes, rows of other lengths": "⟦a | b | c\n--|--|--\n1 | 2\n3 | 4 | 5⟧",
    "markdown of one row": "⟦| a | b |\n| - | - |\n| 1 | 2 |\n⟧text",
    "markdown ends at a line without cells": "⟦| a | b |\n|---|---|\n| 1 | 2 |\n⟧text\n| 3 | 4 |\n",
    "tabs": "x\n⟦name\tn\na\t1\nb, c\t2\n⟧end",
    "an empty corner": "⟦\tQ1\tQ2\nA\t1\t2\nB\t3\t4\n⟧",
    "pipes": "⟦a | 1\nb | 2\nc | 3⟧",
    "commas": "⟦name,age,city\nAnn,31,Oslo\nBob,29,Rome\n⟧",
    "commas in quotes": '⟦name,note\nAnn,"a, b, c"\nBob,"d"\n⟧',
    "commas and spaces": "⟦Ann, 31, Oslo\nBob, 29, Rome\nEve, 30, Bonn\n⟧",
    "windows line ends": "⟦a,1\r\nb,2\r\nc,3\r\n⟧",
    "html": 'See <b>x</b> ⟦<table class="x"><tr><td>1</td></tr>\n\n</table>⟧ there',
    "html in html": "⟦<TABLE><tr><td><table></table></td></tr></TABLE>⟧<table>",
    "two": "⟦a\t1\nb\t2\nc\t3\n⟧\nand\n⟦a,1\nb,2\nc,3\n⟧",
    "one after another": "⟦a\t1\nb\t2\nc\t3\n⟧⟦a\t1\t2\nb\t2\t3\nc\t3\t4⟧",
    "a turn ends": "⟦a,1\nb,2\nc,3⟧\f\n",
    "two rows": "a,1\nb,2\n",
    "unlike rows": "a,1\nb,2,3\nc,4\n",
    "an empty line between": "a,1\n\nb,2\n\nc,3\n",
    "prose": "It was late, and dark.\nWe went home, slowly.\nNobody spoke, nor slept.\n",
    "wrapped prose": "a house by the river, which he\nbought a long time ago, when it\nwas so very little money, so\n",
    "code": "def f(x):\n\tif x:\n\t\treturn 1\n\treturn 2\n\ty = 3\n",
    "a rule": "---\n\n---\n|\n",
    "html that never ends": "<table><tr>",
    "html that never began": "</table></table>",
    "tablets": "<tablet></tablet>",
    "nothing": "",
}


@pytest.mark.parametrize("marked", CASES.values(), ids=CASES)
def test_table_spans(marked):
    expected, text = [], ""
    for char in marked:
        if char == "⟦":
            expected.append(len(text))
        elif char == "⟧":
            expected[-1] = (expected[-1], len(text))
        else:
            text += char
    assert table_spans(text) == expected


@given(st.lists(st.sampled_from(["a", ",", "\t", "|", "-", "\n", "\f", "<table>", "</table>", "</table"])).map("".join))
def test_spans_are_ascending_and_do_not_overlap(text):
    here = 0
    for start, stop in table_spans(text):
        assert here <= start < stop <= len(text)
        here = stop
