"""docs/troubleshooting.md names real settings and metrics, and its links lead somewhere."""

import re

from conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
PROGRAMS = [*REPOSITORY.glob("*.py"), REPOSITORY / "ds_config.json", *REPOSITORY.glob("grpo/**/*.py")]


def test_settings_and_metrics_of_the_page_are_real():
    words = {word for path in PROGRAMS for word in re.findall(r"\w+", path.read_text())}
    prose = re.sub(r"```.*?```", "", PAGE[: PAGE.index("## Messages")], flags=re.DOTALL)
    named = {*re.findall(r"`-*([a-z0-9_]+(?:/[a-z_]+)*)`", prose)}
    assert len(named) > 60
    parts = {re.sub("^(grpo_ref|peak)_", "", part) for name in named for part in name.split("/")}
    assert not parts - words


def test_links_within_the_page_lead_somewhere():
    heads = re.findall(r"^#+ (.*)", PAGE, re.MULTILINE)
    places = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
    assert len(places) == len(set(places))
    assert not {*re.findall(r"\]\(#([^)]*)\)", PAGE)} - {*places}
