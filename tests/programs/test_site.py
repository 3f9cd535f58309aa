"""The documentation as a site, built strictly: a broken link or a page that the navigation lacks fails."""

from dataclasses import fields

from conftest import REPOSITORY, run_python

from grpo.config.programs import PROGRAMS


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
