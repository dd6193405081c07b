"""Just enough of a shell to read a launch script: variables, defaults, arrays, arithmetic, plain conditions.

Nothing is executed and the environment is not read: what a script does not set itself stays as `$NAME`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Variables = dict[str, list[str]]
"""A variable's words: one for a string, several for an array."""

ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.S)
CONDITION = re.compile(r"(?:if|elif)\s+\[\[?\s+(.*?)\s+\]\]?\s*;?\s*(?:then)?$", re.S)
EXPANSION = re.compile(r"\$(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|([A-Za-z_]\w*|[@*#?0-9]))")


@dataclass
class Script:
    """What was read."""

    words: list[str] = field(default_factory=list)
    """The launch command's words after `-m MODULE`."""
    module: str = ""
    """The Python module that it runs, empty for bare words."""
    unsure: list[str] = field(default_factory=list)
    """Conditions that could not be decided; their first branch was read."""


def read_script(text: str) -> Script:
    """The command with `-m MODULE` in a shell script, its variables put in."""
    script, variables = Script(), Variables()
    branches: list[bool | None] = []
    for line in _lines(text):
        if line.startswith(("if ", "elif ")):
            taken = _condition(line, variables, script)
            if line.startswith("if "):
                branches.append(taken)
            else:
                branches[-1] = None if branches[-1] in (True, None) else taken
        elif line == "else" and branches:
            branches[-1] = None if branches[-1] in (True, None) else True
        elif line.startswith("fi") and line.strip("; ") == "fi" and branches:
            branches.pop()
        elif all(branch is True for branch in branches):
            _read_line(line, variables, script)
    return script


def split_words(text: str, variables: Variables | None = None) -> list[str]:
    """The words of a command: quotes taken off, expansions put in and, outside of quotes, split at white space."""
    words: list[str] = []
    current: str | None = None
    for piece, quoted in _pieces(text, variables or {}):
        if quoted:
            current = (current or "") + piece
            continue
        parts = re.split(r"(\s+)", piece)
        for part in parts:
            if part and not part.isspace():
                current = (current or "") + part
            elif part and current is not None:
                words.append(current)
                current = None
    return [*words, current] if current is not None else words


def _lines(text: str) -> Iterator[str]:
    """Logical lines: continued ones joined, comments off, arrays and quoted strings whole."""
    pending = ""
    for raw in text.replace("\\\n", " ").splitlines():
        line = pending + re.sub(r"(^|\s)#(?!\}).*$", "", raw) if not _open_quote(pending) else pending + raw
        if _open_quote(line) or line.count("(") > line.count(")"):
            pending = line + "\n"
            continue
        pending = ""
        if line.strip():
            yield line.strip()
    if pending.strip():
        yield pending.strip()


def _open_quote(line: str) -> bool:
    quote = ""
    for place, character in enumerate(line):
        if character in "'\"" and quote in ("", character) and line[place - 1 : place] != "\\":
            quote = "" if quote else character
    return bool(quote)


def _read_line(line: str, variables: Variables, script: Script) -> None:
    assignment = ASSIGNMENT.fullmatch(line)
    if assignment:
        name, append, value = assignment.groups()
        array = value.strip().startswith("(") and value.strip().endswith(")")
        found = split_words(value.strip()[1:-1], variables) if array else _scalar(value, variables)
        variables[name] = variables.get(name, []) + found if append else found
        return
    words = split_words(line, variables)
    if "-m" in words[:-1] and not script.module:
        place = words.index("-m", words.index("--") if "--" in words else 0)
        script.module, script.words = words[place + 1], words[place + 2 :]


def _scalar(value: str, variables: Variables) -> list[str]:
    """A string's value: an assignment is not split at white space that an expansion brought."""
    return ["".join(piece for piece, _ in _pieces(value.strip(), variables))]


def _pieces(text: str, variables: Variables) -> Iterator[tuple[str, bool]]:
    """(piece, whether it was quoted) in order."""
    place = 0
    while place < len(text):
        character = text[place]
        if character == "'":
            end = text.find("'", place + 1) % (len(text) + 1)
            yield text[place + 1 : end], True
            place = end + 1
        elif character == '"':
            end = next(
                i for i in range(place + 1, len(text) + 1) if text[i : i + 1] in ('"', "") and text[i - 1] != "\\"
            )
            yield from _quoted(text[place + 1 : end], variables)
            place = end + 1
        elif character == "\\":
            yield text[place + 1 : place + 2], True
            place += 2
        else:
            end = place
            depth = 0
            while end < len(text) and (depth or text[end] not in "'\"\\"):
                depth += (text[end] == "{") - (text[end] == "}") if text[end] in "{}" else 0
                end += 1
            yield expand(text[place:end], variables), False
            place = end


def _quoted(text: str, variables: Variables) -> Iterator[tuple[str, bool]]:
    """The inside of double quotes; `"${NAME[@]}"` gives one word an item."""
    array = re.fullmatch(r"\$\{(\w+)\[@\]\}", text)
    if array or text == "$@":
        for item in variables.get(array[1], []) if array else []:
            yield item, True
            yield " ", False
    else:
        yield expand(text, variables).replace('\\"', '"'), True


def expand(text: str, variables: Variables) -> str:
    """Text with `$((…))`, `$NAME`, `${NAME}`, `${NAME:-default}` put in; `$@` is empty, unknown names stay."""
    while (start := text.find("$((")) >= 0 and (end := text.find("))", start)) >= 0:
        while text[end + 2 : end + 3] == ")":
            end += 1
        text = text[:start] + _arithmetic(text[start + 3 : end], variables) + text[end + 2 :]
    return EXPANSION.sub(lambda match: _variable(match[1] or match[2], match[0], variables), text)


def _variable(name: str, written: str, variables: Variables) -> str:
    name, has_default, default = re.match(r"([\w@*#?]+)(?:\[[@*]\])?(:?-|:?=)?(.*)", name, re.S).groups()  # type: ignore[union-attr]
    if name in variables:
        return " ".join(variables[name])
    if has_default:
        return "".join(piece for piece, _ in _pieces(default, variables))
    return "" if name in ("@", "*") else written if written.startswith("$" + name) else f"${name}"


def _arithmetic(text: str, variables: Variables) -> str:
    named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: " ".join(variables.get(match[1], [match[1]])), text)
    if not re.fullmatch(r"[\d\s+*/()%-]+", named) or "**" in named:
        return f"$(({text}))"
    return str(eval(named.replace("/", "//"), {"__builtins__": {}}))


def _condition(line: str, variables: Variables, script: Script) -> bool:
    match = CONDITION.match(line)
    words = split_words(match[1], variables) if match else []
    match words:
        case [left, "=" | "==", right] if "$" not in left + right:
            return left == right
        case [left, "!=", right] if "$" not in left + right:
            return left != right
        case ["-n" | "-z" as test, value] if "$" not in value:
            return (value == "") == (test == "-z")
    script.unsure.append(line)
    return True
