"""Rules for where sentences end, in many scripts.

When it is uncertain that a sentence ends, it goes on: two sentences in one segment cost little, but the policy promises
not to cut inside one.
"""

import re
from collections.abc import Iterator

import numpy as np

from omni_jax.segments.token_text import TokenText

# Marks that end a sentence only before white space, because of 3.14, example.com and path?x=1.
_SPACED = ".!?…‼‽⁇⁈⁉"
# Marks that always end one: Chinese and Japanese, Arabic and Urdu, Devanagari and its neighbours, Armenian, Ethiopic,
# Burmese, Khmer, Mongolian, Syriac, N'Ko, Canadian syllabics, Lisu.
_UNSPACED = "。！？｡．︒﹖﹗؟۔⸮।॥։።፧፨။។៕᠃᠉܀܁܂߹᙮꓿"
_BRACKETS = ")]}」』】》〉〕）］｝〞〟”’»›＂＇"
_CLOSERS = _BRACKETS + "*_`~"  # includes the ends of Markdown emphasis
_OPENERS = "([{\"'“‘«‹„*_`"
_JOINTS = ",;:!?/|–—"
# Quotes that open in some languages and close in others. Right after a mark of _SPACED they can only close.
_EITHER = "\"'“‘«‹„"

_WIDE = "\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uffee"  # written without spaces
_UNMARKED = "\u0e00-\u0fff"  # Thai, Lao, Tibetan: no mark ends a sentence
_SPACE = r"[^\S\n]"  # white space within a line


def _class(chars: str) -> str:
    return f"[{re.escape(chars)}]"


# One set of characters to search for, and a match at each of them: one pass over any text.
_BREAKS = "\n\f\v\u2029"
_LEAD = re.compile(_class(_SPACED + _UNSPACED + _BREAKS))
# French puts a space before its closing quotes; German opens with the same quotes after a space.
_MARK = re.compile(rf"{_class(_SPACED + _UNSPACED)}+({_class(_CLOSERS + _EITHER)}*(?:[ \u00a0\u202f][»›](?!\w))?)")
_BREAK = re.compile(
    r"[\f\v\u2029]"
    rf"|\n{_SPACE}*\n"  # an empty line
    rf"|\n{_SPACE}*(?:[-*•‣◦–—]\s|\d{{1,2}}[.)]\s|\|)"  # the next line is a list item or a table row
    rf"|(?<=[{_UNMARKED}])\n"
)
_NEXT = re.compile(r"\S")
_WORD = re.compile(r"[^\W_]")
_IS_WIDE = re.compile(rf"[{_WIDE}]")
_IS_SYLLABLE = re.compile(rf"[{_WIDE}\uac00-\ud7a3]")  # one character can be a word, so it is no initial
_BOUND = re.compile(rf"[{_WIDE}]|{_class(_UNSPACED + _OPENERS + _CLOSERS + _JOINTS)}")  # a word begins after these too
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.-?)+[^\W\d_]{1,2}")  # e.g, U.S.A, Ph.D, z.B, J.-P
_UNMARKED_SPACE = re.compile(rf"(?<=[{_UNMARKED}]) ")
_IS_UNMARKED = re.compile(rf"[{_UNMARKED}]")
_LINE_BREAK = re.compile(r"\n")
_COMMAS = ("、", "，", "،")
_QUOTATIVES = ("と", "って")  # after a quotation, which they make part of the sentence: 「...。」と言った
_UNSPACED_MARK = re.compile(_class(_UNSPACED))
_NO_BEGINNING = ",;:)]}" + _SPACED

# Words that never, or hardly ever, end a sentence.
_NEVER_LAST = """
Mr Mrs Ms Mx Dr Drs Prof St Ste Sr Jr Rev Hon Gen Col Capt Cmdr Lt Sgt Maj Gov Sen Rep Pres Supt Fr Messrs Mme Mlle Mgr
Sra Srta Dña Ud Uds Sig Dott Ing Hr Frl Mt Ft Inc Ltd Co Corp Bros Dept Univ Assn vs cf viz al ca approx est ed eds esp
incl resp seq bzw evtl ggf vgl inkl Str env ул им проф акад см напр डॉ
"""
_LEADS_NUMBER = """
No Nos Nr Nº Num Vol Vols Fig Figs Eq Eqs Sec Ch Art Abs Abb Kap Tab p pp vol no nos nr fig figs eq eqs sec ch art chap
para Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec рис стр гл табл
"""
_GERMAN_MONTHS = "Januar Jänner Februar März April Mai Juni Juli August September Oktober November Dezember"
_GERMAN_ARTICLES = "der die das dem den des im zum zur"
_ABBREVIATIONS = frozenset(_NEVER_LAST.split())
_BEFORE_NUMBERS = frozenset(_LEADS_NUMBER.split())
_AFTER_ORDINALS = frozenset(_GERMAN_MONTHS.split())  # 3. Oktober
_BEFORE_ORDINALS = frozenset(_GERMAN_ARTICLES.split())  # im 19. Jahrhundert
_LONGEST_WORD = 20  # characters before a full stop that are searched for an abbreviation
_UNMARKED_LENGTH = 300  # characters after which a script without marks is cut at the next space
_PROSE_LENGTH = 2000  # a longer stretch without a sentence end, but with line breaks, is code or data


