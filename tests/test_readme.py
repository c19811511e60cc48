"""What the README promises is there."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rowstep.configs import parse_config
from rowstep.pipeline.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_table_of_commands_is_the_list_of_commands() -> None:
    named = re.findall(r"^\| `rowstep (\w+)", README, re.MULTILINE)
    assert sorted(named) == sorted(main.commands)


def test_sections_of_configs_fit_into_a_config() -> None:
    tiny = yaml.safe_load((ROOT / "tests" / "support" / "tiny.yaml").read_text())
    blocks = [yaml.safe_load(block) for block in _blocks("yaml")]
    kinds = [parse_config(yaml.safe_dump({**tiny, **block})).data.kind for block in blocks]
    assert kinds == ["csv", "csv_spans"]


def test_optimizer_snippet_trains() -> None:
    import numpy as np

    [snippet] = [block for block in _blocks("python") if "LazyAdam" in block]
    scope: dict[str, object] = {}
    exec(snippet, scope)  # noqa: S102 - our own README
    model = scope["model"]
    ids = np.arange(64).reshape(32, 2)
    before = model.evaluate(ids, np.ones(32), verbose=0)  # type: ignore[attr-defined]
    model.fit(ids, np.ones(32), epochs=50, verbose=0)  # type: ignore[attr-defined]
    assert model.evaluate(ids, np.ones(32), verbose=0) < before  # type: ignore[attr-defined]


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_main_job_is_the_makefile_s_too() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "CONFIG ?= configs/quickstart.yaml" in makefile
    for target in re.findall(r"`?make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
