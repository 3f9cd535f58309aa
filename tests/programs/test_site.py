"""The documentation as a site, built strictly: a broken link or a page that the navigation lacks fails. What
docs/troubleshooting.md names is there."""

import re
from dataclasses import fields

from conftest import REPOSITORY, run_python

from grpo.config.programs import PROGRAMS

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
SOURCES = [*REPOSITORY.glob("*.py"), REPOSITORY / "ds_config.json", *REPOSITORY.glob("grpo/**/*.py")]


def test_the_site_is_built_with_every_setting_and_every_file_that_a_page_links_to(tmp_path):
    words = ["--strict", "--config-file", "site/mkdocs.yml", "--site-dir", tmp_path]
    done = run_python("-m", "mkdocs", "build", *words, environment={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    settings = (tmp_path / "settings/index.html").read_text()
    missing = {field.name for program in PROGRAMS for field in fields(program)}
    assert not {name for name in missing if f"<code>{name}</code>" not in settings}
    assert "not included in the" not in done.stderr  # a page that the navigation lacks
    pages = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert all((tmp_path / name / "index.html").is_file() for name in pages)
    assert (tmp_path / "files/configs/dapo.yaml").read_text() == (REPOSITORY / "configs/dapo.yaml").read_text()
    assert 'href="data/"' in (tmp_path / "index.html").read_text()


def test_settings_and_metrics_of_the_page_are_real():
    words = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}
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