def sentence_stops(tokens: TokenText) -> list[int]:
    """The token index after each sentence, ascending; the last is the number of tokens.

    An end inside a token moves to the token's end. Tokens of white space after a sentence belong to it. A stretch
    without letters or digits (control tokens, a rule of dashes) belongs to the sentence after it.
    """
    count = len(tokens.ends)
    stops = np.unique(tokens.skip_blank(tokens.ceil(sentence_ends(tokens.text))))
    stops = stops[(stops > 0) & (stops < count)]
    kept: list[int] = []
    seen = 0
    for stop, char in zip(stops.tolist(), tokens.ends[stops - 1].tolist(), strict=True):
        if _WORD.search(tokens.text, seen, char):
            kept.append(stop)
        seen = char
    if kept and not _WORD.search(tokens.text, seen):  # the rest has no words, and no sentence follows it
        kept.pop()
    return [*kept, count]


def sentence_ends(text: str) -> list[int]:
    """The character index after each sentence, ascending. Closing quotes and brackets after the mark are part of it.

    A sentence ends at a mark (of many scripts) that is not part of an abbreviation, a number or a name, at an empty
    line, at the line break before a list item, and at a form feed. Thai, Lao and Tibetan have no marks: a sentence ends
    at each line break, and after 300 characters at the next space. A stretch of more than 2,000 characters without an
    end is code or data, and is cut at its line breaks.
    """
    ends: list[int] = []
    start = 0
    for end in (*_certain_ends(text), len(text)):
        if end - start > _UNMARKED_LENGTH:
            ends.extend(_inner_ends(text, start, end))
        ends.append(end)
        start = end
    return ends


def _certain_ends(text: str) -> Iterator[int]:
    done = 0
    quotes, counted = 0, 0  # straight quotes so far in this paragraph; after an odd number, the next one closes
    for lead in _LEAD.finditer(text):
        start = lead.start()
        if start < done or (lead[0] == "." and text[start + 1 : start + 2].isalnum()):  # fast path: 3.14, example.com
            continue
        if lead[0] in _BREAKS:
            if _BREAK.match(text, start):
                quotes, counted = 0, start
                yield start
            continue
        match = _MARK.match(text, start)
        assert match is not None  # _MARK matches every lead that is no break
        mark, done = text[start : match.start(1)], match.end()
        if not _UNSPACED_MARK.search(mark):
            if _is_spaced_end(text, mark, start, closed=done > match.start(1), end=done):
                yield done
            continue
        if '"' in match[1]:
            quotes += text.count('"', counted, start)
            counted = start
        end = _unspaced_end(text, mark, match.start(1), match[1], closing=quotes % 2 == 1)
        if end is not None:
            yield end


def _unspaced_end(text: str, mark: str, end: int, closers: str, *, closing: bool) -> int | None:
    """The end of the sentence at a mark that needs no white space after it, closing quotes included, or None if the
    sentence goes on. `end` is the end of the mark; `closing` is whether a straight quote there would close."""
    marked = end
    for char in closers:
        if char not in _CLOSERS and not (char == '"' and closing):
            break
        closing = closing and char != '"'
        end += 1
    if mark == "．" and text[end : end + 1].isdigit():
        return None
    if text.startswith(_COMMAS, end) or (end > marked and text.startswith(_QUOTATIVES, end)):
        return None
    return end


def _is_spaced_end(text: str, mark: str, start: int, *, closed: bool, end: int) -> bool:
    """Whether a mark that needs white space after it ends a sentence. It begins at `start`; `end` is the end of the
    mark and of the closing characters after it, if there are any (`closed`)."""
    if end < len(text) and not text[end].isspace():
        return mark[-1] in "!?" and _IS_WIDE.match(text, end) is not None  # 好!明天
    found = _NEXT.search(text, end)
    if found is None:
        return True
    following = found[0]
    if following.islower() and (closed or mark[-1] in ".…"):  # approx. three; "Stop!" he cried
        return False
    if following in _NO_BEGINNING:
        return False
    if following in "-–—" and "\n" not in text[end : found.start()]:
        return False
    return mark != "." or not _is_abbreviation(text, start, found.start())


def _is_abbreviation(text: str, dot: int, following: int) -> bool:
    """Whether the full stop at `dot` is part of the word before it. `following` is the start of the next word."""
    before = text[max(0, dot - 2 * _LONGEST_WORD) : dot]
    if not before or before[-1].isspace():
        return False
    *earlier, word = before.rsplit(maxsplit=2)
    word = _BOUND.split(word)[-1]
    if len(word) == 1 and word.isalpha():  # J. Smith
        return _IS_SYLLABLE.match(word) is None
    if word in _ABBREVIATIONS or _DOTTED.fullmatch(word):
        return True
    if word in _BEFORE_NUMBERS and text[following].isdigit():
        return True
    if len(word) < 3 and word.isdigit():
        line = max(before.rfind(mark) for mark in _BREAKS) + 1  # start of the line
        if before[line:].strip(" \t#*") == word and (line > 0 or len(before) == dot):
            return True  # 1. First item, ## 2. Second heading
        if earlier and earlier[-1].lower() in _BEFORE_ORDINALS:
            return True
        return text[following : following + _LONGEST_WORD].split()[0].rstrip(".,;:!?") in _AFTER_ORDINALS
    return False


def _inner_ends(text: str, start: int, end: int) -> Iterator[int]:
    """Ends inside a long stretch in which no rule found one."""
    if 2 * len(_IS_UNMARKED.findall(text, start, end)) > end - start:
        while end - start > _UNMARKED_LENGTH:
            found = _UNMARKED_SPACE.search(text, start + _UNMARKED_LENGTH, min(end, start + 2 * _UNMARKED_LENGTH))
            found = found or _IS_UNMARKED.search(text, start + 2 * _UNMARKED_LENGTH, end)
            if found is None or found.start() >= end - 1:
                return
            start = found.start() + 1 - found[0].isspace()
            yield start
    elif end - start > _PROSE_LENGTH:
        yield from (match.start() for match in _LINE_BREAK.finditer(text, start + 1, end))
