"""A page of a C header: its declarations, each below the comment before it.

A comment `/* ---- Title ---- .. */` begins a section. Comments that begin a line are prose; a declaration keeps those
inside of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NAME = re.compile(
    r"\b(\w+)\s*\([^(){}]*(?:\([^(){}]*\)[^(){}]*)*\)\s*;"  # a function
    r"|\}\s*(\w+)\s*;"  # a struct, union or enum with a typedef
    r"|\btypedef\s[^{};()]*?\b(\w+)\s*;"
    r"|\btypedef\s[^{};()]*\(\s*\*\s*(\w+)\s*\)"  # a pointer to a function
    r"|^(?:struct|union|enum)\s+(\w+)\s*\{",
    re.MULTILINE,
)
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
_TITLE = re.compile(r"\A-{2,} *(.+?) *-{2,}\s*\Z")
_CODE = re.compile(r"`[^`]+`|[\w/]+\.(?:h|md)\b|[\w*]*_[\w*]*\w(?:\(\))?|\b[a-z]+[A-Z]\w*(?:\(\))?")  # what it names


@dataclass
class Part:
    """Of the page: a section's title, prose, or declarations."""

    kind: str  # "title", "section" (what its comment says besides), "prose" (of the declaration behind it), "code"
    text: str


def _comment(lines: list[str]) -> str:
    """Its words, line by line, without the marks."""
    if lines[0].startswith("//"):
        return "\n".join(re.sub(r"^//[/!]?<? ?", "", line) for line in lines)
    text = re.sub(r"\s*\*+/\s*$", "", re.sub(r"^/\*+!? ?", "", "\n".join(lines)))
    first, *rest = text.split("\n")
    return "\n".join([first, *(re.sub(r"^ {0,2}\* ?|^ {3}", "", line) for line in rest)]).strip("\n")


def parts(text: str) -> Iterator[Part]:
    """Of a header, in its order. What the preprocessor alone needs is left out: guards, includes, other compilers."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        begin = at
        if line.startswith("/*"):
            while "*/" not in lines[at]:
                at += 1
            at += 1
            prose = _comment(lines[begin:at])
            title, _, rest = prose.partition("\n")
            if match := _TITLE.match(title):
                title, _, more = match[1].rstrip(".").partition(". ")
                yield Part("title", title)
                if prose := f"{more}.\n{rest}".strip("\n") if more else rest.strip("\n"):
                    yield Part("section", prose)
            elif prose:
                yield Part("prose", prose)
        elif line.startswith("//"):
            while at < len(lines) and lines[at].startswith("//"):
                at += 1
            yield Part("prose", _comment(lines[begin:at]))
        elif not line.strip():
            at += 1
        else:
            depth = 0
            while at < len(lines) and (depth or lines[at].strip()):
                if not depth and at > begin and lines[at].startswith(("/*", "//")):
                    break
                bare = re.sub(r"/\*.*?\*/|/\*.*$|//.*$", "", lines[at])
                depth += bare.count("{") - bare.count("}") if 'extern "C"' not in bare else 0
                at += 1
            code = "\n".join(lines[begin:at])
            if names_in(code) and not re.search(r"^#\s*(if|else|elif|include)", code, re.MULTILINE):
                yield Part("code", code)


def names_in(code: str) -> list[str]:
    """What a declaration is called: functions and types, else macros; those that only fill a struct are not named."""
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", code, flags=re.DOTALL)
    macros = _MACRO.findall(bare)
    declared = re.sub(r"^#.*(?:\\\n.*)*$", "", bare, flags=re.MULTILINE)
    found = [next(filter(None, match)) for match in _NAME.findall(declared)]
    return list(dict.fromkeys(found or macros))


def _prose(text: str, places: dict[str, str]) -> str:
    """A comment as Markdown: names are code, links where this page has them; indented lines are a block of code."""

    def name(match: re.Match[str]) -> str:
        word = match[0].strip("`")
        target = places.get(word.removesuffix("()"))
        return f"[`{word}`](#{target})" if target else f"`{word}`"

    def line_of(line: str) -> str:
        at, out = 0, []
        for match in _CODE.finditer(line):
            out += [re.sub(r"([\\*_<>\[\]#])", r"\\\1", line[at : match.start()]), name(match)]
            at = match.end()
        return "".join([*out, re.sub(r"([\\*_<>\[\]#])", r"\\\1", line[at:])])

    out: list[str] = []
    inside = False
    for line in text.split("\n"):
        code = line.startswith("    ")
        if code != inside:
            out.append("```c" if code else "```")
        out.append(line[4:] if code else line_of(line))
        inside = code
    return "\n".join([*out, "```"] if inside else out)


def page_of(text: str, title: str) -> str:
    """The page, as Markdown of MyST. The first comment is of the whole header."""
    found = list(parts(text))
    places = {name: f"c-{name.lower()}" for part in found if part.kind == "code" for name in names_in(part.text)}
    out = [f"# {title}"]
    if found and found[0].kind == "prose":
        out.append(_prose(found.pop(0).text, places))
    before: list[str] = []  # prose that waits for its declaration
    level = "##"
    for part in found:
        if part.kind == "prose":
            before.append(_prose(part.text, places))
        elif part.kind == "section":
            out.append(_prose(part.text, places))
        elif part.kind == "title":
            out += [*before, f"## {part.text}"]
            before, level = [], "###"
        else:
            names = names_in(part.text)
            out += [f"({places[name]})=" for name in names]
            out += [f"{level} " + ", ".join(f"`{name}`" for name in names), *before, f"```c\n{part.text}\n```"]
            before = []
    return "\n\n".join([*out, *before]) + "\n"
