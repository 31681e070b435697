"""MkDocs hook: pages from outside docs/, and links between files of the repository.

The pages are written for GitHub, with links relative to their files. Here a link to a page that the
site has becomes one to that page, and a link to any other file becomes one to the repository.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = PurePosixPath("docs")
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/scaling_model.md": "scaling_model.md",
}  # path in the repository -> path in the site
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are not in docs/."""
    pictures = {f"benchmarks/{path.name}": None for path in ROOT.glob("benchmarks/*.png")}
    for source, page in (PAGES | {name: name for name in pictures}).items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to the site's pages, or to files of the repository."""
    here = page.file.src_uri
    sources = {site: source for source, site in PAGES.items()}
    source = PurePosixPath(sources.get(here, str(DOCS / here)))

    def replace(found: re.Match[str]) -> str:
        opening, target = found.groups()
        if "://" in target or target.startswith(("mailto:", "/")):
            return found[0]
        path = normpath(str(source.parent / target))
        site = PAGES.get(path, relpath(path, DOCS) if path.startswith("docs/") else path)
        if files.get_file_from_path(site):
            return opening + relpath(site, PurePosixPath(here).parent)
        return f"{opening}{config.extra['social'][0]['link']}/blob/main/{path}"

    return LINK.sub(replace, markdown)
