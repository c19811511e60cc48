"""Pictures in MLflow's image chart: one for each key and step, however often they are sent."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from rowstep.components.tracking.client import takes_slashes_in_images
from rowstep.components.tracking.history import Row
from rowstep.components.tracking.target import TrackingError
from rowstep.components.tracking.text import explain

_FOLDER = "images"
# MLflow names a picture after what it shows, with characters that differ between its versions.
_NAME = re.compile(
    r"(?P<key>.+)[+%]step[+%](?P<step>-?\d+)[+%]timestamp[+%](?P<ms>\d+)(?P<end>[+%][^+%.]+)"
    r"(?P<small>[+%]compressed)?\.(?:png|webp)"
)


class ImageLog:
    """Draw histograms and store them as the pictures of a run.

    MLflow gives each upload a name with a random part, so a repeated one would be a second picture
    of its step. The names that are there are asked for once, and again after any trouble.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._there: dict[tuple[str, int], list[str]] | None = None

    def send(self, row: Row) -> None:
        """Store the picture of one histogram."""
        place = (_plain(row["key"]), row["step"])
        names = self._names().get(place, [])
        if len(names) >= 2:
            self._client.set_tag(self._run_id, "mlflow.loggedImages", "True")
            return
        image = _draw(row)
        try:
            if names:
                self._complete(names[0], image)
            else:
                self._client.log_image(
                    self._run_id,
                    image,
                    key=row["key"] if takes_slashes_in_images() else _plain(row["key"]),
                    step=row["step"],
                    timestamp=row["ts_ms"],
                    synchronous=True,
                )
        except BaseException:
            self._there = None
            raise

    def _names(self) -> dict[tuple[str, int], list[str]]:
        if self._there is None:
            there: dict[tuple[str, int], list[str]] = {}
            for file in self._client.list_artifacts(self._run_id, _FOLDER):
                match = _NAME.fullmatch(file.path.rpartition(f"{_FOLDER}/")[2])
                if match is not None:
                    place = (_plain(match["key"]), int(match["step"]))
                    there.setdefault(place, []).append(match[0])
            self._there = there
        return self._there

    def _complete(self, name: str, image: Any) -> None:
        """Add the small copy, or the full picture, that an interrupted upload left out."""
        stem = name.rpartition(".")[0]
        sign = "%" if "%step%" in name else "+"
        small = f"{sign}compressed"
        missing = f"{stem.removesuffix(small)}.png" if stem.endswith(small) else f"{stem}{small}"
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / (missing if missing.endswith(".png") else f"{missing}.webp")
            image.save(path)
            self._client.log_artifact(self._run_id, str(path), _FOLDER)
        self._client.set_tag(self._run_id, "mlflow.loggedImages", "True")


def _plain(key: str) -> str:
    """Return the key with a point for each separator: versions of MLflow write these in each way.

    Keys that differ in nothing else would share their pictures; ours do not.
    """
    return re.sub("[/~#]", ".", key)


def _draw(row: Row) -> Any:
    from rowstep.components.tracking.pictures import draw_histogram

    try:
        return draw_histogram(row)
    except Exception as error:
        raise TrackingError(
            f"tracking: the histogram {row['key']!r} must be one that can be drawn. Got "
            f"{explain(error)}. Report ascending edges, one more than counts."
        ) from None
