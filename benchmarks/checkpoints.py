"""Measure saving and restoring beside the disk itself, and beside what others offer.

The state is that of a LazyAdam over two tables (four fifths and one fifth of the rows, width 64)
and a dense kernel, after real sparse steps. Each save and each restore runs in a process of its
own, in interleaved rounds; next to it, in the same process and folder, the same bytes are written
with a plain buffered write and fsync, or read cold. Files are evicted from the page cache before
each read, and what was restored is compared with what was saved.

    python benchmarks/checkpoints.py                            a quarter of a GiB, a few minutes
    python benchmarks/checkpoints.py --gib 2.5 --rounds 5       needs 10 GiB of memory, 8 of disk
    ... --orbax-python PYTHON    one that has rowstep and orbax-checkpoint; 12 GiB of memory
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

SYSTEMS = {
    "rowstep": "rowstep",
    "tensorflow": "`tf.train.Checkpoint.write`",
    "keras": "Keras `BackupAndRestore`'s `.weights.h5`",
    "npz": "`np.savez` of `get_weights`",
    "orbax": "Orbax `PyTreeCheckpointer`",
}
BACKGROUND = {
    "rowstep": "rowstep",
    "tensorflow": "`tf.train.Checkpoint.save`, async",
}
OWN = ("save", "restore", "start")
WITHOUT_ORBAX = ",".join(name for name in SYSTEMS if name != "orbax")
LOAD = os.getloadavg()[0]
Results = dict[tuple[str, str], list[dict[str, Any]]]


def run_child(
    what: str, system: str, folder: Path, arguments: argparse.Namespace, index: int
) -> dict[str, Any]:
    """Run one measurement in a process of its own and return its result."""
    python = arguments.orbax_python if system == "orbax" else sys.executable
    command = [python, __file__, "--child", what, system, str(folder), f"--gib={arguments.gib}"]
    done = subprocess.run(
        [*command, *(["--raw-first"] if index % 2 == 0 else [])],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{what} {system}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> Results:
    """Measure all systems in turn, round after round."""
    wanted = [*arguments.only.split(","), *(["orbax"] if arguments.orbax_python else [])]
    systems = [name for name in SYSTEMS if name in wanted]
    results: Results = {}

    def note(what: str, system: str, folder: Path, index: int) -> dict[str, Any]:
        result = run_child(what, system, folder, arguments, index)
        results.setdefault((what, system), []).append(result)
        told = {k: round(v, 3) for k, v in result.items() if isinstance(v, float)}
        print(f"round {index + 1}: {what} {system} {told}", file=sys.stderr, flush=True)
        return result

    for index in range(arguments.rounds):
        for system in systems[index % len(systems) :] + systems[: index % len(systems)]:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
                saved = note("save", system, Path(name), index)
                restored = note("restore", system, Path(name), index)
                found = [restored["digest"]]
                if system == "rowstep":
                    found.append(note("start", system, Path(name), index)["digest"])
                if set(found) != {saved["digest"]}:
                    raise SystemExit(f"{system}: what was restored must be what was saved.")
        for system in (name for name in BACKGROUND if name in systems):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
                note("background", system, Path(name), index)
    return results


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Return the median of a key over rounds."""
    return statistics.median(run[key] for run in runs)


def share(runs: list[dict[str, Any]]) -> float:
    """Return the bandwidth as a share of the plain one in percent, the median over rounds."""
    return 100 * statistics.median(run["raw"] / run["seconds"] for run in runs)


def seconds(runs: list[dict[str, Any]]) -> str:
    """Return the median and the best, for a table."""
    return f"{median(runs, 'seconds'):.2f} ({min(run['seconds'] for run in runs):.2f})"


def report(results: Results) -> str:
    """Return the result as Markdown."""
    lines = [*_head(results), "", *_table(results), "", *_stall_table(results), ""]
    if ("save", "rowstep") in results:
        lines += [_conclusion(*(results[what, "rowstep"] for what in OWN)), ""]
    return "\n".join(lines)


