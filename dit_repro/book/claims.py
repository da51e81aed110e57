"""Every claim of the sources against what the chapters recorded: verdicts are computed, never typed."""
import ast
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path

from dit_repro.book.chapters import DATA_PARAMETERS, PROFILES, Chapter, chapters
from dit_repro.book.provenance import code_hash
from dit_repro.files import atomic_write

CLAIMS_OUTPUT = {"dit_repro": "claims"}        # output metadata: this table is computed again when claims change
VERDICTS = ("reproduced", "direction only", "undecided", "not reproduced", "contradicted", "stale", "not run")
SOURCES = {"paper": "DiT paper", "post": "replication post", "lesson": "U-Net lesson",
           "diagnosis": "instability diagnosis", "blog": "unstable-diffusion blog"}
SCOPES = ("exact", "direction", "arithmetic")


@dataclass(frozen=True)
class Claim:
    """One statement of a source, and the number that decides it."""
    id: str
    claim: str
    source: str                       # a key of SOURCES
    place: str                        # where in the source
    notebook: str                     # the chapter that measures it
    metric: str                       # the name given to run.record there
    needs: str = "laptop"             # the smallest profile that can decide it
    scope: str = "exact"              # exact: the claimed quantity; direction: the same effect at a smaller scale;
    expect: float | None = None       # arithmetic: the source's own number, computed again
    rel_tol: float | None = None
    abs_tol: float | None = None
    below: float | None = None
    above: float | None = None
    between: list | None = None

    def __post_init__(self):
        forms = [name for name in ("expect", "below", "above", "between") if getattr(self, name) is not None]
        bounds = [self.expect, self.rel_tol, self.abs_tol, self.below, self.above, *(self.between or ())]
        problem = (
            f"source must be one of {', '.join(SOURCES)}" if self.source not in SOURCES else
            f"needs must be one of {', '.join(PROFILES)}" if self.needs not in PROFILES else
            f"scope must be one of {', '.join(SCOPES)}" if self.scope not in SCOPES else
            "give one of expect, below, above, between" if len(forms) != 1 else
            "expect needs one of rel_tol and abs_tol, and nothing else has one"
            if (self.rel_tol is None) + (self.abs_tol is None) != (1 if forms == ["expect"] else 2) else
            "expectations are numbers; YAML reads 1e-3 as text, so write 1.0e-3"
            if not all(bound is None or type(bound) in (int, float) for bound in bounds) else
            "between is [low, high]" if self.between and not self.between[0] < self.between[1] else
            "a claim may not hold |, which ends a table cell" if "|" in self.claim + self.place else None)
        if problem:
            raise ValueError(f"claim {self.id}: {problem}")

    def holds(self, value) -> bool:
        """Whether a measured value meets the expectation; bounds are strict, tolerances inclusive.

        A bool counts as 0 or 1 where 0 or 1 is expected. ValueError for any other value that is not a number.
        """
        if (isinstance(value, bool) and self.expect not in (0, 1)) or not isinstance(value, (bool, int, float)):
            raise ValueError(f"claim {self.id} expects a number, {self.expectation}, but {self.notebook} records "
                             f"{self.metric} = {value!r}")
        if self.expect is not None:
            allowed = self.abs_tol if self.abs_tol is not None else self.rel_tol * abs(self.expect)
            return abs(value - self.expect) <= allowed
        if self.between is not None:
            return self.between[0] <= value <= self.between[1]
        return value < self.below if self.below is not None else value > self.above

    @property
    def one_sided(self) -> bool:
        return self.below is not None or self.above is not None

    @property
    def expectation(self) -> str:
        if self.expect is not None:
            tolerance = f"{self.abs_tol:,}" if self.abs_tol is not None else f"{self.rel_tol * 100:g}%"
            return f"{self.expect:,}" + ("" if self.abs_tol == 0 else f" ± {tolerance}")
        if self.between is not None:
            return "{:,} to {:,}".format(*self.between)
        return f"below {self.below:,}" if self.below is not None else f"above {self.above:,}"


def number(value) -> str:
    """A value as it stands in a table."""
    if not isinstance(value, float):
        return f"{value:,}" if type(value) is int else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def load_claims(root: Path) -> list[Claim]:
    """The entries of book/claims.yml; ValueError naming the claim that is not well formed, or given twice."""
    import yaml
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)   # ten times faster, where libyaml was built in
    known = {field.name for field in fields(Claim)}
    claims = []
    for entry in yaml.load((root / "book" / "claims.yml").read_text(encoding="utf-8"), loader):
        if wrong := set(entry) - known:
            raise ValueError(f"claim {entry.get('id')}: unknown field {', '.join(sorted(wrong))}; "
                             f"the fields are {', '.join(sorted(known))}")
        try:
            claims.append(Claim(**entry))
        except TypeError as error:
            raise ValueError(f"claim {entry.get('id')}: {error}") from None
    ids = [claim.id for claim in claims]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise ValueError(f"claims.yml holds these ids twice: {', '.join(sorted(twice))}")
    return claims


