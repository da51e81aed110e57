import json
import shutil

import nbformat
import pytest

from dit_repro.book.chapters import chapters
from dit_repro.book.harvest import harvest, published
from dit_repro.book.lint import MAX_BYTES, lint, notebook_problems
from dit_repro.book.new_chapter import new_chapter
from dit_repro.book.provenance import sealed


def read(book):
    return nbformat.read(book / "book" / "01_good.ipynb", 4)


def found(book) -> str:
    return "\n".join(map(str, lint(book)))


def edit(book, change):
    """Change the committed notebook in place, as an editor would."""
    notebook = read(book)
    change(notebook, [cell for cell in notebook.cells if cell.cell_type == "code"])
    nbformat.write(notebook, book / "book" / "01_good.ipynb")


def test_a_harvested_book_passes_lint_and_has_neither_injected_cell_nor_run_metadata(good_book):
    assert lint(good_book) == []
    text = (good_book / "book" / "01_good.ipynb").read_text()
    assert "papermill" not in text and "injected" not in text and "language_info" not in text
    code = [cell for cell in read(good_book).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, 9))[:len(code)]
    assert code[-2].outputs == [nbformat.v4.new_output("stream", name="stdout", text="a line\nanother\n")]
    assert code[-3].metadata["mystnb"] == {"image": {"alt": "a flat line"}}
    made = read(good_book).metadata["dit_repro"]
    assert made["parameters"] == {"profile": "smoke", "flag": True, "num_steps": None} and made["seconds"] > 0


def test_harvesting_twice_and_harvesting_an_equal_run_leave_the_same_bytes(good_book, executed):
    def everything():
        return {path: path.read_bytes() for folder in ("book", "figures") for path in (good_book / folder).rglob("*")
                if path.is_file()}
    first, runs = everything(), sorted((executed / "_runs").iterdir())
    assert {path.name for path in first} >= {"01_good.ipynb", "01_good.smoke.json", "level.png", "level.json"}
    harvest(good_book, runs[2])
    assert everything() == first
    shutil.copytree(runs[0] / "01_good", good_book / "other" / "01_good")     # same seed, another kernel
    harvest(good_book, good_book / "other")
    assert everything() == first


def test_only_a_whole_run_of_this_code_is_harvested(good_book, executed):
    runs = sorted((executed / "_runs").iterdir())
    with pytest.raises(ValueError, match="02_killed did not run to its end"):
        harvest(executed, runs[0])
    source = good_book / "book" / "01_good.py"
    source.write_text(source.read_text().replace("[1, 0]", "[1, 2]"))
    with pytest.raises(ValueError, match="01_good has changed since"):
        harvest(good_book, runs[2])
    with pytest.raises(FileNotFoundError, match="no chapter of this book"):
        harvest(good_book, good_book / "book")


def test_a_run_without_one_of_its_pictures_is_refused_before_the_old_one_goes(good_book, executed):
    shutil.copytree(sorted((executed / "_runs").iterdir())[2] / "01_good", good_book / "bad" / "01_good")
    (good_book / "bad" / "01_good" / "figures" / "level.png").unlink()
    with pytest.raises(ValueError, match=r"level\.png is missing; run 01_good again"):
        harvest(good_book, good_book / "bad")
    assert (good_book / "figures" / "level.png").is_file()


def test_the_record_of_a_run_decides_whether_it_is_harvested(good_book, executed):
    shutil.copytree(sorted((executed / "_runs").iterdir())[2] / "01_good", good_book / "bad" / "01_good")
    record = good_book / "bad" / "01_good" / "status.json"
    whole = record.read_text()
    record.write_text(whole.replace('"profile": "smoke"', '"profile": "gpu-rehearsal"', 1))
    with pytest.raises(ValueError, match=r"a rehearsal is not published.*that it rehearses, gpu$"):
        harvest(good_book, good_book / "bad")
    record.write_text(whole[:-20])
    with pytest.raises(ValueError, match=r"status\.json is damaged .*run the chapter again"):
        harvest(good_book, good_book / "bad")


def test_prose_may_change_after_the_run_without_making_outputs_stale(good_book, executed):
    source = good_book / "book" / "01_good.py"
    source.write_text(source.read_text().replace("A question?", "A better question?"))
    assert "differs from 01_good.py" in found(good_book) and "STALE" not in found(good_book)
    harvest(good_book, sorted((executed / "_runs").iterdir())[2])
    assert lint(good_book) == [] and "A better question?" in read(good_book).cells[0].source


def test_edited_code_makes_outputs_and_verdicts_stale(good_book):
    source = good_book / "book" / "01_good.py"
    source.write_text(source.read_text().replace("[1, 0]", "[1, 2]"))
    assert "STALE" in found(good_book) and "book/scoreboard.md: out of date" in found(good_book)


def plant_output(notebook, code):
    code[4].outputs[-1]["data"]["image/png"] = code[3].outputs[-1]["data"]["image/png"]


def plant_injected(notebook, code):
    notebook.cells.insert(2, nbformat.v4.new_code_cell("profile = 'gpu'", metadata={"tags": ["injected-parameters"]}))


