"""From a `data:` config to split CSV files on the disk, made once and then reused.

The folder is named after a fingerprint of all that decides its contents: the settings, and the
bytes of the input files or the version of the generator. Equal inputs share one folder, whatever
their path; a folder whose files no longer match their checksums is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rowstep.components import progress
from rowstep.components.csv_source import CsvSource
from rowstep.components.data_errors import DataError
from rowstep.components.data_folder import install, read_manifest, staging
from rowstep.components.movielens import MovieLensSource
from rowstep.components.part_files import ROWS_PER_PART, SPLITS, Rows, write_parts
from rowstep.components.partitions import Window, choose_window
from rowstep.components.synthetic import SyntheticSource
from rowstep.components.truth import Truth
from rowstep.configs.schema import CsvData, CsvSpans, MovieLens100K, SyntheticData

__all__ = ["DataError", "SourceData", "Truth", "load_source", "materialise"]

_LAYOUT = 1  # raise it with any change of the folders or of how rows become text


@dataclass(frozen=True)
class SourceData:
    """Describe a folder of split CSV files.

    `folder` holds `train/*.csv`, `eval/*.csv` and `MANIFEST.json`; `fingerprint` is a SHA-256 over
    the settings and the input bytes, so equal inputs have equal ones; `num_examples` counts the
    rows of each split; `columns` is the header; `truth` is there for generated data only; `spans`
    are the partitions that were read, rising, where the data has any.
    """

    folder: Path
    fingerprint: str
    num_examples: dict[str, int]
    columns: tuple[str, ...]
    truth: Truth | None
    spans: tuple[int, ...] = ()

    @property
    def span(self) -> int | None:
        """Return the newest span, which is the one that TFX is told."""
        return self.spans[-1] if self.spans else None


class _Source(Protocol):
    """Read or make rows; nothing is written before `rows` is consumed."""

    @property
    def kind(self) -> str:
        """Return the kind of data, as the config names it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the header of the files to write."""

    def identity(self) -> dict[str, object]:
        """Return, as JSON values, all that decides the rows. Raise DataError for bad input."""

    def rows(self) -> Iterator[Rows]:
        """Yield the rows of both splits. Raise DataError for bad input."""

    def truth(self) -> Truth | None:
        """Return what is known about the rows that were yielded."""


def materialise(
    config: SyntheticData | MovieLens100K | CsvData | CsvSpans,
    root: Path,
    *,
    rows_per_part: int = ROWS_PER_PART,
) -> SourceData:
    """Make the split CSV files of a `data:` config, or reuse those that are already there.

    Several processes may do this at once: each ends with the same valid folder. An error leaves
    nothing behind. Of partitioned data one window is taken; the event `notice` names the spans
    that are missing in it.

    Args:
        config: The `data:` section.
        root: Folder in which the data folder is made; created when missing.
        rows_per_part: Rows after which a new part file begins.

    Raises:
        DataError: An input file is missing, doctored or malformed, a partition is missing, or a
            split came out empty.

    Cost:
        Memory is bounded by one batch of rows and the parameters of users and items. A time split
        of CSV files reads them twice and holds 8 bytes a row; MovieLens 100K is read whole.
        Reusing a folder reads its files once, for their checksums.
    """
    window = choose_window(config) if isinstance(config, CsvSpans) else None
    if window is not None and window.notice:
        progress.emit("notice", text=window.notice)
    source = _open(config, window)
    fingerprint = _fingerprint(source, rows_per_part, window)
    root = Path(root)
    name = source.kind if window is None else f"{source.kind}-{window.span}"
    folder = root / f"{name}-{fingerprint[:16]}"
    try:
        return _load(folder, checksums=True)
    except DataError:
        pass  # absent or damaged: `install` replaces it
    with staging(root, folder.name) as staged:
        files = write_parts(staged, source.columns, source.rows(), rows_per_part)
        truth = source.truth()
        body: dict[str, Any] = {
            "kind": source.kind,
            "fingerprint": fingerprint,
            "columns": list(source.columns),
            "num_examples": _counted(files, source.kind, config.split.kind),
            "files": files,
            "config": config.model_dump(mode="json"),
            "truth": None if truth is None else truth.to_json(),
        }
        if window is not None:
            body["spans"] = list(window.spans)
        install(staged, folder, body)
    return _described(folder, body)


def load_source(folder: Path) -> SourceData:
    """Read what `materialise` returned, from its folder.

    Raises:
        DataError: The manifest is missing or damaged, or a part file has another size.
    """
    return _load(Path(folder))


def _load(folder: Path, checksums: bool = False) -> SourceData:
    return _described(folder, read_manifest(folder, checksums))


def _described(folder: Path, manifest: Mapping[str, Any]) -> SourceData:
    truth = manifest["truth"]
    return SourceData(
        folder=folder,
        fingerprint=manifest["fingerprint"],
        num_examples={split: manifest["num_examples"][split] for split in SPLITS},
        columns=tuple(manifest["columns"]),
        truth=None if truth is None else Truth.from_json(truth),
        spans=tuple(manifest.get("spans", ())),
    )


def _open(
    config: SyntheticData | MovieLens100K | CsvData | CsvSpans, window: Window | None
) -> _Source:
    if isinstance(config, SyntheticData):
        return SyntheticSource(config)
    if isinstance(config, MovieLens100K):
        return MovieLensSource(config)
    return CsvSource(config, files=None if window is None else window.files)


def _fingerprint(source: _Source, rows_per_part: int, window: Window | None) -> str:
    identity: dict[str, object] = {
        "layout": _LAYOUT,
        "kind": source.kind,
        "rows_per_part": rows_per_part,
        **source.identity(),
    }
    if window is not None:
        identity["spans"] = window.spans
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _counted(files: list[dict[str, Any]], kind: str, split: str) -> dict[str, int]:
    counts = dict.fromkeys(SPLITS, 0)
    for entry in files:
        counts[entry["path"].split("/")[0]] += entry["rows"]
    if not all(counts.values()):
        raise DataError(
            f"data.split: each split must hold at least one row. Got {counts['train']} for "
            f"training and {counts['eval']} for evaluation, by {split}, of {kind} data. "
            "Give more data or another eval_percent."
        )
    return counts
