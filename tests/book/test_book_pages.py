import re
import subprocess
from html import unescape
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dit_repro.book.lint import lint
from dit_repro.book.pages import MATHJAX, MATHJAX_FILE, build_pages, repository_buttons
from dit_repro.cli import main

ROOT = Path(__file__).parents[2]


def test_a_strict_build_shows_figure_caption_prose_and_verdicts_and_leaves_the_book_alone(good_book):
    before = {path: path.read_bytes() for path in (good_book / "book").rglob("*") if path.is_file()}
    subprocess.run(["git", "init", "-q", "-b", "main", str(good_book)], check=True)
    subprocess.run(["git", "-C", str(good_book), "remote", "add", "origin", "git@github.com:ada/dit.git"], check=True)
    html = build_pages(good_book).parent
    page = unescape((html / "book" / "01_good.html").read_text())
    assert 'alt="a flat line"' in page and '<p id="fig-level"><strong>Figure 1.1.</strong> The level 0.5.' in page
    assert page.count('href="#fig-level"') == 2 and "(fig-level)=" not in page      # from Markdown and from run.say
    assert (html / "_sources/book/01_good.ipynb").read_bytes() == (good_book / "book/01_good.ipynb").read_bytes()
    assert "ada/dit/edit/main/./book/01_good.py" in page
    assert "ada/dit/edit/main/./book/claims.yml" in (html / "book" / "scoreboard.html").read_text()
    assert "One half is 0.50, from 0.4 to 0.6" in page and r"\(\frac{1}{2}\)" in page
    assert 'class="verdict reproduced">reproduced' in page and "provenance" in page
    scoreboard = (good_book / "_build" / "html" / "book" / "scoreboard.html").read_text()
    assert 'href="01_good.html#a-measured-section"' in scoreboard
    assert before == {path: path.read_bytes() for path in (good_book / "book").rglob("*") if path.is_file()}


def test_offline_pages_load_nothing_from_the_network(good_book, tmp_path, monkeypatch):
    monkeypatch.setenv("DIT_REPRO_WORKSPACE", str(tmp_path))
    kept = tmp_path / "vendor" / MATHJAX / "package" / MATHJAX_FILE      # as npm leaves it
    kept.parent.mkdir(parents=True)
    kept.write_text("// MathJax")
    loads = re.compile(r'(?:src="|rel="stylesheet"[^>]*href="|@import\s+|url\()(https?:)?//')
    assert loads.search('<script defer="defer" src="https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-mml-chtml.js">')
    html = build_pages(good_book, offline=True).parent
    assert [page.name for page in html.rglob("*.html") if loads.search(page.read_text())] == []
    assert "../_static/vendor/tex-svg-full.js" in (html / "book" / "01_good.html").read_text()
    assert (html / "_static" / "vendor" / "tex-svg-full.js").read_text() == "// MathJax"


def test_a_broken_reference_fails_the_strict_build(good_book):
    with open(good_book / "book" / "index.md", "a") as page:
        page.write("\nSee [nothing](nowhere.md), {cite}`nobody` and [figure 1.1](#fig-none).\n")
    with pytest.raises(RuntimeError, match=r"(?s)^(?=.*nowhere)(?=.*nobody)(?=.*fig-none)"):
        build_pages(good_book)


def test_pages_of_a_chapter_that_was_never_run_are_not_published(good_book, monkeypatch):
    monkeypatch.chdir(good_book)
    assert CliRunner().invoke(main, ["new-chapter", "2", "Second"]).exit_code == 0
    done = CliRunner().invoke(main, ["book"])
    assert done.exit_code == 1 and "02_second.ipynb: has cells that were never run" in done.output
    assert not (good_book / "_build").exists()


def test_repository_buttons_exist_only_where_they_lead_somewhere(tmp_path):
    subprocess.run(["git", "init", "-q", "-b", "trunk", str(tmp_path)], check=True)
    assert repository_buttons(tmp_path) == {}
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", "git@github.com:ada/dit.git"], check=True)
    buttons = repository_buttons(tmp_path)
    assert buttons["repository_url"] == "https://github.com/ada/dit" and buttons["repository_branch"] == "trunk"


def test_commands_report_errors_in_one_line_and_their_exit_code(good_book, monkeypatch):
    monkeypatch.chdir(good_book)
    assert CliRunner().invoke(main, ["lint"]).exit_code == 0
    assert CliRunner().invoke(main, ["scoreboard", "--check"]).output == "up to date\n"
    (good_book / "book" / "scoreboard.md").write_text("typed")
    done = CliRunner().invoke(main, ["scoreboard", "--check"])
    assert done.exit_code == 1 and "out of date" in done.output
    assert any("scoreboard.md: out of date" in str(problem) for problem in lint(good_book))
    done = CliRunner().invoke(main, ["run", "7"])
    assert done.exit_code == 1 and "unknown chapter '7'; the chapters are 01_good" in done.output


def test_the_conda_environment_agrees_with_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, libraries = environment["dependencies"]
    assert f'requires-python = "{python.removeprefix("python")}"' in text and pip == "pip"
    assert libraries == {"pip": ["-e .[test]"]} and "\ntest = [" in text
    lines = (ROOT / "environment.yml").read_text().splitlines()
    assert all("#" in line for line in lines if line.lstrip().startswith("- ") and not line.endswith(":"))


def test_the_continuous_check_is_a_strict_script_that_runs_every_gate():
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert script.stat().st_mode & 0o100 and "set -euo pipefail" in text
    for gate in ("ruff check", "lint-imports", "pytest", "dit-repro lint", "scoreboard --check",
                 "run --profile smoke --fresh", "dit-repro book"):
        assert f"\n{gate}" in text or f"dit-repro {gate}" in text
