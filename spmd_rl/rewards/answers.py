"""Finding the answer in a reply."""

import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}})?"
# A minus is a sign ("is -3", "= - 3") unless it stands between two values ("5-3", "x) - 3"): then it subtracts.
_SIGN = r"(?:(?<![\w.)}%])-|(?<![\w.)}%])(?<![\w.)}%]\s)-\s)?\$?"
NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:\\[dt]?frac\{{(?P<top>-?\d+)\}}\{{(?P<bottom>-?\d+)\}}|(?P<num>{_DECIMAL})(?:\s?/\s?(?P<den>\d+))?)"
)
LONGEST = 1000
"""Characters of a number that is still read: exact arithmetic on longer ones is not worth its time."""


def last_number(text: str) -> tuple[str, Fraction] | None:
    """The last number of a text, as written (but for commas, dollar signs and spaces) and exactly; None without one.

    Read are 12, 1,234.5, -3, 3/4, \\frac{3}{4}, 1e-3.
    """
    matches = list(NUMBER.finditer(text.replace("−", "-")))
    if not matches or len((found := matches[-1])[0]) > LONGEST:
        return None
    top, bottom = found["top"] or found["num"].replace(",", ""), found["bottom"] or found["den"] or "1"
    if int(bottom) == 0:
        return None
    value = Fraction(top) / Fraction(bottom)
    return re.sub(r"[\s,$]", "", found[0]), -value if "-" in found["sign"] else value


def boxed(text: str) -> str | None:
    """Contents of the last \\boxed{…}, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : at].strip()
    return None


def tagged(text: str, tag: str = "answer") -> str | None:
    """Contents of the last <answer>…</answer>; None without one."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


def final_answer(text: str) -> str:
    """The answer tag's contents, else the box's, else the whole reply, stripped."""
    for found in (tagged(text), boxed(text)):
        if found is not None:
            return found
    return text.strip()