def load_results(root: Path) -> dict[str, list[dict]]:
    """Harvested results of each chapter, one a profile.

    Each is marked `stale` when the chapter's code has changed since, and `changed` holds the parameters that were given
    another value than the profile's.
    """
    results = {}
    for chapter in chapters(root):
        current = code_hash(chapter.notebook) if chapter.source.is_file() else None
        for profile in PROFILES:
            path = root / "book" / "_results" / f"{chapter.name}.{profile}.json"
            if path.is_file():
                result = json.loads(path.read_text(encoding="utf-8"))
                stale = result["code"] != current
                changed = {} if stale else chapter.changed(result["parameters"])
                results.setdefault(chapter.name, []).append({**result, "stale": stale, "changed": changed})
    return results


def judge(claim: Claim, results: list[dict]) -> tuple[str, dict | None]:
    """The verdict, and the result that decided it: the largest profile that recorded the metric, fresh before stale.

    A run with changed parameters decides nothing, whatever its profile is called. Of a claim that a value is above or
    below a bound nothing is decided where the value's interval has the bound inside.
    """
    usable = [result for result in results if _is_large_enough(claim, result) and not result["changed"]]
    if not usable:
        return "not run", None
    result = max(usable, key=lambda result: (not result["stale"], PROFILES.index(result["profile"])))
    if result["stale"]:
        return "stale", result
    entry = result["metrics"][claim.metric]
    if claim.one_sided and len({claim.holds(value) for value in (entry["value"], *entry.get("interval", ()))}) > 1:
        return "undecided", result
    if not claim.holds(entry["value"]):
        return ("contradicted" if claim.scope == "arithmetic" else "not reproduced"), result
    return ("direction only" if claim.scope == "direction" else "reproduced"), result


def _is_large_enough(claim: Claim, result: dict) -> bool:
    return claim.metric in result["metrics"] and result["profile"] in PROFILES[PROFILES.index(claim.needs):]


def _measured(claim: Claim, result: dict | None, results: list[dict]) -> str:
    if result is None:
        ran = next((settings(other["changed"]) for other in results if _is_large_enough(claim, other)), "")
        return f"needs profile {claim.needs}" + (f"; a run with {ran} decides nothing" if ran else "")
    entry = result["metrics"][claim.metric]
    parts = [f"**{number(entry['value'])}**"]
    if "interval" in entry:
        parts.append(f"[{number(entry['interval'][0])}, {number(entry['interval'][1])}]")
    if "seeds" in entry:
        parts.append(f"{entry['seeds']} seed" + "s" * (entry["seeds"] != 1))
    parts.append(result["profile"] + (f" on {result['device'].split(',')[0]}" if "device" in result else ""))
    return ", ".join(parts) + (f". {entry['note']}" if "note" in entry else "")


def _table(claims: list[Claim], results: list[dict], link=None) -> str:
    lines = ["| claim | source | measured | expected | verdict |", "|---|---|---|---|---|"]
    for claim in claims:
        verdict, result = judge(claim, results)
        word = _badge(verdict)
        where = link(claim) if link and result else None
        lines.append(f"| {claim.claim} | {SOURCES[claim.source]}, {claim.place} | "
                     f"{_measured(claim, result, results)} | {claim.expectation} | "
                     f"{f'[{word}]({where})' if where else word} |")
    return "\n".join(lines)


def _badge(verdict: str) -> str:
    return f'<span class="verdict {verdict.replace(" ", "-")}">{verdict}</span>'


def settings(parameters: dict) -> str:
    """Parameters as they stand in a sentence."""
    return ", ".join(f"{name} = {value}" for name, value in parameters.items())


def made_with(results: list[dict]) -> str:
    """A line for each harvested profile of a chapter: on what, from which code, with which data."""
    return "\n".join(
        f"- `{result['profile']}` on {result['device']}, commit `{result['commit']}`, package `{result['package']}`"
        + (f", {settings(given)}" if (given := {name: result["parameters"][name] for name in DATA_PARAMETERS
                                                 if result["parameters"].get(name)} | result["changed"]) else "")
        for result in results)


def chapter_table(claims: list[Claim], chapter: str, results: list[dict]) -> str:
    """The claims table that ends a chapter, as Markdown."""
    mine = [claim for claim in claims if claim.notebook == chapter]
    return _table(mine, results) if mine else f"No claim of claims.yml names the chapter {chapter}."


def recording_cells(chapter: Chapter) -> dict[str, str | None]:
    """Metrics that the source records under a literal name, each with the heading of its section."""
    return {call.args[0].value: heading for call, heading in chapter.calls("record")
            if call.args and isinstance(call.args[0], ast.Constant)}


