"""The chapters of the book: their order, their source, and the typed parameters they declare."""
import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PROFILES = ("smoke", "laptop", "gpu", "paper")    # in order of cost; a claim that needs one is met by a later one
REHEARSALS = ("gpu-rehearsal", "paper-rehearsal")  # they decide no claim
DATA_PARAMETERS = ("data", "autoencoder")          # where a profile's inputs lie on this machine
MODEL_PARAMETERS = ("reference", "official", "first_recipe", "clip")   # paths that chapters 7 and 9 score with
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}


@dataclass(frozen=True)
class Parameter:
    """One annotated literal of a parameters cell: `num_steps: int | None = None`."""
    name: str
    annotation: str
    default: object

    def cast(self, text: str):
        """The value of `-p name=text`, of the declared type; ValueError if the text is not one."""
        for kind in self.annotation.split("|"):
            try:
                return _cast(kind.strip(), text)
            except (ValueError, SyntaxError, KeyError):
                continue
        raise ValueError(f"parameter {self.name}={text!r} is not of type {self.annotation} "
                         f"(its default is {self.default!r})")


def _cast(kind: str, text: str):
    base, _, element = kind.partition("[")
    if base == "None":
        return {"none": None}[text.lower()]
    if base == "bool":
        return {"true": True, "false": False}[text.lower()]
    if base in ("int", "float", "str"):
        return _TYPES[base](text)
    value = ast.literal_eval(text)
    accepted = {"float": (int, float)}.get(element.rstrip("]"), _TYPES.get(element.rstrip("]"), object))
    if not isinstance(value, _TYPES[base]) or (base == "list" and not all(isinstance(v, accepted) for v in value)):
        raise ValueError
    return value


@dataclass(frozen=True)
class Chapter:
    """One notebook: the reviewed source book/NN_name.py and its pair with outputs, book/NN_name.ipynb."""
    source: Path

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def pair(self) -> Path:
        return self.source.with_suffix(".ipynb")

    @cached_property
    def notebook(self):
        """The source as an nbformat notebook without outputs."""
        import jupytext
        return jupytext.reads(self._text, fmt="py:percent")

    @cached_property
    def _text(self) -> str:
        if not self.source.is_file():
            raise FileNotFoundError(f"{self.source}: listed in _toc.yml, but there is no such chapter source")
        return self.source.read_text(encoding="utf-8")

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """What the cell tagged `parameters` declares, in order; ValueError if a line is not an annotated literal."""
        # Cut out by hand: a kernel asks for them too, and importing jupytext takes it two seconds and a half.
        cells = [cell.partition("\n") for cell in re.split(r"^# %%", self._text, flags=re.M)]
        cells = [code for head, _, code in cells if '"parameters"' in head]
        if len(cells) != 1:
            raise ValueError(f"{self.name}: one cell must carry the tag \"parameters\", found {len(cells)}")
        found = {}
        for node in ast.parse(cells[0]).body:
            try:
                parameter = Parameter(node.target.id, ast.unparse(node.annotation), ast.literal_eval(node.value))
                if {kind.strip().partition("[")[0] for kind in parameter.annotation.split("|")} - {*_TYPES, "None"}:
                    raise ValueError
            except (AttributeError, ValueError, TypeError):
                raise ValueError(f"{self.name}: the parameters cell may hold only `name: type = literal` with types "
                                 f"{', '.join(_TYPES)} or `| None`; found `{ast.unparse(node)}`") from None
            found[parameter.name] = parameter
        return found

    def changed(self, values: dict) -> dict:
        """The entries of `values` that are not the chapter's defaults, profile and what it is to look at aside."""
        given = ("profile", *DATA_PARAMETERS, *MODEL_PARAMETERS)
        return {name: value for name, value in values.items() if name not in given
                and name in self.parameters and value != self.parameters[name].default}

    def calls(self, method: str) -> list[tuple[ast.Call, str | None]]:
        """Every call of `something.method(...)` in the code cells, with the heading of the section it stands in."""
        heading, found = None, []
        for cell in self.notebook.cells:
            if cell.cell_type == "markdown":
                titles = re.findall(r"^#{1,4} +(.+)$", cell.source, re.M)
                heading = titles[-1] if titles else heading
            elif cell.cell_type == "code":
                nodes = ast.walk(ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.M)))
                found += [(node, heading) for node in nodes
                          if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == method]
        return found


def toc_files(root: Path) -> list[str]:
    """Every `root:` and `file:` entry of _toc.yml, in reading order, without suffix."""
    return re.findall(r"^[\s\-{]*(?:root|file):\s*([\w./-]+)", (root / "_toc.yml").read_text(encoding="utf-8"), re.M)


def chapters(root: Path) -> list[Chapter]:
    """The notebooks of the book, in the order of _toc.yml."""
    return [Chapter(root / f"{file}.py") for file in toc_files(root) if re.match(r"book/\d\d_", file)]


def select_chapters(root: Path, wanted=()) -> list[Chapter]:
    """The chapters named by number or full name ("3", "03", "03_first_50k_steps"); all of them for nothing named."""
    everything = chapters(root)
    chosen = []
    for name in wanted:
        match = [chapter for chapter in everything
                 if chapter.name == name or (name.isdigit() and int(chapter.name[:2]) == int(name))]
        if not match:
            raise ValueError(f"unknown chapter {name!r}; the chapters are {', '.join(c.name for c in everything)}")
        chosen += match
    return [chapter for chapter in everything if chapter in chosen] if wanted else everything


def cast_parameters(selected: list[Chapter], profile: str, pairs=(), everything=()) -> dict[str, dict]:
    """Typed overrides for each chapter from `key=value` texts, the profile among them.

    A parameter goes to the chapters that declare it. Raises ValueError for an unknown profile, a parameter that no
    selected chapter declares (naming those of `everything` that do), or a value of another type.
    """
    if profile not in (names := (*PROFILES, *REHEARSALS)):
        raise ValueError(f"unknown profile {profile!r}; the profiles are {', '.join(names)}")
    values = {chapter.name: {"profile": profile} for chapter in selected}
    valid = sorted({name for chapter in selected for name in chapter.parameters} - {"profile"})
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in valid:
            others = [chapter.name for chapter in everything if chapter.source.is_file() and name in chapter.parameters]
            raise ValueError(f"unknown parameter {pair!r}; give NAME=VALUE with one of {', '.join(valid) or '(none)'}"
                             + ("; the profile is chosen with --profile" if name == "profile" else
                                f"; {name} is a parameter of {', '.join(others)}" if equals and others else ""))
        for chapter in selected:
            if name in chapter.parameters:
                values[chapter.name][name] = chapter.parameters[name].cast(text)
    return values
