import importlib
import inspect

import pytest

from dit_repro.book.api import ROOMS, api_page
from dit_repro.files import project_root

PAGE = api_page(project_root() / "dit_repro")


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_on_the_reference_page_with_its_docstring(room):
    module = importlib.import_module(f"dit_repro.{room}")
    section = PAGE.split(f"## dit_repro.{room}\n")[1].split("\n## ")[0]
    assert (module.__doc__ or "").partition("\n")[0] in section and "None\n" not in section[:20]
    for name in getattr(module, "__all__", []):
        public = getattr(module, name)
        assert f"\n### {name}\n" in section
        if inspect.isclass(public) or inspect.isfunction(public):
            said = section.split(f"\n### {name}\n")[1].split("\n### ")[0]
            assert public.__doc__ and inspect.cleandoc(public.__doc__).partition("\n")[0] in said, name
            assert f"*In `{public.__module__.replace('.', '/')}" in said, name


def test_the_reference_page_shows_fields_with_their_defaults_and_hides_what_is_private():
    guidance = PAGE.split("\n### Guidance\n")[1].split("\n### ")[0]
    assert "class Guidance" in guidance and "    scale: float = 1.0" in guidance
    assert "\n### _" not in PAGE and "`_" not in PAGE.replace("`__all__`", "")


def test_a_constant_is_shown_where_it_is_defined_with_what_its_comment_says():
    said = PAGE.split("\n### DEVICE\n")[1].split("\n### ")[0]
    assert 'DEVICE = "cuda" if' in said and "of whatever runs as one process" in said
    assert "*In `dit_repro/training/parallel.py`.*" in said   # profiles only hands it on
    assert "DIT_CONFIGS = {'DiT-S/8': ..., " in PAGE
