"""The site's pages and links: what mkdocs calls while it builds, and what the tests ask about links.

A page links to files as they lie in the repository, so that links work there too. The site has README.md as its first
page, docs/ as it is, and everything else that some page links to, such as examples and tables, under `source/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FRONT = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}  # pages from outside docs/, and their names
LINK = re.compile(r"(\]\(|\bsrc=\"|\bsrcset=\")([^)\s\"]+)([)\"])")  # of Markdown, and of pictures in HTML
SECTION = re.compile(  # of the navigation, whose title is a link: its label has an icon only
    r'md-nav__container">\s*<a [^>]*>\s*<span class="md-ellipsis">(?P<title>[^<]+)</span>\s*</a>\s*'
    r'<label[^>]* id="(?P<label>\w+)"'
)
FENCE = re.compile(r"^(```.*?^```)", flags=re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: the pages and files that are not in docs/."""
    from mkdocs.structure.files import File

    wanted = set(FRONT)
    looked: set[str] = set()
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.inclusion.is_included()]
    todo = [*FRONT, *pages]
    while todo:
        page = todo.pop()
        looked.add(page)
        for _, target, _ in links((ROOT / page).read_text()):
            path = in_repository(page, target)
            if path is not None and not path.startswith("docs/") and (ROOT / path).is_file():
                wanted.add(path)
                todo += [path] if path.endswith(".md") and path not in looked else []
    for path in sorted(wanted):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs: links as they lie in the repository become links of the site. Search finds documentation only."""
    own = page.file.src_uri
    if own.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    return rewritten(markdown, repository_path(own), own)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """mkdocs: names and languages that the theme does not give: of the search, of sections that are pages, of Chinese
    pages."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    for section in SECTION.finditer(output):
        output = output.replace(f'aria-labelledby="{section["label"]}"', f'aria-label="{section["title"].strip()}"')
    is_chinese = page.file.src_uri.startswith("zh/") or page.file.src_uri == FRONT["README.zh-CN.md"]
    return output.replace('<html lang="en"', '<html lang="zh-CN"') if is_chinese else output


def rewritten(text: str, page: str, own: str) -> str:
    """The text of a page of the repository, with its links as the page `own` of the site has them."""

    def change(match: re.Match[str]) -> str:
        path = in_repository(page, match[2])
        if path is None or not (ROOT / path).is_file():
            return match[0]
        _, _, anchor = match[2].partition("#")
        to = os.path.relpath(site_path(path), PurePosixPath(own).parent)
        return f"{match[1]}{to}{'#' + anchor if anchor else ''}{match[3]}"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(change, part) for part in parts)


def links(text: str) -> list[tuple[str, str, str]]:
    """All links of a page that are not inside a block of code; the second of each is where it leads."""
    return [found for part in FENCE.split(text) if not part.startswith("```") for found in LINK.findall(part)]


def in_repository(page: str, target: str) -> str | None:
    """The path of what a page links to; None: it is elsewhere, or on the page itself."""
    path = target.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    return os.path.normpath(PurePosixPath(page).parent / path)


def site_path(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return FRONT.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}")


def repository_path(path: str) -> str:
    """The counterpart of site_path."""
    for own, name in FRONT.items():
        if path == name:
            return own
    return path.removeprefix("source/") if path.startswith("source/") else f"docs/{path}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    outside = "\n".join(part for part in FENCE.split(text) if not part.startswith("```"))
    for heading in re.findall(r"^#+ +(.*?)\s*$", outside, flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", heading).lower())
        found.add(words.replace(" ", "-"))
    return found
