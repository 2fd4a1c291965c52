"""A page for every source file that a page links to, so that links work in the repository and on the site alike."""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\((?P<target>\.\./[^)#\s]+)\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json", ".txt": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of the documentation that is linked."""
    linked = {path for file in files.documentation_pages() for path in _outside(file.content_string, file.src_uri, config)}
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=_page(path, (_root(config) / path).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to such files at their pages."""
    del files
    here = page.file.src_uri

    def to_page(match: re.Match[str]) -> str:
        path = _path(match["target"], here)
        if not (_root(config) / path).is_file() or not _is_outside(match["target"], here):
            return match[0]
        return f"]({relpath(f'source/{path}.md', normpath(join(here, '..')))})"

    return _LINK.sub(to_page, markdown)


def _outside(markdown: str, here: str, config: MkDocsConfig) -> Iterator[str]:
    for match in _LINK.finditer(markdown):
        path = _path(match["target"], here)
        if _is_outside(match["target"], here) and (_root(config) / path).is_file():
            yield path


def _is_outside(target: str, here: str) -> bool:
    return normpath(join(here, "..", target)).startswith("../")


def _path(target: str, here: str) -> str:
    """Return where `target` is, from the root of the repository."""
    return normpath(join("docs", here, "..", target))


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent


def _page(path: str, text: str) -> str:
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n~~~~~~{{.{language} linenums=1}}\n{text}\n~~~~~~\n"
