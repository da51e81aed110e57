import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit_repro.book.chapters import PROFILES, chapters
from dit_repro.book.claims import VERDICTS, Claim, judge, load_claims, load_results, recording_cells, tally, update
from dit_repro.book.provenance import sealed

ROOT = Path(__file__).parents[2]


def claim(**fields) -> Claim:
    return Claim(**{"id": "x", "claim": "X.", "source": "post", "place": "here", "notebook": "01_good", "metric": "m",
                    "needs": "laptop", **fields})


def result(value, profile="laptop", stale=False) -> dict:
    return {"profile": profile, "stale": stale, "changed": {}, "device": "CPU", "metrics": {"m": {"value": value}}}


@pytest.mark.parametrize("scope, value, verdict", [
    ("exact", 1.05, "reproduced"), ("exact", 1.2, "not reproduced"),
    ("direction", 1.05, "direction only"), ("direction", 1.2, "not reproduced"),
    ("arithmetic", 1.05, "reproduced"), ("arithmetic", 1.2, "contradicted"),
])
def test_the_verdict_follows_from_scope_and_value(scope, value, verdict):
    assert judge(claim(scope=scope, expect=1, rel_tol=0.1), [result(value)])[0] == verdict


@pytest.mark.parametrize("results, verdict", [
    ([], "not run"),
    ([result(1, "smoke")], "not run"),                                  # a smaller profile decides nothing
    ([result(1, stale=True)], "stale"),
    ([result(2), result(1, "gpu")], "reproduced"),                      # the larger run decides
    ([result(1), result(2, "paper", stale=True)], "reproduced"),        # but not with old code
    ([{**result(1), "metrics": {"other": {"value": 1}}}], "not run"),
    ([{**result(1), "changed": {"num_steps": 50}}], "not run"),        # laptop by name only
    ([result(2), {**result(1, "gpu"), "changed": {"num_steps": 50}}], "not reproduced"),
])
def test_the_largest_fresh_run_that_is_large_enough_decides(results, verdict):
    assert judge(claim(expect=1, abs_tol=0), results)[0] == verdict


@pytest.mark.parametrize("expectation, inside, outside", [
    ({"expect": -2, "rel_tol": 0.1}, (-2.19, -1.81), (-2.21, -1.79)),
    ({"expect": 0, "abs_tol": 0}, (0, False), (1e-9, True)),
    ({"below": 1}, (0.99, -5), (1, 2)), ({"above": 1}, (1.01, 5), (1, 0)), ({"between": [1, 2]}, (1, 2), (0.99, 2.01)),
])
def test_expectations_hold_inside_and_fail_outside(expectation, inside, outside):
    assert all(claim(**expectation).holds(value) for value in inside)
    assert not any(claim(**expectation).holds(value) for value in outside)


@pytest.mark.parametrize("expectation, interval, verdict", [
    ({"above": 0}, [0.1, 2], "reproduced"), ({"below": 0}, [0.1, 2], "not reproduced"),
    ({"above": 0}, [-0.1, 2], "undecided"), ({"below": 0}, [-0.1, 2], "undecided"),
    ({"expect": 1, "abs_tol": 0}, [-5, 5], "reproduced"),
])
def test_an_interval_on_both_sides_of_a_bound_decides_nothing(expectation, interval, verdict):
    measured = result(1)
    measured["metrics"]["m"]["interval"] = interval
    assert judge(claim(**expectation), [measured])[0] == verdict


@pytest.mark.parametrize("value, expectation", [
    ("0.5", {"expect": 0.5, "abs_tol": 1}), (True, {"above": 0.5}), (True, {"expect": 0.9, "rel_tol": 1}),
])
def test_a_claim_is_not_decided_by_a_text_or_by_a_bool_that_is_measured_against_a_number(value, expectation):
    with pytest.raises(ValueError, match=r"claim x expects a number, .* but 01_good records m = "):
        claim(**expectation).holds(value)


@given(st.sampled_from(PROFILES), st.sampled_from(PROFILES), st.booleans(), st.floats(-9, 9),
       st.sampled_from(["exact", "direction", "arithmetic"]))
def test_no_number_of_a_run_that_is_too_small_or_stale_ever_reads_as_reproduced(needs, profile, stale, value, scope):
    verdict, decided_by = judge(claim(needs=needs, scope=scope, above=0), [result(value, profile, stale)])
    assert verdict in VERDICTS and (decided_by is None) == (verdict == "not run")
    if verdict in ("reproduced", "direction only"):
        assert value > 0 and not stale and PROFILES.index(profile) >= PROFILES.index(needs)
        assert (verdict == "direction only") == (scope == "direction")


@pytest.mark.parametrize("fields, message", [
    ({"source": "rumor"}, "source must be one of"), ({"needs": "huge"}, "needs must be one of"),
    ({"scope": "vague"}, "scope must be one of"), ({"below": 1, "above": 2}, "give one of"), ({}, "give one of"),
    ({"expect": 1}, "expect needs one of"), ({"below": 1, "abs_tol": 1}, "expect needs one of"),
    ({"below": "1e-3"}, "write 1.0e-3"), ({"between": [2, 1]}, r"between is \[low, high\]"),
    ({"below": 1, "claim": "a | b"}, "ends a table cell"),
])
def test_a_claim_that_cannot_be_decided_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        claim(**fields)


def test_claims_yml_names_unknown_fields_and_double_ids(book):
    path, text = book / "book" / "claims.yml", (book / "book" / "claims.yml").read_text()
    path.write_text(text.replace("abs_tol", "tolerance"))
    with pytest.raises(ValueError, match="claim half: unknown field tolerance"):
        load_claims(book)
    path.write_text(text.replace("id: more", "id: half"))
    with pytest.raises(ValueError, match="twice: half"):
        load_claims(book)


