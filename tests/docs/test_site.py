"""What `make docs` builds the site from: the table of contents has every page, the reference every public name."""

from __future__ import annotations

import importlib
import re

import pytest

from tests import ROOT
from tools.site import header, pages


def test_every_page_has_one_place_in_the_table_of_contents() -> None:
    told = [page for each in pages.NAVIGATION.values() for page in each]
    made = {f"reference/{module.rpartition('.')[2]}" for module in pages.MODULES} | set(pages.HEADERS)
    written = {str(path.relative_to(ROOT).with_suffix("")) for path in pages.sources() if path.suffix == ".md"}
    assert len(told) == len(set(told))
    assert made <= set(told)
    below_the_notebook = {page for page in written if page.startswith("docs/notebook/") and not page.endswith("README")}
    assert set(told) - made == written - below_the_notebook - {"README"}


def test_the_site_has_the_plots_and_traces_that_pages_link_to() -> None:
    here = set(pages.sources())
    linked = {
        (page.parent / link).resolve()
        for page in here
        if page.suffix == ".md"
        for link in re.findall(r"\]\(([^)#:]*records/plots/[^)#]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {".svg", ".png", ".gz"} <= {path.suffix for path in linked}
    assert linked <= here, linked - here


def test_the_reference_has_every_public_name_once() -> None:
    import nccl_ep
    from nccl_ep import deep_ep

    told = [(importlib.import_module(module), name) for module in pages.MODULES for name in pages.names_of(module)]
    assert {*nccl_ep.__all__, *deep_ep.__all__, "run_ranks", "ThreadGroup"} - {"__version__"} <= {
        name for _, name in told
    }
    classes = [value for module, name in told if callable(value := getattr(module, name))]
    assert len(classes) == len(set(classes))
    text = {module: pages.python_page(module) for module in pages.MODULES}
    assert ".. autofunction:: nccl_ep.dispatch\n" in text["nccl_ep"]
    assert ".. autoclass:: nccl_ep.deep_ep.ElasticBuffer\n" in text["nccl_ep.deep_ep"]
    assert ".. autoexception:: nccl_ep.MismatchError\n" in text["nccl_ep"]
    assert "Options of torch.compile" in text["nccl_ep"], "the comment of a constant"


@pytest.mark.parametrize(("path", "prefix"), zip(pages.HEADERS.values(), ("ncclEp(?!x)", "ncclEpx"), strict=True))
def test_the_reference_of_c_has_every_function_and_type_of_the_header(path: str, prefix: str) -> None:
    text = (ROOT / path).read_text()
    page = header.page_of(text, "a header")
    bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    functions = set(re.findall(rf"\b({prefix}\w+)\(", bare))
    types = set(re.findall(rf"\b({prefix}\w+_t)\b", bare))
    assert len(functions) >= 18 and len(types) >= 5
    places = set(re.findall(r"^\(c-(\w+)\)=$", page, re.MULTILINE))
    assert {name.lower() for name in functions | types} <= places
    links = set(re.findall(r"\]\(#c-(\w+)\)", page))
    assert links and links <= places


def test_a_header_becomes_sections_prose_and_declarations() -> None:
    text = """/* x.h: a header. */
#ifndef X_H_
#define X_H_
#include <stdint.h>

/* ---- Numbers. They are small. ----
 *
 * Say xMake(&x):
 *     x_t x = X_INIT; */

/* What a call returns. */
typedef int32_t xResult_t;
enum { X_OK = 0 /* well */ };

// Of one line,
// and of another, xResult_t.
typedef struct {
  int size; /* in bytes

               of all */

  int other;
} x_t;
#define X_INIT {0}
X_API xResult_t xMake(x_t* x, int (*callback)(void));
#endif
"""
    found = [(part.kind, part.text) for part in header.parts(text)]
    assert [kind for kind, _ in found] == ["prose", "title", "section", "prose", "code", "prose", "code"]
    assert found[1][1] == "Numbers" and found[2][1].startswith("They are small.")
    assert header.names_in(found[4][1]) == ["xResult_t"]
    assert header.names_in(found[6][1]) == ["x_t", "xMake"]
    page = header.page_of(text, "x.h")
    assert "```c\nx_t x = X_INIT;\n```" in page and "Of one line,\nand of another, [`xResult_t`](#c-xresult_t)." in page
    assert "#ifndef" not in page


@pytest.mark.parametrize("folder", ["docs", "docs/notebook"])
def test_links_to_headings_lead_to_one(folder: str) -> None:
    """As `make docs` sees them: a heading's words in small letters, with hyphens."""

    def anchors(text: str) -> set[str]:
        heads = re.findall(
            r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
        )
        return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}

    missing = []
    for path in (ROOT / folder).glob("*.md"):
        for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
            target = path.parent / name if name else path
            if anchor not in anchors(target.read_text()):
                missing.append(f"{path.name}: {name}#{anchor}")
    assert not missing
