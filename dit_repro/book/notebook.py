"""What a notebook calls: provenance, recorded numbers, prose filled from them, figures and verdicts."""
import base64
import html
import math
import os
import re
from functools import cached_property
from pathlib import Path

from dit_repro.book import provenance
from dit_repro.book.chapters import Chapter
from dit_repro.book.figures import encode, is_live
from dit_repro.files import atomic_write, project_root, workspace, write_json

# {name}, {name.low} or {name:.2f}; not \frac{a}, x_{t}, ^{2}, {eq}`label` nor a fenced ```{note}
_FIELD = re.compile(r"(?<![\w\\^}`])\{([A-Za-z]\w*)(?:\.(low|high))?(?::([^{}]*))?\}(?!`)")


def start(namespace: dict) -> "Run":
    """Begin a chapter: call it with `globals()` right after the parameters cell. Prints the provenance card."""
    import matplotlib.style
    matplotlib.style.use(Path(__file__).parent / "book.mplstyle")
    run = Run(_chapter_name(namespace), _parameters(namespace))
    run._show_card()
    return run


class Run:
    """One execution of one chapter: everything it measured, kept in one folder."""

    def __init__(self, chapter: str, parameters: dict):
        self.chapter = chapter
        self.parameters = parameters
        self.profile_name = parameters.get("profile", "laptop")
        batch = os.environ.get("DIT_REPRO_OUTPUT")
        self._once = bool(batch)     # in a batch run each name is recorded once; a cell run again in Lab replaces it
        self._folder = Path(batch) if batch else workspace() / "notebooks" / chapter
        self._results = {"metrics": {}, "figures": {}}
        self._figures_shown = {}

    @property
    def live(self) -> bool:
        """Whether somebody is at the notebook, so that a widget is of use; a page shows only what needs no kernel."""
        return is_live()

    @cached_property
    def _claims(self) -> list:
        from dit_repro.book.claims import load_claims
        return [claim for claim in load_claims(project_root()) if claim.notebook == self.chapter]

    def record(self, name: str, value, seeds=None, interval=None, note: str | None = None) -> None:
        """Keep a measured value under `name`, for prose, claims and the scoreboard.

        value: a number, a bool or a string; a tensor or array of one element is read out. seeds: the list of seeds, or
        how many. interval: (low, high) around the value, in its unit. Raises ValueError for a value that is not finite,
        an interval that does not hold it, for a value that cannot decide a claim about `name`, and in a batch run for a
        name recorded twice.
        """
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"metric name {name!r}: use lower-case letters, digits and _")
        if self._once and name in self._results["metrics"]:
            raise ValueError(f"{name} is already recorded in this run; give the second value its own name")
        entry = {"value": _plain(name, value)}
        for claim in self._claims:
            if claim.metric == name:
                claim.holds(entry["value"])
        if seeds is not None:
            entry["seeds"] = seeds if isinstance(seeds, int) else len(list(seeds))
        if interval is not None:
            low, high = (_plain(name, bound) for bound in interval)
            if not low <= entry["value"] <= high:
                raise ValueError(f"{name} = {entry['value']} lies outside its interval [{low}, {high}]")
            entry["interval"] = [low, high]
        if note is not None:
            entry["note"] = note
        self._results["metrics"][name] = entry
        self._save()

    def __getitem__(self, name: str):
        """The recorded value of `name`; KeyError listing what was recorded."""
        if name not in self._results["metrics"]:
            known = ", ".join(self._results["metrics"]) or "nothing"
            raise KeyError(f"{name} was not recorded; recorded so far: {known}")
        return self._results["metrics"][name]["value"]

    def fill(self, text: str) -> str:
        """`text` with {name}, {name:.2f}, {name.low} and {name.high} replaced by recorded values."""
        def value(match):
            name, bound, spec = match.groups()
            number = self[name]
            if bound:
                if "interval" not in self._results["metrics"][name]:
                    raise KeyError(f"{name} was recorded without an interval; record it with interval=(low, high)")
                number = self._results["metrics"][name]["interval"][bound == "high"]
            if spec is None:
                spec = "" if isinstance(number, (str, bool)) else "," if isinstance(number, int) else ".4g"
            return re.sub(r"^-(?=[0.]+%?$)", "+" if "+" in spec else "", format(number, spec))   # no "-0.0"
        return _FIELD.sub(value, text)

    def say(self, markdown: str) -> None:
        """Show Markdown with recorded values filled in, so that no number in the prose is typed."""
        from IPython.display import display
        text = self.fill(markdown.strip())
        display({"text/markdown": text, "text/plain": text}, raw=True)

    def figure(self, figure, caption: str, name: str, alt: str | None = None, export: bool = False) -> None:
        """Show a matplotlib figure or a PIL image, numbered, with its caption under it.

        caption and alt may hold {name} fields. name: a slug, unique in the chapter; prose refers to the figure with
        `[figure 3.1](#fig-name)`, and lint checks the name and the number. export: also publish the picture to figures/
        when the run is harvested. A picture too large for a page is stored smaller.
        """
        from IPython.display import display
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"figure name {name!r}: use lower-case letters, digits and -")
        caption, alt = self.fill(caption), self.fill(alt or caption)
        mime, data, width = encode(figure)
        number = self._figures_shown.setdefault(name, len(self._figures_shown) + 1)
        label = f"{int(self.chapter[:2])}.{number}" if self.chapter[:2].isdigit() else str(number)
        suffix = {"image/png": ".png", "image/jpeg": ".jpg"}[mime]
        with atomic_write(self._folder / "figures" / f"{name}{suffix}", "wb") as file:
            file.write(data)
        self._results["figures"][name] = {"file": name + suffix, "caption": caption, "alt": alt, "export": export}
        self._save()
        display({mime: base64.b64encode(data).decode(), "text/plain": alt}, raw=True,
                metadata={mime: {"width": width, "alt": alt}})
        text = f"**Figure {label}.** {caption}"
        display({"text/markdown": f'<a id="fig-{name}"></a>{text}', "text/plain": text}, raw=True)

    def claims(self) -> None:
        """Show this chapter's claims with verdicts computed from what this run recorded."""
        from IPython.display import display

        from dit_repro.book.claims import CLAIMS_OUTPUT, chapter_table
        source = project_root() / "book" / f"{self.chapter}.py"
        changed = Chapter(source).changed(self.parameters) if source.is_file() else {}
        text = chapter_table(self._claims, self.chapter, [{
            "profile": self.profile_name, "stale": False, "changed": changed, "metrics": self._results["metrics"]}])
        display({"text/markdown": text, "text/plain": text}, raw=True, metadata=CLAIMS_OUTPUT)

    def _save(self) -> None:
        write_json(self._folder / "results.json", self._results)

    def _show_card(self) -> None:
        from IPython.display import display
        root, shown = project_root(), provenance.portable(self.parameters)
        rows = {"chapter": self.chapter,
                "parameters": ", ".join(f"{name} = {value!r}" for name, value in shown.items()),
                "device": provenance.device(),
                "versions": ", ".join(f"{name} {version}" for name, version in provenance.versions().items()),
                "commit": provenance.commit(root)}
        if (source := root / "book" / f"{self.chapter}.py").is_file():
            rows["package"] = provenance.package_hash(source)
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(value, quote=False)}</td></tr>"
                        for name, value in rows.items())
        display({"text/html": f'<table class="provenance"><tbody>{cells}</tbody></table>',
                 "text/plain": "\n".join(f"{name:>10}: {value}" for name, value in rows.items())}, raw=True)


def _chapter_name(namespace: dict) -> str:
    """From the batch run, else from the file that VS Code, Jupyter or Python says it is running, else "scratch"."""
    if batch := os.environ.get("DIT_REPRO_OUTPUT"):
        return Path(batch).name
    file = namespace.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or namespace.get("__file__")
    return Path(file).stem if file else "scratch"


def _parameters(namespace: dict) -> dict:
    """The annotated names of the parameters cell with the values they have now, so overrides included."""
    names = namespace.get("__annotations__")
    if names is None and "__annotate__" in namespace:      # Python 3.14 keeps annotations in a function
        names = namespace["__annotate__"](1)
    if not names or "profile" not in names:
        raise ValueError("start(globals()) found no `profile: str = ...`; run the parameters cell first")
    return {name: namespace[name] for name in names}


def _plain(name: str, value):
    """`value` as a JSON scalar."""
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"{name}: record a number, bool or string, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} = {value}: record a finite number; say in a note that the quantity diverged")
    return value