def plant_error(notebook, code):
    code[3].outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[]))


def plant_stderr(notebook, code):
    code[3].outputs.append(nbformat.v4.new_output("stream", name="stderr", text="UserWarning: beware"))


def plant_order(notebook, code):
    code[3].execution_count, code[4].execution_count = 9, 3


def plant_unexecuted(notebook, code):
    code[4].execution_count, code[4].outputs = None, []


def plant_widget(notebook, code):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "lost"}}
    code[3].outputs.append(nbformat.v4.new_output("display_data", view))


def plant_widget_state(notebook, code):
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def plant_stamp(notebook, code):
    notebook.metadata["dit_repro"]["device"] = "H200"


def plant_setting(notebook, code):
    made = notebook.metadata["dit_repro"]
    notebook.metadata["dit_repro"] = sealed({**made, "parameters": {**made["parameters"], "num_steps": 50}})


def plant_reference(notebook, code):
    notebook.cells[0].source += "\nSee [figure 1.2](#fig-level)."


def plant_lost_figure(notebook, code):
    code[4].outputs[-1]["data"]["text/markdown"] = "**Figure 1.1.** The level."


def plant_size(notebook, code):
    code[3].outputs.append(nbformat.v4.new_output("stream", name="stdout", text="x" * MAX_BYTES))


def plant_package(notebook, code):
    notebook.metadata["dit_repro"] = sealed({**notebook.metadata["dit_repro"], "package": "0" * 16})


@pytest.mark.parametrize("fault, message", [
    (plant_output, "outputs were changed by hand"), (plant_injected, "injected by papermill"),
    (plant_error, "ends in an error: ValueError"), (plant_stderr, "writes to stderr"),
    (plant_order, "once each, in order"), (plant_unexecuted, "never run"),
    (plant_widget, "shows a widget, which is dead in a page"), (plant_widget_state, "holds widget state"),
    (plant_stamp, "its stamp (profile, parameters, device ...) was changed by hand"),
    (plant_setting, "warning: was run with num_steps = 50, not with its profile's own settings"),
    (plant_reference, "says 'figure 1.2' of #fig-level, which is figure 1.1"),
    (plant_lost_figure, "refers to #fig-level, which no output shows"),
    (plant_size, "at most 1,500,000"), (plant_package, "warning: was made with another version of dit_repro"),
])
def test_lint_names_a_fault_planted_in_the_committed_notebook(good_book, fault, message):
    edit(good_book, fault)
    assert message in found(good_book)


@pytest.mark.parametrize("text", [
    "saved to /home/ada/runs/one", "'/workspace/run'", "/nfs/ada/x", "=/lustre/ada", "/gpfs/p", "(/storage/a/b)",
    "/srv/a/b", "/export/a/b", "/kaggle/input/x", "/scratch/ada", "/volumes/ada", "<td>/opt/x/y</td>",
    "file:///home/ada/x", r"C:\Users\ada", r"'D:\\data\\latents'", "C:/Users/ada",
])
def test_lint_names_a_path_of_one_machine(good_book, text):
    edit(good_book, lambda notebook, code: code[3].outputs.append(
        nbformat.v4.new_output("display_data", {"text/html": text})))
    assert "shows a path of one machine: " in found(good_book)


@pytest.mark.parametrize("text", [
    "https://arxiv.org/abs/2212.09748", "DiT-B/2/4", "read/write/seek", "images/s per core", "$f:\\mathbb{R}^n$",
    '<img src="data:image/webp;base64,aa+/home/ada/x/y==">', "</td></tr>", "1/2", "$\\frac{a}{b}/c/d$", "and/or/not",
])
def test_lint_takes_no_url_formula_or_picture_for_a_path(good_book, text):
    edit(good_book, lambda notebook, code: code[3].outputs.append(
        nbformat.v4.new_output("display_data", {"text/html": text})))
    assert "a path of one machine" not in found(good_book)


@pytest.mark.parametrize("old, new, message", [
    ("#     name: python3\n", "#     name: other\n", "no kernelspec named python3"),
    ('tags=["parameters"]', "", 'must carry the tag "parameters"'),
    ('profile: str = "laptop"', 'size: str = "laptop"', "must declare `profile"),
    ("run = start(globals())", "run = None", "must follow the parameters cell"),
    ('print("another")', "# !false", "hides a shell command's failure"),
    ('print("another")', "1\n" * 30, "more than 25 lines"),
    ("# # Good", "# Good", "opens with the title"),
    ("(#fig-level)", "(#fig-levels)", "refers to #fig-levels; the chapter's figures are level"),
    ('run.record("half"', 'run.record("third"', "STALE"), ('print("another")', "print(", "line 48 is not valid Python"),
])
def test_lint_names_a_broken_contract_in_the_source(good_book, old, new, message):
    source = good_book / "book" / "01_good.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    assert message in found(good_book)


def test_lint_sees_chapters_that_no_reader_can_reach_and_pages_that_do_not_exist(good_book):
    shutil.copy(good_book / "book" / "01_good.py", good_book / "book" / "02_hidden.py")
    (good_book / "book" / "index.md").unlink()
    assert "02_hidden.py: not in _toc.yml" in found(good_book) and "book/index does not exist" in found(good_book)


