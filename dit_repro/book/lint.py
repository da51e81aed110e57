"""Checks on the committed book that take seconds and no torch: pairs, stamps, outputs, parameters, claims."""
import ast
import getpass
import json
import re
from dataclasses import dataclass
from pathlib import Path

from dit_repro.book.api import PAGE
from dit_repro.book.chapters import Chapter, chapters, toc_files
from dit_repro.book.claims import CLAIMS_OUTPUT, load_claims, load_results, recording_cells, settings, update
from dit_repro.book.provenance import code_hash, digest, package_hash, sealed
from dit_repro.files import sha256

MAX_BYTES, AIM_BYTES, MAX_LINES = 1_500_000, 500_000, 25
# /a/b, wherever it is mounted, but not in a URL, a word or a formula; file:///a; C:\\a\\b.
_PATH = re.compile(r"(?<![\w.:/})\]])/[A-Za-z_][\w.-]*/[\w.-]+|\bfile:/+\S+|\b[A-Z]:(?:\\+|/)(?:Users\b|[\w.-]+[\\/])")
_EMBEDDED = re.compile(r"base64,[\w+/=]+")                  # holds slashes, but no path
_REFERENCE = re.compile(r"\[([^\]]*)\]\(#fig-([\w-]+)\)")
_CAPTION = re.compile(r'<a id="fig-([\w-]+)"></a>\*\*Figure ([\d.]+)\.\*\*')


@dataclass(frozen=True)
class Problem:
    """One finding: where, what, and whether it keeps the book from being published."""
    where: str
    what: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {'' if self.is_error else 'warning: '}{self.what}"


def lint(root: Path) -> list[Problem]:
    """All findings for the committed book under `root`, chapter by chapter, then the claims."""
    import nbformat
    problems, listed = [], chapters(root)
    for path in sorted((root / "book").glob("[0-9][0-9]_*")):
        if path.suffix in (".py", ".ipynb") and path.stem not in [chapter.name for chapter in listed]:
            problems.append(Problem(path.name, "not in _toc.yml, so no reader can reach it"))
    for file in toc_files(root):
        if file != PAGE and not any((root / f"{file}{suffix}").is_file() for suffix in (".py", ".md", ".ipynb")):
            problems.append(Problem("_toc.yml", f"{file} does not exist"))
    for chapter in listed:
        if chapter.source.is_file():
            try:
                package_hash(chapter.source)
            except ValueError as error:     # not valid Python: nothing else can be said
                return [*problems, Problem("a chapter or its imports", str(error))]
    for chapter in listed:
        if chapter.source.is_file():
            if broken := source_problems(chapter):      # first things first
                problems += broken
                continue
            if not chapter.pair.is_file():
                problems.append(Problem(chapter.name, "has no .ipynb; run it and harvest the run"))
                continue
            problems += notebook_problems(chapter, nbformat.read(chapter.pair, 4))
            size = chapter.pair.stat().st_size
            if size > AIM_BYTES:
                problems.append(Problem(chapter.name, f"the notebook has {size:,} bytes; at most {MAX_BYTES:,}, "
                                        f"better under {AIM_BYTES:,}: fewer or smaller pictures", size > MAX_BYTES))
    return problems + claim_problems(root)


