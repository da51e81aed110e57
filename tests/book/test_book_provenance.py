import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from dit_repro.book import provenance
from dit_repro.book.provenance import code_hash, commit, device, package_hash, portable


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package of the same name whose files may be changed."""
    root = tmp_path / "dit_repro"
    for name, text in {
        "__init__.py": "", "files.py": "", "cli.py": "from dit_repro.left import deep",
        "left/__init__.py": "from .near import thing", "left/near.py": "def f():\n    from dit_repro import files",
        "left/deep/__init__.py": "", "left/embedded/weights.bin": "1", "right/__init__.py": "", "right/far.py": "",
        "book/__init__.py": "from dit_repro.book.lint import lint", "book/lint.py": "import dit_repro.right",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(provenance, "__file__", str(root / "book" / "provenance.py"))
    return root


@pytest.mark.parametrize("changed, matters", [
    ("left/near.py", True), ("left/__init__.py", True), ("files.py", True), ("left/embedded/weights.bin", True),
    ("__init__.py", True), ("book/__init__.py", True),
    ("right/far.py", False), ("right/__init__.py", False), ("cli.py", False), ("book/lint.py", False),
])
def test_the_package_hash_follows_a_chapters_imports_and_nothing_else(package, tmp_path, changed, matters):
    chapter = tmp_path / "chapter.py"
    chapter.write_text("import numpy\nfrom dit_repro.left import thing\nfrom dit_repro.book import start\n")
    before = package_hash(chapter)
    (package / changed).write_text((package / changed).read_text() + "\n# changed")
    assert (package_hash(chapter) != before) == matters


def test_code_hash_ignores_prose_and_injected_parameters(book):
    from dit_repro.book.chapters import chapters
    notebook = chapters(book)[0].notebook
    before = code_hash(notebook)
    notebook.cells[0].source = "# Other prose"
    notebook.cells[1].source += "\n"
    notebook.cells.insert(2, nbformat.v4.new_code_cell("flag = False", metadata={"tags": ["injected-parameters"]}))
    assert code_hash(notebook) == before
    notebook.cells[1].source += "other: int = 1"
    assert code_hash(notebook) != before


def test_the_commit_says_when_the_package_or_a_chapter_differs_from_it(tmp_path):
    assert commit(tmp_path) == "none"
    shutil.copytree(Path(__file__).parent, tmp_path / "dit_repro", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    clean = commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "notes.txt").write_text("no part of the package")
    assert commit(tmp_path) == clean
    (tmp_path / "dit_repro" / "new.py").write_text("")
    assert commit(tmp_path) == clean + "-dirty"


def test_published_parameters_hold_no_path_of_one_machine():
    assert portable({"data": "/home/ada/imagenet", "name": "a/b", "steps": 3}) == {
        "data": ".../imagenet", "name": "a/b", "steps": 3}


def test_a_device_is_named_without_machine_paths():
    assert device() and "/" not in device().replace("w/", "")
