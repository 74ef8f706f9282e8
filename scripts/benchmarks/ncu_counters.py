"""What Nsight Compute counted: the CSV of `ncu --csv --metrics ...`, kernel by kernel."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

READ = "dram__bytes_read.sum"
WRITE = "dram__bytes_write.sum"
METRICS = (READ, WRITE)
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}


class CountersUnavailable(RuntimeError):
    """No counters, and why."""


@dataclass
class Part:
    """Of the kernels between two markers."""

    kernels: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


def read_counters(stdout: str, stderr: str, marker: str) -> list[Part]:
    """The sums between the kernels whose name contains `marker`, each of which begins a part.

    Args:
        stdout: of ncu, with its own lines ("==PROF== ...") and the program's before the CSV.
        stderr: searched for the reason where there is no CSV.
        marker: what comes before the first one isn't counted.

    Raises:
        CountersUnavailable: ncu was refused the counters, or printed no CSV.
    """
    if "ERR_NVGPUCTRPERM" in stdout + stderr:
        raise CountersUnavailable(
            "the driver keeps the counters from this user (ERR_NVGPUCTRPERM): run as root, or load "
            "the nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    lines = stdout.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), None)
    if begin is None:
        said = (stderr.strip() or stdout.strip())[-300:]
        raise CountersUnavailable(f"ncu printed no CSV; it said: {said or 'nothing'}")
    parts: list[Part] = []
    kernel = None
    table = [line for line in lines[begin:] if line.startswith('"')]
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        if row["ID"] != kernel:
            kernel = row["ID"]
            if marker in row["Kernel Name"]:
                parts.append(Part())
            elif parts:
                parts[-1].kernels += 1
        if parts and marker not in row["Kernel Name"]:
            count = _bytes(row["Metric Value"], row["Metric Unit"])
            if row["Metric Name"] == READ:
                parts[-1].bytes_read += count
            elif row["Metric Name"] == WRITE:
                parts[-1].bytes_written += count
    return parts


def _bytes(value: str, unit: str) -> int:
    if unit not in UNITS:
        raise CountersUnavailable(f"ncu counted in {unit!r}; known are {', '.join(UNITS)}")
    try:
        return round(float(value.replace(",", "")) * UNITS[unit])
    except ValueError:
        raise CountersUnavailable(f"ncu has no number of bytes, but {value!r}") from None
