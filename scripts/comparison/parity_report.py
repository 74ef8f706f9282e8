"""The report of an A/B run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.comparison import judge
from scripts.comparison.config import ParityRunConfig
from scripts.comparison.curves import (
    CONFIDENCE,
    NOTHING,
    plot_curves,
    plot_distances,
    read_curve,
    spread_of,
)
from scripts.comparison.report import write_report
from train.resume import flat


@dataclass(frozen=True)
class Evidence:
    """All that was measured.

    Attributes:
        candidate: the arm that is judged.
        natives: names of all native runs.
        runs: arm.json by arm.
        results: gradients by arm.
        settings: of the A/B run.
        folder: where it is.
    """

    candidate: str
    natives: Sequence[str]
    runs: Mapping[str, Any]
    results: Mapping[str, list[judge.StateResult]]
    settings: ParityRunConfig
    folder: Path


def write_parity_report(evidence: Evidence, control: Sequence[judge.Check], seconds: float) -> bool:
    """Write the report with its plots, print the verdict; whether there is parity."""
    candidate, results, folder = evidence.candidate, evidence.results, evidence.folder
    precision = evidence.settings.trainer.precision
    checks = judge.checks_of(candidate, results, precision)
    read = {name: read_curve(folder / "arms" / name) for name in evidence.runs}
    curves = {name: read[name] for name in ("reference", "sdpa", "native", candidate)}
    natives = [read[name] for name in evidence.natives]
    spread = spread_of([curve.final for curve in natives])
    ends = {name: curve.final for name, curve in curves.items()}
    inside = spread.holds(ends[candidate])
    has_parity = judge.passed(checks) and inside
    plot_curves(curves, natives, candidate, folder / "curves.png")
    shown = [name for name in results if name != "reference"]
    steps = [result.step for result in results["native"]]
    limits = [check.limit for check in checks if check.name == f"distance, {judge.QK}"]
    plot_distances(
        {name: [state.sums[judge.QK].distance for state in results[name]] for name in shown},
        limits,
        steps,
        folder / "distances.png",
    )
    native = evidence.runs["native"]["summary"]
    distances = [check for check in checks if check.name.startswith("distance")]
    values = {
        "most_of_chain": max(check.value / check.chain for check in distances),
        "most_of_native": max(check.value / check.native for check in distances),
        "native_of_chain": max(check.native / check.chain for check in distances),
        "verdict": "parity" if has_parity else "no parity",
        "candidate": candidate,
        "seconds": seconds,
        "device": native["environment"]["device"],
        "environment": native["environment"],
        "precision": precision,
        "parameters": f"{native['parameters']:,}",
        "steps": evidence.settings.trainer.max_steps,
        "states": steps,
        "batches": evidence.settings.parity.batches,
        "rule": {
            "most_of_chain": judge.MOST_OF_CHAIN,
            "floor": judge.FLOOR[precision],
            "most_slope": judge.MOST_SLOPE[precision],
        },
        "sdpa": _rows(judge.checks_of("sdpa", results, precision)),
        "checks": _rows(checks),
        "control": _rows(control),
        "control_failed": not judge.passed(control),
        "confidence": CONFIDENCE,
        "nothing": NOTHING,
        "spread": asdict(spread),
        "inside": inside,
        "ends": ends,
        "end_rows": [
            (name, curve.final, curve.final - ends["native"]) for name, curve in read.items()
        ],
        "arms": [_arm_row(evidence, name) for name in evidence.runs],
        "differences": _differences(folder, candidate),
    }
    write_report(folder, "parity.md.j2", values)
    worst = max(checks, key=lambda check: check.value / check.limit)
    which = "nearest to its limit" if worst.passed else "farthest beyond its limit"
    print(
        f"{candidate} against native: {values['verdict']}\n"
        f"  gradients: {sum(check.passed for check in checks)} of {len(checks)} checks passed; "
        f"{which}: {worst.name} at step {worst.step}, {worst.value:.2g} of "
        f"{worst.limit:.2g} (chain {worst.chain:.2g})\n"
        f"  curves: ends {ends[candidate] - ends['native']:+.4f} from native, "
        f"{'inside' if inside else 'outside'} the spread of native runs\n"
        f"  negative control, a scale off by 1 %: not accepted, as it has to be\n"
        f"report: {folder / 'report.html'}"
    )
    return has_parity


def _rows(checks: Sequence[judge.Check]) -> list[tuple[Any, ...]]:
    return [(c.name, c.step, c.native, c.chain, c.value, c.limit, c.passed) for c in checks]


def _arm_row(evidence: Evidence, name: str) -> tuple[Any, ...]:
    run = evidence.runs[name]
    calls = run["summary"]["call_counts"]
    return (
        name,
        run["summary"]["first_train_loss"],
        run["first_gradient_norm"],
        sum(calls["scaled_mask_softmax"].values()),
        sum(calls["scaled_mask_softmax_backward"].values()),
        run["summary"]["initial_weights_sha256"][:12],
        run["data_order_sha256"][:12],
    )


def _differences(folder: Path, candidate: str) -> list[tuple[str, str, str]]:
    """Keys whose values differ between the runs of native and the candidate; not the folders."""
    native, other = (
        flat(_plain(OmegaConf.load(folder / "arms" / name / "config.yaml")))
        for name in ("native", candidate)
    )
    return [
        (key, str(native.get(key)), str(other.get(key)))
        for key in sorted(native.keys() | other.keys())
        if key != "run_dir" and native.get(key) != other.get(key)
    ]


def _plain(node: Any) -> dict[str, Any]:
    values = OmegaConf.to_container(node)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
