"""What mkdocs.yml needs besides: pages from the root of the repository, and links that hold on GitHub and in the site.

Pages link to each other, and to files of the repository, by paths relative to themselves. In the site, links to what is
no page of it lead to the repository.
"""

import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
# Files of the repository's root that are pages too.
ROOT_PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config):
    """The configuration with a link to the repository. `repo_url` would have readers' browsers ask GitHub's API."""
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": REPOSITORY, "name": "Repository"}]
    return config


def on_files(files: Files, config) -> Files:
    """The files of the site, with the pages from the root of the repository."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The text of a page with links as the site has them."""
    folder = "" if page.file.src_uri in ROOT_PAGES.values() else "docs"

    def link(match: re.Match) -> str:
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if "://" in target or not (ROOT / path).exists():
            return match[0]  # elsewhere; or no link at all, or a broken one, which the strict build names
        if path.startswith("docs/"):
            return f"]({path.removeprefix('docs/')}{anchor})"
        if path in ROOT_PAGES:
            return f"]({ROOT_PAGES[path]}{anchor})"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}{anchor})"

    return LINK.sub(link, markdown)
