"""A fast upper estimate of the number of tokens that an embedding model counts in a text.

If text were cut by characters alone, text with many tokens per character (CJK, base64, minified code) would exceed a
model's window, and the server would refuse it one provider call later. The estimate follows WordPiece, whose vocabulary
is small: each digit, punctuation mark or non-ASCII character is one token, a common word is one, any other run of
letters is one plus 4 for every 9 letters, and a capital inside a run starts a new word.
"""

_LOWER = bytes(range(ord("a"), ord("z") + 1))
_UPPER = bytes(range(ord("A"), ord("Z") + 1))
_CONTINUATION = bytes(range(0x80, 0xC0))
_FREE = _LOWER + _UPPER + b" \t\n\r\x0b\x0c" + _CONTINUATION
_NOT_LETTERS = bytes(set(range(256)) - set(_LOWER) - set(_UPPER))
_LETTERS_ALONE = bytes.maketrans(_UPPER + _NOT_LETTERS, _LOWER + b" " * len(_NOT_LETTERS))
_CASES_ALONE = bytes.maketrans(_LOWER + _UPPER + _NOT_LETTERS, b"a" * 26 + b"A" * 26 + b" " * len(_NOT_LETTERS))
# UTF-8 lead bytes of characters that can be more than one token: some Indic vowels (2), Hangul syllables, which are
# decomposed into letters (3), and everything outside the Basic Multilingual Plane (2).
_EXTRA_BY_LEAD = {0xE0: 1, 0xEA: 2, 0xEB: 2, 0xEC: 2, 0xED: 2, 0xF0: 1, 0xF1: 1, 0xF2: 1, 0xF3: 1, 0xF4: 1}
_SPECIAL_TOKENS = 2

# A unit is a ninth of a token, so that the units of lines are whole numbers and add up exactly. One token in 32 is kept
# in reserve. Measured on 31,000 chunks of code, prose in many languages, base64, hex dumps and minified JavaScript, the
# estimate was never too low (for code it is 1.43 times the count on average); on words of random letters it is a fifth
# too low.
_UNITS_PER_TOKEN = 9
_UNITS_PER_LETTER = 4
_RESERVE = 32

_COMMON = frozenset(
    b"""
    add after all always and any are argument arguments array assert attribute await base based because been before
    between body break but byte bytes call called can case catch char check class client code command comment
    connection content context continue copy create current data database date def default define description dir
    directory does double each element else empty end error event except exception export false field fields file
    files filter final finally first float for format from function get given group has have header host http id if
    import in include index info input instance int integer interface into is item items its join key language last
    length let level line lines list load local log long main map match max message method min model module more
    most must name named names new next no node none not null number object of old on one only open option options
    or order other output package parameters parent path pattern port position print private process project
    property protected public query raise raises read ref remove replace request required resource response result
    results return returns row rows run same self server session set settings should show size some source span
    start state static status string such super switch system table target task template test tests text than that
    the their them then there they this throw time title to token true try two type types union update use used
    user using value values var version view void was were when where which while will window with without word
    would write yield you your
    """.split()
)


def estimate_tokens(text: str) -> int:
    """Tokens of the text with the two special tokens around it; never below a WordPiece model's count on real text."""
    return _SPECIAL_TOKENS - (-weigh(text) * _RESERVE // (_UNITS_PER_TOKEN * (_RESERVE - 1)))


def units_within(max_tokens: int) -> int:
    """The most units (see `weigh`) of a text that has at most `max_tokens` tokens."""
    return (max_tokens - _SPECIAL_TOKENS) * _UNITS_PER_TOKEN * (_RESERVE - 1) // _RESERVE


def weigh(text: str) -> int:
    """The tokens of the text in units of a ninth, without the special ones. Units of lines add up to those of the text."""
    content = text.encode("utf-8", "replace")
    words = content.translate(_LETTERS_ALONE).split()
    rare = [word for word in words if word not in _COMMON]
    tokens = len(words) + len(content.translate(None, _FREE)) + content.translate(_CASES_ALONE).count(b"aA")
    if not text.isascii():
        tokens += sum(content.count(lead) * extra for lead, extra in _EXTRA_BY_LEAD.items())
    return tokens * _UNITS_PER_TOKEN + (sum(map(len, rare)) - len(rare)) * _UNITS_PER_LETTER
