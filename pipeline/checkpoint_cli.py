"""The `rowstep checkpoint` commands: look at checkpoints, check them, take their arrays out.

They only read. No lock is taken and nothing is moved, and TensorFlow is not imported.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from rowstep import RowstepError
from rowstep.components.checkpoints import open_checkpoint
from rowstep.components.checkpoints.manifest import MANIFEST
from rowstep.pipeline.checkpoint_export import ExportError, export_folder, export_npz
from rowstep.pipeline.checkpoint_places import (
    find_checkpoint,
    find_checkpoint_or_newest,
    find_shelf,
    is_pipeline_name,
    manifest_of,
    shelves_of,
)
from rowstep.pipeline.checkpoint_places import verify as verify_one
from rowstep.pipeline.checkpoint_words import manifest_lines, shelf_lines, size_words
from rowstep.pipeline.workspace import default_home

EXIT_DAMAGED = 1
EXIT_BAD_INPUT = 2


class _ErrorsInWords(click.Group):
    """Print rowstep's own errors as they are worded, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RowstepError as error:
            click.echo(str(error), err=True)
            sys.exit(EXIT_BAD_INPUT)


@click.group(cls=_ErrorsInWords)
def checkpoint() -> None:
    """List, verify, show and export checkpoints. A training that runs is not disturbed."""


@checkpoint.command("list")
@click.argument("place", metavar="[PIPELINE|FOLDER|URL]", required=False)
@click.option(
    "--home",
    type=click.Path(path_type=Path),
    default=None,
    help="Workspace to look in; $ROWSTEP_HOME or ~/.rowstep when left out.",
)
def list_checkpoints(place: str | None, home: Path | None) -> None:
    """List the checkpoints of all trainings, of one PIPELINE, or of one FOLDER or URL.

    Manifests are read, arrays are not: a damaged array shows with `rowstep checkpoint verify`.
    """
    home = (home or default_home()).expanduser().resolve()
    now = datetime.now(timezone.utc)
    if place is None or is_pipeline_name(home, place):
        shelves = shelves_of(home, place)
        if not shelves:
            click.echo(f"{home}: no training yet. Start one with: rowstep run FILE")
        for pipeline, shelf in shelves:
            _echo(shelf_lines(pipeline, shelf, now))
    else:
        _echo(shelf_lines(None, find_shelf(place), now))


@checkpoint.command("verify")
@click.argument("place", metavar="PATH|URL")
def verify_checkpoints(place: str) -> None:
    """Read every byte of a checkpoint, or of all in a folder or Checkpoint artifact.

    The exit code is 1 if anything is damaged or cannot be used. What was moved aside earlier is
    named and does not count.
    """
    one = find_checkpoint(place)
    if one is not None:
        medium, folders, aside = one[0], [one[1]], []
    else:
        shelf = find_shelf(place)
        medium, folders, aside = shelf.medium, shelf.folders(), shelf.set_aside()
    num_bad = num_good = 0
    for folder in folders:
        finding = verify_one(medium, folder)
        if finding is None:
            click.echo(f"gone     {medium.where}/{folder}: deleted meanwhile")
        elif finding.problems:
            num_bad += 1
            click.echo(f"{'damaged ' if finding.is_damaged else 'unusable'} {finding.where}")
            _echo(f"         {problem}" for problem in finding.problems)
        else:
            num_good += 1
            click.echo(f"good     {finding.where}  {size_words(finding.num_bytes)}")
    _echo(f"aside    {medium.where}/{name}: found damaged earlier" for name in aside)
    click.echo(f"{num_good} good, {num_bad} damaged or unusable")
    sys.exit(EXIT_DAMAGED if num_bad else 0)


@checkpoint.command("show")
@click.argument("place", metavar="PATH|URL")
@click.option("--all", "all_arrays", is_flag=True, help="Show all arrays, not only the largest.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as it was saved.")
def show_checkpoint(place: str, all_arrays: bool, as_json: bool) -> None:
    """Show what a checkpoint holds; of a folder of checkpoints, the newest.

    Only the manifest is read. `rowstep checkpoint verify` reads the arrays too.
    """
    medium, folder = find_checkpoint_or_newest(place)
    manifest = manifest_of(medium, folder)
    if as_json:
        with medium.open(folder, MANIFEST) as file:
            click.echo(json.dumps(json.loads(file.read().partition(b"\n")[2]), indent=1))
        return
    now = datetime.now(timezone.utc)
    _echo(manifest_lines(f"{medium.where}/{folder}", manifest, now, all_arrays=all_arrays))


@checkpoint.command("export")
@click.argument("place", metavar="PATH|URL")
@click.argument("target", metavar="OUT.npz|OUT_FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--group",
    "groups",
    multiple=True,
    default=("model",),
    show_default=True,
    help="Which arrays, such as model or optimizer. Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace a file, or an earlier export.")
def export_checkpoint(place: str, target: Path, groups: tuple[str, ...], force: bool) -> None:
    """Write the arrays of a verified checkpoint as NumPy files.

    OUT.npz is one file with the names of the arrays as keys, for numpy.load. Any other name becomes
    a folder with a .npy file for each array and an index.json that says which is which. Of a folder
    of checkpoints, the newest is taken.
    """
    if ":/" in str(target):
        raise ExportError(
            f"{target}: an export must go to this machine's disk. Got a URL. Use a path, and copy "
            "the result."
        )
    medium, folder = find_checkpoint_or_newest(place)
    saved = open_checkpoint(f"{medium.where}/{folder}")
    write = export_npz if target.suffix == ".npz" else export_folder
    wanted = tuple(dict.fromkeys(groups))
    as_integers = write(saved, wanted, target, force=force)
    num_arrays = sum(len(saved.names(group)) for group in wanted)
    click.echo(f"{target}: {num_arrays} arrays of step {saved.step:,}")
    if as_integers:
        click.echo(
            "NumPy lacks bfloat16 and float8: "
            f"{', '.join(as_integers)} hold their bits as unsigned integers. "
            "Read them with array.view(ml_dtypes.bfloat16), or the type that `show` names."
        )


def _echo(lines: Any) -> None:
    for line in lines:
        click.echo(line)