def source_problems(chapter: Chapter) -> list[Problem]:
    """What in the reviewed source breaks the notebook contract."""
    def problem(what):
        problems.append(Problem(chapter.source.name, what))
    problems = []
    if not re.search(r"^#     name: python3$", chapter.source.read_text(encoding="utf-8"), re.M):
        problem("the header has no kernelspec named python3, so papermill cannot choose a kernel")
    try:
        if "profile" not in chapter.parameters or chapter.parameters["profile"].annotation != "str":
            problem('the parameters cell must declare `profile: str = "laptop"`')
    except ValueError as error:
        problem(str(error))
    code = [cell for cell in chapter.notebook.cells if cell.cell_type == "code"]
    if not any("start(globals())" in cell.source for cell in code[:3]):
        problem("`run = start(globals())` must follow the parameters cell")
    if not chapter.notebook.cells[0].source.startswith("# "):
        problem("the first cell must be Markdown that opens with the title")
    names = [call.args[2] if len(call.args) > 2 else next((k.value for k in call.keywords if k.arg == "name"), None)
             for call, _ in chapter.calls("figure")]
    if all(isinstance(name, ast.Constant) for name in names):
        known = {name.value for name in names}
        for cell in chapter.notebook.cells:
            for _, name in _REFERENCE.findall(cell.source):
                if name not in known:
                    problem(f"refers to #fig-{name}; the chapter's figures are {', '.join(sorted(known)) or 'none'}")
    for index, cell in enumerate(code, 1):
        if len(cell.source.splitlines()) > MAX_LINES:
            problem(f"code cell {index} has more than {MAX_LINES} lines; move definitions into dit_repro")
        if re.search(r"^(!|%%(bash|sh|script))", cell.source, re.M):
            problem(f"code cell {index} hides a shell command's failure; use subprocess.run(..., check=True)")
        if "raises-exception" in cell.metadata.get("tags", []):
            problem(f"code cell {index} is tagged raises-exception; catch the expected error with try/except")
    return problems


def notebook_problems(chapter: Chapter, notebook) -> list[Problem]:
    """What keeps a notebook with outputs from being evidence for the chapter's source."""
    def problem(what, is_error=True):
        problems.append(Problem(chapter.pair.name, what, is_error))
    problems, made = [], notebook.metadata.get("dit_repro")
    if any("injected-parameters" in cell.metadata.get("tags", []) for cell in notebook.cells):
        problem("holds a cell injected by papermill")
    if _cells(notebook) != _cells(chapter.notebook):
        problem(f"differs from {chapter.source.name}; harvest a run of it")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not made or any(cell.execution_count is None for cell in code):
        problem("has cells that were never run; `dit-repro run` it and `dit-repro harvest` the run")
        return problems
    if made != sealed(made):
        problem("its stamp (profile, parameters, device ...) was changed by hand; harvest the run again")
        return problems
    if made["code"] != code_hash(chapter.notebook):
        problem("STALE: its outputs were made by other code than the source; run it again and harvest")
    elif changed := chapter.changed(made["parameters"]):
        problem(f"was run with {settings(changed)}, not with its profile's own settings, so it decides no claim", False)
    if made["outputs"] != outputs_hash(notebook):
        problem("its outputs were changed by hand after the run; harvest the run again")
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        problem("its cells were not run once each, in order")
    if made["package"] != package_hash(chapter.source):
        problem("was made with another version of dit_repro; run it again before publishing", is_error=False)
    if "widgets" in notebook.metadata:
        problem("holds widget state, which changes with every run; harvest the run again")
    problems += _reference_problems(chapter, notebook)
    for index, output in ((index, output) for index, cell in enumerate(code, 1) for output in cell.outputs):
        where = f"code cell {index} "
        if output.output_type == "error":
            problem(where + f"ends in an error: {output.ename}")
        elif output.output_type == "stream" and output.name == "stderr":
            problem(where + f"writes to stderr: {output.text.strip()[:80]!r}")
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            problem(where + "shows a widget, which is dead in a page: show a Filmstrip or a figure there, and the "
                    "widget only `if run.live`")
        text = "\n".join([output.get("text", ""), *(_EMBEDDED.sub("", str(value)) for mime, value
                                                    in output.get("data", {}).items() if mime[:6] != "image/")])
        if found := _PATH.search(text):
            problem(where + f"shows a path of one machine: {found[0]}")
        user = getpass.getuser()
        if user != "root" and len(user) > 3 and re.search(rf"\b{re.escape(user)}\b", text):
            problem(where + f"shows the user name {user}")
    return problems


