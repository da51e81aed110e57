"""Checks on the committed book that take seconds and no torch: pairs, stamps, outputs, parameters, claims."""
import getpass
import re
from dataclasses import dataclass
from pathlib import Path

from dit_repro.book.chapters import Chapter, chapters, toc_files
from dit_repro.book.claims import CLAIMS_OUTPUT, load_claims, load_results, recording_cells, update
from dit_repro.book.provenance import code_hash, digest, package_hash

MAX_BYTES, AIM_BYTES, MAX_LINES = 1_500_000, 500_000, 25
_PATH = re.compile(r"(?<![\w.:/])/(?:home|Users|root|tmp|mnt|media|data|work|scratch|var|opt|usr|private|content)/"
                   r"[\w.-]+|\b[A-Z]:\\\w+")


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
        if not any((root / f"{file}{suffix}").is_file() for suffix in (".py", ".md", ".ipynb")):
            problems.append(Problem("_toc.yml", f"{file} does not exist"))
    for chapter in listed:
        if chapter.source.is_file():
            try:
                package_hash(chapter.source)
            except ValueError as error:     # not valid Python: nothing else can be said
                return [*problems, Problem("a chapter or its imports", str(error))]
    for chapter in listed:
        if chapter.source.is_file():
            problems += source_problems(chapter)
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
    if made["code"] != code_hash(chapter.notebook):
        problem("STALE: its outputs were made by other code than the source; run it again and harvest")
    if made["outputs"] != outputs_hash(notebook):
        problem("its outputs were changed by hand after the run; harvest the run again")
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        problem("its cells were not run once each, in order")
    if made["package"] != package_hash(chapter.source):
        problem("was made with another version of dit_repro; run it again before publishing", is_error=False)
    states = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for index, output in ((index, output) for index, cell in enumerate(code, 1) for output in cell.outputs):
        where = f"code cell {index} "
        if output.output_type == "error":
            problem(where + f"ends in an error: {output.ename}")
        elif output.output_type == "stream" and output.name == "stderr":
            problem(where + f"writes to stderr: {output.text.strip()[:80]!r}")
        view = output.get("data", {}).get("application/vnd.jupyter.widget-view+json")
        if view and view["model_id"] not in states:
            problem(where + "shows a widget whose state was not saved; it would vanish from the page")
        text = "\n".join([output.get("text", ""), *(str(value) for mime, value in output.get("data", {}).items()
                                                    if mime.startswith("text/"))])
        if found := _PATH.search(text):
            problem(where + f"shows a path of one machine: {found[0]}")
        user = getpass.getuser()
        if user != "root" and len(user) > 3 and re.search(rf"\b{re.escape(user)}\b", text):
            problem(where + f"shows the user name {user}")
    return problems


def claim_problems(root: Path) -> list[Problem]:
    """Claims that no notebook can decide, and pages that do not say what the results say."""
    try:
        claims = load_claims(root)
    except ValueError as error:
        return [Problem("claims.yml", str(error))]
    problems, results = [], load_results(root)
    for chapter in chapters(root):
        problems += [Problem(f"_results/{chapter.name}.{result['profile']}.json", "was changed by hand; harvest again")
                     for result in results.get(chapter.name, []) if result["digest"] != digest(result["metrics"])]
        if not chapter.source.is_file():
            continue
        recorded = set(recording_cells(chapter)) | {
            name for result in results.get(chapter.name, []) for name in result["metrics"]}
        problems += [Problem("claims.yml", f"{claim.id}: {chapter.name} never records {claim.metric}")
                     for claim in claims if claim.notebook == chapter.name and claim.metric not in recorded]
    return problems + [Problem(page, "out of date; run `dit-repro scoreboard`") for page in update(root, check=True)]


def outputs_hash(notebook) -> str:
    """Hash of all outputs and counts, without the claims tables, which are computed again when claims change."""
    return digest([[cell.execution_count,
                    [output for output in cell.outputs
                     if output.get("metadata", {}).get("dit_repro") != CLAIMS_OUTPUT["dit_repro"]]]
                   for cell in notebook.cells if cell.cell_type == "code"])


def _cells(notebook) -> list:
    return [(cell.cell_type, cell.source.strip(), cell.metadata.get("tags", [])) for cell in notebook.cells]
