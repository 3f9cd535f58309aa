"""Makes a site of docs/: README is the first page, settings are a page made of the code, linked files come along."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
sys.path.insert(0, str(REPOSITORY))

from grpo.config.command_line import describe_option  # noqa: E402
from grpo.config.programs import PROGRAMS  # noqa: E402

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)((?:#[^)]*)?)\)")
_SOURCE = "files/"  # the site's folder of files of the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, the page of settings, and every file of the repository that a page links to."""
    files.append(File.generated(config, "index.md", content=(REPOSITORY / "README.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    pages = [*files.documentation_pages()]
    for page in pages:  # grows while it is read
        for _, target, _ in _LINK.findall(page.content_string):
            path = _target(page.src_uri, target)
            if path.is_file() and not path.is_relative_to(DOCS):
                name = _SOURCE + path.relative_to(REPOSITORY).as_posix()
                if files.get_file_from_path(name) is None:
                    files.append(added := File.generated(config, name, abs_src_path=str(path)))
                    pages += [added] * added.is_documentation_page()
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the same file within the site. A folder's link becomes its text."""
    up = "../" * page.file.src_uri.count("/")

    def within(found: re.Match) -> str:
        path = _target(page.file.src_uri, found[2])
        if path.is_dir():
            return found[1]
        inside = path.is_relative_to(DOCS)
        name = path.relative_to(DOCS if inside else REPOSITORY).as_posix()
        return f"[{found[1]}]({up}{'' if inside else _SOURCE}{name}{found[3]})"

    return _LINK.sub(within, markdown)


def _target(page: str, link: str) -> Path:
    """Return the file in the repository that a page's link means."""
    if page == "index.md":
        return (REPOSITORY / link).resolve()
    place = REPOSITORY / page.removeprefix(_SOURCE) if page.startswith(_SOURCE) else DOCS / page
    return (place.parent / link).resolve()


def settings_page() -> str:
    """Return a table of every group of settings, as --help all shows them."""
    lines = ["# Settings", "", "Every setting of every program, by group: `--name value`, or a line of a YAML file."]
    shown: set[str] = set()
    for program in PROGRAMS:
        for section in (part for part in reversed(program.__mro__) if "HEADING" in vars(part)):
            new = [field for field in fields(section) if field.name not in shown]
            if not new:
                continue
            shown |= {field.name for field in new}
            lines += ["", f"## {section.HEADING[0].upper()}{section.HEADING[1:]}", "", "| setting | |", "|---|---|"]
            hints = get_type_hints(section)
            for field in new:
                text = describe_option(field, hints[field.name]).replace("|", "\\|")
                lines.append(f"| `{field.name}` | {text} |")
    return "\n".join([*lines, ""])