def _table(results: Results) -> list[str]:
    lines = [
        "| system | save s | of raw write | restore s | of raw cold read | extra MiB saving "
        "| extra MiB restoring |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (what, system), runs in results.items():
        if what == "save":
            back = results["restore", system]
            lines.append(
                f"| {SYSTEMS[system]} | {seconds(runs)} | {share(runs):.0f} % | {seconds(back)} "
                f"| {share(back):.0f} % | {median(runs, 'extra_mib'):.0f} "
                f"| {median(back, 'extra_mib'):.0f} |"
            )
    return lines


def _stall_table(results: Results) -> list[str]:
    lines = [
        "| saving while training goes on | the call s | until saved s | training loses s | longest "
        "step ms (usual) | steps meanwhile | extra MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (what, system), runs in results.items():
        if what == "background":
            usual = 1e3 * median(runs, "usual_step")
            lines.append(
                f"| {BACKGROUND[system]} | {median(runs, 'call'):.3f} "
                f"| {median(runs, 'until_saved'):.2f} | {median(runs, 'stall'):.2f} "
                f"| {1e3 * median(runs, 'longest_step'):.0f} ({usual:.1f}) "
                f"| {100 * median(runs, 'throughput'):.0f} % | {median(runs, 'extra_mib'):.0f} |"
            )
    for (what, system), runs in results.items():
        if what == "save":
            took = f"{median(runs, 'seconds'):.2f}"
            lines.append(
                f"| {SYSTEMS[system]}, in the loop | {took} | {took} | {took} | | none "
                f"| {median(runs, 'extra_mib'):.0f} |"
            )
    return lines


def _conclusion(
    saves: list[dict[str, Any]], reads: list[dict[str, Any]], starts: list[dict[str, Any]]
) -> str:
    verify, load = (
        statistics.median(run["parts"][part] for run in reads) for part in ("verify", "load")
    )
    verified = 100 * statistics.median(run["raw"] / run["parts"]["verify"] for run in reads)
    return (
        f"rowstep saves at {share(saves):.0f} % of the raw write. It reads and verifies every byte "
        f"at {verified:.0f} % of the raw cold read ({verify:.2f} s), then loads from the page "
        f"cache ({load:.2f} s): together {share(reads):.0f} %. A training verifies while its model "
        f"is built, so that restoring makes its start longer by {median(starts, 'seconds'):.2f} s "
        f"({share(starts):.0f} % of the raw cold read). Extra memory is at most "
        f"{max(run['extra_mib'] for run in [*saves, *reads]):.0f} MiB. Checksums are included."
    )


def _head(results: Results) -> list[str]:
    saves = [run for (what, _), runs in results.items() if what == "save" for run in runs]
    reads = [run for (what, _), runs in results.items() if what == "restore" for run in runs]
    num_bytes = saves[0]["num_bytes"]
    direct = [run["direct"] for run in saves if run["direct"] is not None]
    rates = f"buffered write with fsync {num_bytes / 1e9 / median(saves, 'raw'):.2f} GB/s"
    if direct:
        rates += f", O_DIRECT write with fsync {num_bytes / 1e9 / statistics.median(direct):.2f}"
    rates += f", cold read {num_bytes / 1e9 / median(reads, 'raw'):.2f}"
    return [
        "# Saving and restoring checkpoints",
        "",
        f"rowstep {version('rowstep')}, TensorFlow {version('tensorflow')}, Keras "
        f"{version('keras')}, NumPy {version('numpy')}, Python {platform.python_version()}, "
        f"{platform.machine()} CPU, {os.cpu_count()} cores, load average {LOAD:.1f} at the start.",
        "",
        f"{num_bytes / 2**30:.2f} GiB of optimizer state. The disk alone, medians: {rates} GB/s. "
        "Shares are medians of the ratio to the plain write or read in the same process. Those "
        "who do not flush to the disk themselves are flushed, in their time. Times are medians, "
        "the best in brackets. Memory is the rise above what the process had before; for saves in "
        "the background that of all its processes, a shared page counted once. What training loses "
        "is the call, and by how much the steps during the save were slower than before.",
    ]


def main() -> None:
    """Measure, print the report and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.25, help="size of the state")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; temporary by default")
    parser.add_argument("--only", default=WITHOUT_ORBAX, help="which systems, with commas")
    parser.add_argument("--orbax-python", help="a Python with rowstep and orbax-checkpoint")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--raw-first", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        from checkpoint_parts.child import measure as measure_one

        what, system, folder = arguments.child
        num_bytes = int(arguments.gib * 2**30)
        print(measure_one(what, system, num_bytes, Path(folder), raw_first=arguments.raw_first))
        return
    text = report(measure(arguments))
    command = f"python benchmarks/checkpoints.py --gib {arguments.gib} --rounds {arguments.rounds}"
    command += " --orbax-python PYTHON" if arguments.orbax_python else ""
    text = f"{text}\nCommand: `{command}`\n"
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
