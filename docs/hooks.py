"""What the site has beside the pages of docs/: the README as its home, and pages, plots and programs of other folders.

Pages are written for a checkout, where links lead from folder to folder. Here every file keeps its path, except that those of
docs/ are at the top: a link is followed in the checkout, and becomes the way between the two places on the site. A link that
leads to nothing on the site is a warning, which fails the build. Notebooks are executed.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
BESIDE_README = ("CONTRIBUTING.md", "RELEASING.md", "CHANGELOG.md", "CITATION.cff", "CITATION.bib")
TOP = {"README.md": "index.md"} | {name: name for name in BESIDE_README if (ROOT / name).is_file()}
BESIDE = ("README.md", "*/README.md", "*/*.md", "*/*.png", "*/images/*.png", "*/*.json", "*/*.toml", "*/*.py")
FENCED = re.compile(r"^(```.*?^```|<!--.*?-->)", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"(`[^`\n]+`)")
LINK = re.compile(r"\[([^\]\[]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    for name, place in TOP.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for path in sorted(
        path for folder in ("results", "experiments") for pattern in BESIDE for path in (ROOT / folder).glob(pattern)
    ):
        if (place := path.relative_to(ROOT).as_posix()) not in files.src_uris:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix == ".ipynb":
            page, pictures = notebook_page(path)
            files.append(File.generated(config, f"examples/{path.stem}.md", content=page))
            for name, content in pictures.items():
                files.append(File.generated(config, f"examples/{name}", content=content))
        if path.suffix in (".py", ".ipynb"):
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the checkout into links of the site, and angle brackets of formulas into text."""
    here = page.file.src_uri
    if page.parent is None:  # a tab of its own, with nothing to list beside it
        page.meta["hide"] = ["navigation"]
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.MULTILINE)  # a word for the tests
    parts = FENCED.split(markdown)
    parts[::2] = [_outside_fences(part, here, files) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write what docstrings have for help() as text: roles, and shapes as comments."""
    return re.sub(r":(?:class|func|meth|mod|attr):(<code>)", r"\1", html).replace("# shape: ", "Shape: ")


def _outside_fences(text: str, here: str, files: Files) -> str:
    pieces = QUOTED.split(text)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"<(?=\w+[, ] ?[^<>/=\n]*>)", "&lt;", pieces[i])
    return LINK.sub(lambda match: _linked(match[1], match[2], match[3] or "", here, files), "".join(pieces))


def _linked(text: str, target: str, anchor: str, here: str, files: Files) -> str:
    """A link with the way from one page to another, both at their places on the site. Folders and networks are only named."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_in_checkout(here)), target))
    places = [path, f"{path}/README.md", f"{path}.md"]
    if path.startswith("docs/"):
        places = [path.removeprefix("docs/")]
    if path.endswith(".ipynb") and here != path.removesuffix(".ipynb") + ".md":
        places = [path.removesuffix(".ipynb") + ".md"]
    if path in TOP:
        places = [TOP[path]]
    found = [place for place in places if place in files.src_uris]
    if not found and (path.endswith(".safetensors") or (ROOT / path).is_dir()):
        return text
    place = posixpath.relpath(found[0], posixpath.dirname(here) or ".") if found else target  # then mkdocs reports it
    return f"[{text}]({place}{anchor})"


def _in_checkout(place: str) -> str:
    """Where a page of the site is in the checkout."""
    if place in TOP.values():
        return next(name for name, other in TOP.items() if other == place)
    return place if place.startswith(("results/", "experiments/", "examples/")) else f"docs/{place}"


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page: execute it, and write its cells with what they print and draw. And the pictures, by name."""
    notebook = nbformat.read(path, as_version=4)
    quiet = ["--log-level=ERROR"]  # of the kernel, which warns that it talks to this process without encryption
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the kernel inherits it; small networks only wait for more threads
    NotebookClient(notebook, timeout=300, extra_arguments=quiet, resources={"metadata": {"path": str(ROOT)}}).execute()
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if printed := "".join(output.text for output in cell.outputs if output.get("name") == "stdout"):
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for output in cell.outputs:
            if "image/png" in (data := output.get("data", {})):
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell above draws]({name})")
    return "\n\n".join(parts) + f"\n\n[The notebook]({path.name})\n", pictures