def _reference_problems(chapter: Chapter, notebook) -> list[Problem]:
    """References to figures that the run did not show, or showed under another number."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    texts += [output.data["text/markdown"] for cell in notebook.cells for output in cell.get("outputs", ())
              if "text/markdown" in output.get("data", {})]
    labels = dict(_CAPTION.findall("\n".join(texts)))
    problems = []
    for text, name in _REFERENCE.findall("\n".join(texts)):
        said = re.findall(r"\d+\.\d+", text)
        if name not in labels:
            problems.append(Problem(chapter.pair.name, f"refers to #fig-{name}, which no output shows"))
        elif said not in ([], [labels[name]]):
            problems.append(Problem(chapter.pair.name, f"says {text!r} of #fig-{name}, which is figure {labels[name]}"))
    return problems


def claim_problems(root: Path) -> list[Problem]:
    """Claims that no notebook can decide, and pages that do not say what the results say."""
    try:
        claims, results = load_claims(root), load_results(root)
    except ValueError as error:
        return [Problem("claims", str(error))]
    problems = []
    for chapter in chapters(root):
        for path in sorted((root / "book" / "_results").glob(f"{chapter.name}.*.json")):
            problems += result_problems(path, chapter)
        if not chapter.source.is_file():
            continue
        recorded = set(recording_cells(chapter)) | {
            name for result in results.get(chapter.name, []) for name in result["metrics"]}
        problems += [Problem("claims.yml", f"{claim.id}: {chapter.name} never records {claim.metric}")
                     for claim in claims if claim.notebook == chapter.name and claim.metric not in recorded]
    try:
        problems += [Problem(page, "out of date; run `dit-repro scoreboard`") for page in update(root, check=True)]
    except ValueError as error:
        problems.append(Problem("claims.yml", str(error)))
    return problems + picture_problems(root)


def result_problems(path: Path, chapter: Chapter) -> list[Problem]:
    """Whether one file of recorded numbers is as the run left it, and which package made it."""
    result = json.loads(path.read_text(encoding="utf-8"))
    where = f"_results/{path.name}"
    if result != sealed(result) or path.stem != f"{chapter.name}.{result['profile']}":
        return [Problem(where, "was changed by hand; harvest again")]
    if chapter.source.is_file() and result["package"] != package_hash(chapter.source):
        return [Problem(where, f"was measured at commit {result['commit']} with another version of dit_repro; run it "
                        "again before you rely on it", is_error=False)]
    return []


def picture_problems(root: Path) -> list[Problem]:
    """Whether every picture in figures/ is the one its run made, and every picture shown on the first pages exists."""
    problems = []
    for note in sorted((root / "figures").glob("*.json")):
        made = json.loads(note.read_text(encoding="utf-8"))
        picture = root / "figures" / made.get("file", "")
        if made != sealed(made) or not picture.is_file() or sha256(picture) != made["sha256"]:
            problems.append(Problem(f"figures/{note.name}", "it or its picture was changed by hand; harvest again"))
        for part, made_of in made.get("parts", {}).items():
            if not (file := note.with_name(f"{part}.json")).is_file() or made_of != json.loads(
                    file.read_text(encoding="utf-8")).get("sha256"):
                problems.append(Problem(f"figures/{note.name}", f"shows an old {part}; harvest again"))
    for page in (root / "README.md", root / "book" / "index.md"):
        for link in re.findall(r"\]\(([\w./-]*figures/[\w.-]+)\)", page.read_text("utf-8")) if page.is_file() else ():
            if not (page.parent / link).is_file():
                problems.append(Problem(page.name, f"shows {link}, which does not exist"))
    return problems


def outputs_hash(notebook) -> str:
    """Hash of all outputs and counts, without the claims tables, which are computed again when claims change."""
    return digest([[cell.execution_count,
                    [output for output in cell.outputs
                     if output.get("metadata", {}).get("dit_repro") != CLAIMS_OUTPUT["dit_repro"]]]
                   for cell in notebook.cells if cell.cell_type == "code"])


def _cells(notebook) -> list:
    return [(cell.cell_type, cell.source.strip(), cell.metadata.get("tags", [])) for cell in notebook.cells]