def scoreboard(root: Path, claims: list[Claim], results: dict[str, list[dict]]) -> str:
    """book/scoreboard.md: the tally, then one table a chapter."""
    known = {chapter.name: chapter for chapter in chapters(root)}
    page = ["# Scoreboard", "",
            "<!-- Written by `dit-repro scoreboard`; change claims.yml or harvest a run instead. -->", "",
            "What the sources say, what was measured, and a verdict computed from the two. A claim that holds at a "
            "smaller scale than the source's is marked *direction only*. A verdict links to the section that "
            "measured it. A run decides a claim only at the profile that the claim needs, or a larger one, and with "
            "that profile's own settings. A number from older code is *stale*.",
            "", tally(claims, results), ""]
    names = sorted({claim.notebook for claim in claims})
    titles = {name: _title(known[name]) if name in known and known[name].source.is_file()
              else f"{name}, not written yet" for name in names}
    page += ["| chapter | verdicts |", "|---|---|"]
    page += [f"| [{titles[name].split(':')[0]}](#{_slug(titles[name])}) | "
             f"{tally([c for c in claims if c.notebook == name], results)} |" for name in names]
    page.append("")
    for name in names:
        chapter = known.get(name)
        sections = recording_cells(chapter) if chapter and chapter.source.is_file() else {}

        def link(claim, name=name, sections=sections):
            heading = sections.get(claim.metric)
            return f"{name}.ipynb" + (f"#{_slug(heading)}" if heading else "")
        title = f"[{titles[name]}]({name}.ipynb)" if sections else titles[name]
        mine, found = [c for c in claims if c.notebook == name], results.get(name, [])
        page += [f"## {title}", "", tally(mine, results), "",
                 *([made_with(found), ""] if found else []), _table(mine, found, link), ""]
    return "\n".join(page)


def tally(claims: list[Claim], results: dict[str, list[dict]]) -> str:
    """How many claims have each verdict, as one line of Markdown."""
    verdicts = [judge(claim, results.get(claim.notebook, []))[0] for claim in claims]
    counts = [f"**{verdicts.count(verdict)}** {_badge(verdict)}" for verdict in VERDICTS if verdict in verdicts]
    return f"{len(claims)} claim" + "s" * (len(claims) != 1) + ": " + ", ".join(counts) + "."


def _title(chapter: Chapter) -> str:
    heading = re.search(r"^# (.+)$", chapter.notebook.cells[0].source, re.M)
    return f"{int(chapter.name[:2])} {heading[1]}" if heading else chapter.name


def _slug(heading: str) -> str:
    """The anchor that MyST and GitHub give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def update(root: Path, check: bool = False) -> list[str]:
    """Write the scoreboard, the claims tables of the pairs, and what README and landing page quote.

    They quote the tally, and recorded numbers: `<!-- 03.loss_end:.2f -->0.08<!-- / -->` is chapter 3's.
    Returns the files that were out of date; with `check` nothing is written.
    """
    import nbformat
    claims, results = load_claims(root), load_results(root)
    texts = {root / "book" / "scoreboard.md": scoreboard(root, claims, results)}
    for page in (root / "book" / "index.md", root / "README.md"):
        if page.is_file():
            text = re.sub(r"(<!-- tally -->\n).*?(<!-- /tally -->)", rf"\g<1>{tally(claims, results)}\n\g<2>",
                          page.read_text(encoding="utf-8"), flags=re.S)
            texts[page] = re.sub(r"(<!-- (\d\d)\.(\w+):(\S*) -->).*?(<!-- / -->)", lambda found:
                                 found[1] + _quoted(*found.groups()[1:4], results) + found[5], text, flags=re.S)
    for chapter in chapters(root):
        if chapter.pair.is_file():
            notebook = nbformat.read(chapter.pair, 4)
            before = nbformat.writes(notebook)
            refresh_tables(notebook, chapter.name, claims, results)
            if nbformat.writes(notebook) != before:
                texts[chapter.pair] = nbformat.writes(notebook) + "\n"
    changed = [path for path, text in texts.items()
               if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in changed if not check else ():
        with atomic_write(path) as file:
            file.write(texts[path])
    return [path.relative_to(root).as_posix() for path in changed]


def _quoted(number: str, metric: str, spec: str, results: dict[str, list[dict]]) -> str:
    """A recorded number as a page quotes it, of the smallest profile harvested; ValueError where there is none."""
    for result in (r for name, found in results.items() if name.startswith(f"{number}_") for r in found):
        if metric in result["metrics"]:
            return format(result["metrics"][metric]["value"], spec)
    raise ValueError(f"a page quotes {number}.{metric}, which no harvested run of chapter {number} recorded: correct "
                     "the name in README.md or book/index.md, or harvest a run")


def refresh_tables(notebook, chapter: str, claims: list[Claim], results: dict[str, list[dict]]) -> None:
    """Compute the claims tables among a notebook's outputs again, from all harvested results."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("metadata", {}).get("dit_repro") == CLAIMS_OUTPUT["dit_repro"]:
                text = chapter_table(claims, chapter, results.get(chapter, []))
                output["data"] = {"text/markdown": text, "text/plain": text}
