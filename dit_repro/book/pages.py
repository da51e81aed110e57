"""HTML pages with Jupyter Book, built from a copy of the book, so that a build never touches what is committed."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dit_repro.book.api import PAGE, api_page
from dit_repro.book.chapters import chapters, toc_files
from dit_repro.book.harvest import publish, unexecuted
from dit_repro.files import workspace

# All that the pages would load from a CDN: one npm package and the file wanted from it. No page holds a widget.
MATHJAX, MATHJAX_FILE = "mathjax@3.2.2", "es5/tex-svg-full.js"


def build_pages(root: Path, run: Path | None = None, offline: bool = False, strict: bool = True) -> Path:
    """Build _build/html and return its index.html. `run` puts the notebooks of a run in place of the committed ones.

    offline: pages that load nothing from the network. strict: a warning fails the build. Raises RuntimeError with the
    end of the log when it fails.
    """
    import nbformat
    import yaml
    source = root / "_build" / "source"
    shutil.rmtree(root / "_build", ignore_errors=True)
    for name in ("book", "figures"):
        if (root / name).is_dir():
            shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copy(root / "_toc.yml", source)
    if PAGE in toc_files(source):
        (source / f"{PAGE}.md").write_text(api_page(root / "dit_repro"), encoding="utf-8")
    if run:
        publish(source, run)
    for chapter in chapters(source):
        if chapter.source.is_file() and not chapter.pair.is_file():     # so that links to it lead somewhere
            nbformat.write(unexecuted(chapter), chapter.pair)
    downloads = {path.name: path.read_bytes() for path in (source / "book").glob("*.ipynb")}
    for name in downloads:
        _link_figures(source / "book" / name)
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    options = config["sphinx"]["config"]
    options["html_theme_options"].update(repository_buttons(root))
    if offline:
        options.update(_local_mathjax(source / "book" / "_static" / "vendor"))
    (source / "_config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", source, "--all", "-q",
               "--path-output", root, *(["-W", "-n", "--keep-going"] if strict else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    index = root / "_build" / "html" / "index.html"
    if done.returncode or not index.is_file():
        raise RuntimeError("the pages could not be built:\n" + (done.stdout + done.stderr)[-4000:])
    for name, content in downloads.items():
        (index.parent / "_sources" / "book" / name).write_bytes(content)
    for page in (index.parent / "book").glob("*.html"):     # "edit this page" leads to what people write
        text = re.sub(r'(/edit/[^"]*/\d\d_\w+)\.ipynb"', r'\1.py"', page.read_text(encoding="utf-8"))
        page.write_text(re.sub(r'(/edit/[^"]*/)scoreboard\.md"', r'\1claims.yml"', text), encoding="utf-8")
    return index


def repository_buttons(root: Path) -> dict:
    """Theme options for "repository" and "edit this page", where origin is on GitHub; else none, so no dead button."""
    if not shutil.which("git"):
        return {}
    remote = subprocess.run(["git", "-C", str(root), "remote", "get-url", "origin"], capture_output=True, text=True)
    match = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(\.git)?\s*$", remote.stdout)
    if not match:
        return {}
    branch = subprocess.run(["git", "-C", str(root), "symbolic-ref", "--short", "HEAD"], capture_output=True, text=True)
    return {"repository_url": f"https://github.com/{match[1]}", "repository_branch": branch.stdout.strip() or "main",
            "use_repository_button": True, "use_edit_page_button": True, "path_to_docs": "."}


def _local_mathjax(folder: Path) -> dict:
    """Put MathJax into `folder` and return the Sphinx option that uses it. npm fetches it once."""
    cache = workspace() / "vendor"
    kept = cache / MATHJAX
    if not kept.is_dir():
        if not shutil.which("npm"):
            raise FileNotFoundError(f"offline pages need {MATHJAX}, and npm to fetch it once; install Node.js")
        partial = kept.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fetched = subprocess.run(["npm", "pack", "--silent", MATHJAX], cwd=partial, capture_output=True, text=True)
        if fetched.returncode:
            raise RuntimeError(f"npm could not fetch {MATHJAX}, which offline pages need once: {fetched.stderr}")
        shutil.unpack_archive(next(partial.glob("*.tgz")), partial, filter="data")
        partial.rename(kept)
    folder.mkdir(parents=True, exist_ok=True)
    target = shutil.copy(kept / "package" / MATHJAX_FILE, folder)
    return {"mathjax_path": f"vendor/{Path(target).name}"}


def _link_figures(pair: Path) -> None:
    """Turn the anchor before each caption, which GitHub hides, into a target that the strict build checks links to."""
    import nbformat
    notebook = nbformat.read(pair, 4)
    for data in (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())):
        if "text/markdown" in data:
            data["text/markdown"] = re.sub(r'<a id="(fig-[\w-]+)"></a>', r"(\1)=\n", data["text/markdown"])
    nbformat.write(notebook, pair)