def test_the_claims_of_this_book_are_well_formed_and_cover_every_chapter_and_source():
    claims = load_claims(ROOT)
    assert {claim.source for claim in claims} == {"paper", "post", "lesson", "diagnosis", "blog"}
    assert [name[:2] for name in sorted({claim.notebook for claim in claims})] == [f"{n:02d}" for n in range(1, 12)]
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", claim.metric) for claim in claims)
    assert all(claim.needs != "paper" or claim.scope == "exact" for claim in claims)
    known = {chapter.name for chapter in chapters(ROOT)}
    numbers = {name[:2]: name for name in known}
    assert all(claim.notebook in known for claim in claims if claim.notebook[:2] in numbers)


@pytest.mark.parametrize("id, value, verdict", [
    ("parameters-b2", 130_512_416, "contradicted"), ("parameters-xl2", 675_129_632, "contradicted"),
    ("parameters-ratio", 675_129_632 / 130_512_416, "reproduced"), ("flops-xl2", 2 * 118.64, "contradicted"),
    ("ema-behind-at-50k", 1 - 0.9999**50_000, "contradicted"), ("ema-half", 1 - 0.9999**7_000, "reproduced"),
    ("ema-initial-at-3000", 0.9999**3_000, "reproduced"), ("recipe-reduction", 1 - 104.538 / 135.964, "reproduced"),
    ("fp16-to-zero", 1.1920929e-07, "contradicted"), ("xl2-hours", 400_000 * 0.2855 / 3600, "reproduced"),
])
def test_arithmetic_claims_come_out_as_the_arithmetic_does(id, value, verdict):
    found = next(claim for claim in load_claims(ROOT) if claim.id == id)
    measured = {"profile": "smoke", "stale": False, "changed": {}, "metrics": {found.metric: {"value": value}}}
    assert judge(found, [measured])[0] == verdict


def test_the_scoreboard_shows_value_spread_seeds_profile_device_and_links_to_the_section(good_book):
    page = (good_book / "book" / "scoreboard.md").read_text()
    row = next(line for line in page.splitlines() if "Half is a half." in line)
    assert "**0.5**, [0.4, 0.6], 3 seeds, smoke on CPU" in row and "0.5 ± 0.01" in row
    assert ">reproduced</span>](01_good.ipynb#a-measured-section)" in row
    assert "## 09_later, not written yet" in page
    assert '| [1 Good](#1-good) | 2 claims: **1** <span class="verdict reproduced">reproduced</span>, **1** ' in page
    made = load_results(good_book)["01_good"][0]
    assert f"- `smoke` on {made['device']}, commit `{made['commit']}`, package `{made['package']}`\n" in page
    line = ('3 claims: **1** <span class="verdict reproduced">reproduced</span>, '
            '**1** <span class="verdict not-reproduced">not reproduced</span>, ')
    assert line in page and line in (good_book / "book" / "index.md").read_text()
    assert tally(load_claims(good_book), load_results(good_book)).startswith(line)


def test_a_page_quotes_recorded_numbers_and_is_out_of_date_with_others(good_book):
    page = good_book / "README.md"
    page.write_text("It is <!-- 01.half:.1% -->49%<!-- / -->, not <!-- 01.half:.3f -->\n0.4<!-- / -->.\n")
    assert update(good_book, check=True) == ["README.md"]
    update(good_book)
    assert page.read_text() == "It is <!-- 01.half:.1% -->50.0%<!-- / -->, not <!-- 01.half:.3f -->0.500<!-- / -->.\n"
    page.write_text("It is <!-- 01.whole:.1% -->49%<!-- / -->.\n")
    with pytest.raises(ValueError, match=r"a page quotes 01\.whole, which no harvested run of chapter 01 recorded"):
        update(good_book)


def test_numbers_of_a_run_with_another_setting_decide_nothing_and_the_page_says_which(good_book):
    path = good_book / "book" / "_results" / "01_good.smoke.json"
    results = json.loads(path.read_text())
    results["parameters"] |= {"num_steps": 50, "data": ".../imagenet"}
    path.write_text(json.dumps(sealed(results)))
    update(good_book)
    page = (good_book / "book" / "scoreboard.md").read_text()
    assert "3 claims: **3** <span" in page and ", num_steps = 50\n" in page
    assert page.count("needs profile smoke; a run with num_steps = 50 decides nothing") == 2
    results["parameters"]["num_steps"] = None             # only the data lay elsewhere
    path.write_text(json.dumps(sealed(results)))
    update(good_book)
    page = (good_book / "book" / "scoreboard.md").read_text()
    assert "decides nothing" not in page and ", data = .../imagenet\n" in page


def test_a_changed_claim_updates_every_page_and_check_sees_it_first(good_book):
    assert update(good_book, check=True) == []
    path = good_book / "book" / "claims.yml"
    path.write_text(path.read_text().replace("above: 0.7", "above: 0.3"))
    out_of_date = ["book/scoreboard.md", "book/index.md", "book/01_good.ipynb"]
    assert update(good_book, check=True) == out_of_date == update(good_book)
    assert update(good_book) == []
    assert "not reproduced" not in (good_book / "book" / "01_good.ipynb").read_text()


def test_a_metric_is_found_with_its_section_even_beside_shell_lines(good_book):
    assert recording_cells(chapters(good_book)[0])["half"] == "A measured section"
