"""Which training is the same training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rowstep.components.fingerprint import code_fingerprint
from rowstep.configs import RunConfig


def identity(config: RunConfig, train_fingerprint: str, eval_fingerprint: str) -> dict[str, Any]:
    """Collect what must be equal for two trainings to be the same training.

    Where results are written, how often is logged and how the model is judged does not belong here.
    """
    dumped = json.loads(config.model_dump_json())
    return {
        "features": dumped["features"],
        "label": dumped["label"],
        "model": dumped["model"],
        "optimizer": dumped["optimizer"],
        "train": dumped["train"],
        "train_data": train_fingerprint,
        "eval_data": eval_fingerprint,
        "code": code_fingerprint(),
    }


def run_key(parts: Mapping[str, Any]) -> str:
    """Return a short stable name for an identity."""
    return digest_of(parts)[:16]


def digest_of(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, whatever the order of their keys."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name what two identities disagree on, as dotted paths with both values."""
    found: list[str] = []

    def walk(path: str, left: Any, right: Any) -> None:
        if isinstance(left, dict) and isinstance(right, dict):
            for key in sorted({*left, *right}):
                walk(f"{path}.{key}" if path else key, left.get(key), right.get(key))
        elif left != right:
            found.append(f"{path}: {_short(left)} -> {_short(right)}")

    walk("", dict(old), dict(new))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