def plant_value(results):
    results["metrics"]["half"]["value"] = 0.51


def plant_interval(results):
    results["metrics"]["half"]["interval"] = [0.49, 0.51]


def plant_seeds(results):
    results["metrics"]["half"]["seeds"] = 30


def plant_profile(results):
    results["profile"] = "paper"


def plant_device(results):
    results["device"] = "H200"


@pytest.mark.parametrize("fault", [plant_value, plant_interval, plant_seeds, plant_profile, plant_device])
def test_lint_sees_results_typed_by_hand(good_book, fault):
    path = good_book / "book" / "_results" / "01_good.smoke.json"
    results = json.loads(path.read_text())
    fault(results)
    path.write_text(json.dumps(results))
    assert "01_good.smoke.json: was changed by hand" in found(good_book)


def test_lint_sees_a_caption_or_a_picture_changed_by_hand_and_a_picture_that_is_gone(good_book):
    note, picture = (good_book / "figures" / f"level.{kind}" for kind in ("json", "png"))
    before = note.read_text()
    note.write_text(before.replace("The level", "A level"))
    assert "figures/level.json: it or its picture was changed by hand" in found(good_book)
    note.write_text(before)
    assert lint(good_book) == []
    picture.write_bytes(b"another")
    assert "figures/level.json: it or its picture was changed by hand" in found(good_book)
    (good_book / "README.md").write_text("![a level](figures/level.jpg)")
    assert "README.md: shows figures/level.jpg, which does not exist" in found(good_book)


def test_numbers_made_with_an_older_package_are_flagged_with_their_commit(good_book):
    path = good_book / "book" / "_results" / "01_good.smoke.json"
    results = json.loads(path.read_text())
    path.write_text(json.dumps(sealed({**results, "package": "0" * 16})))
    assert f"warning: was measured at commit {results['commit']} with another version of dit_repro" in found(good_book)


def test_a_text_that_is_to_decide_a_claim_is_named(good_book):
    path = good_book / "book" / "_results" / "01_good.smoke.json"
    results = json.loads(path.read_text())
    results["metrics"]["half"] = {"value": "0.5"}
    path.write_text(json.dumps(sealed(results)))
    assert "claim half expects a number, 0.5 ± 0.01, but 01_good records half = '0.5'" in found(good_book)


def test_outputs_that_lint_would_refuse_are_not_harvested(good_book, executed):
    shutil.copytree(sorted((executed / "_runs").iterdir())[2] / "01_good", good_book / "bad" / "01_good")
    path = good_book / "bad" / "01_good" / "notebook.ipynb"
    notebook = nbformat.read(path, 4)
    plant_stderr(notebook, [cell for cell in notebook.cells if cell.cell_type == "code"])
    nbformat.write(notebook, path)
    before = (good_book / "book" / "01_good.ipynb").read_bytes()
    for check in (False, True):
        with pytest.raises(ValueError, match="writes to stderr"):
            harvest(good_book, good_book / "bad", check=check)
    assert (good_book / "book" / "01_good.ipynb").read_bytes() == before
    harvest(good_book, good_book / "bad", results_only=True)      # its numbers are sound
    assert (good_book / "book" / "01_good.ipynb").read_bytes() == before


def test_a_checked_run_is_not_published(good_book, executed):
    results, run = good_book / "book" / "_results" / "01_good.smoke.json", sorted((executed / "_runs").iterdir())[2]
    results.unlink()
    assert harvest(good_book, run, check=True) == ["01_good"] and not results.exists()
    assert harvest(good_book, run) == ["01_good"] and results.exists()


def test_carriage_returns_are_overwritten_as_on_a_terminal(executed, tmp_path):
    shutil.copytree(sorted((executed / "_runs").iterdir())[2] / "01_good", tmp_path / "01_good")
    notebook = nbformat.read(tmp_path / "01_good" / "notebook.ipynb", 4)
    printing = next(cell for cell in notebook.cells if cell.source.startswith("print"))
    printing.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)
                        for text in ("10%\r", "50%\r100%\n", "done\r\n")]
    nbformat.write(notebook, tmp_path / "01_good" / "notebook.ipynb")
    page = published(chapters(executed)[0], tmp_path / "01_good")
    assert page.cells[-2].outputs[0].text == "100%\ndone\r\n"


def test_a_new_chapter_obeys_the_contract_and_only_lacks_a_run(good_book):
    chapter = new_chapter(good_book, 12, "Why the loss is flat")
    assert chapter.name == "12_why_the_loss_is_flat"
    assert [c.name for c in chapters(good_book)] == ["01_good", "12_why_the_loss_is_flat"]
    problems = lint(good_book)
    assert len(problems) == 1 and "12_why_the_loss_is_flat.ipynb: has cells that were never run" in str(problems[0])
    assert notebook_problems(chapters(good_book)[0], read(good_book)) == []
    with pytest.raises(FileExistsError, match="chapter 12 exists already"):
        new_chapter(good_book, 12, "Another")
