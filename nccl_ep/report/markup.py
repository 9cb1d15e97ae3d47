"""Pieces of HTML that the sections share."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def section(title: str, text: str, *parts: str) -> str:
    """text: plain words. parts: HTML."""
    about = f"<p>{html.escape(text)}</p>" if text else ""
    return f"<section><h2>{html.escape(title)}</h2>{about}{''.join(parts)}</section>"


class Html(str):
    """A cell that is HTML already."""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1, wide: Sequence[int] = ()) -> str:
    """left: how many columns are words. wide: columns whose words may go over several lines."""

    def cells(tag: str, row: Sequence[Any]) -> str:
        made = []
        for i, each in enumerate(row):
            kinds = " ".join(name for name, is_so in (("left", i < left), ("wide", i in wide)) if is_so)
            attribute = (' scope="col"' if tag == "th" else "") + (f' class="{kinds}"' if kinds else "")
            made.append(f"<{tag}{attribute}>{each if isinstance(each, Html) else html.escape(str(each))}</{tag}>")
        return "".join(made)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>" if any(header) else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
