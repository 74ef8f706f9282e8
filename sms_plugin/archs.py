"""GPU architectures to compile for: how a list is written, and which cards their code runs on."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

Capability = tuple[int, int]

EXAMPLE = "9.0;12.0+PTX"

# The names that PyTorch takes in TORCH_CUDA_ARCH_LIST: a list written for it means the same here.
_NAMED = {
    "kepler+tesla": "3.7",
    "kepler": "3.5+PTX",
    "maxwell+tegra": "5.3",
    "maxwell": "5.0;5.2+PTX",
    "pascal": "6.0;6.1+PTX",
    "volta+tegra": "7.2",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}

_ENTRY = re.compile(r"(?:sm_|compute_)?(?:(\d{1,2})\.(\d)|(\d{2,3}))([af]?)(\+ptx)?", re.IGNORECASE)


class ArchListError(ValueError):
    """A list of architectures that can't be built, with the reason for each bad entry."""


@dataclass(frozen=True, order=True)
class Arch:
    """One architecture: `number` 90 stands for compute capability 9.0."""

    number: int
    suffix: str = ""  # "a": code for this very capability, "f": for its family; not portable
    ptx: bool = False  # PTX too, which the driver compiles for newer cards

    def __str__(self) -> str:
        return f"{self.number}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def capability(self) -> Capability:
        return divmod(self.number, 10)

    def nvcc_flags(self) -> list[str]:
        name = f"{self.number}{self.suffix}"
        kinds = ("sm", "compute") if self.ptx else ("sm",)
        return [f"-gencode=arch=compute_{name},code={kind}_{name}" for kind in kinds]

    def runs_on(self, card: Capability) -> bool:
        """Whether code for this architecture runs on a card of compute capability `card`."""
        if self.suffix == "a":
            return card == self.capability
        same_major = card[0] == self.capability[0] and card[1] >= self.capability[1]
        if self.suffix == "f":
            return same_major
        return same_major or (self.ptx and card >= self.capability)


def parse_archs(text: str, *, source: str) -> tuple[Arch, ...]:
    """Read a list such as "9.0;12.0+PTX", "Hopper" or "80;90;100;120".

    Args:
        text: entries separated by ';' or spaces: 9.0, 90, sm_90, 9.0a, 10.0f, 9.0+PTX, or a name.
        source: where the text came from, for the error.

    Raises:
        ArchListError: it names every bad entry and says why.
    """
    archs: dict[tuple[int, str], Arch] = {}
    problems = []
    for entry in re.split(r"[;\s]+", text.strip()):
        for part in _NAMED.get(entry.lower(), entry).split(";"):
            match = _ENTRY.fullmatch(part)
            if match is None:
                problems.append(f"{entry!r} {_why_unreadable(entry)}")
                break
            major, minor, digits, suffix, ptx = match.groups()
            number = int(digits) if digits else int(major) * 10 + int(minor)
            arch = Arch(number, suffix.lower(), ptx is not None)
            known = archs.get((arch.number, arch.suffix), arch)
            archs[arch.number, arch.suffix] = replace(arch, ptx=arch.ptx or known.ptx)
    if problems:
        raise ArchListError(
            f"{source}={text!r}: " + "; ".join(problems) + f". A valid list is {EXAMPLE!r}"
        )
    return tuple(sorted(archs.values()))


def _why_unreadable(entry: str) -> str:
    if not entry:
        return "is empty: no architecture is named"
    if "," in entry:
        return "has a comma: separate the entries by ';' or a space"
    if entry.lower() in ("all", "native", "all-major"):
        return (
            "is not an architecture: name capabilities, or leave the list out for the visible cards"
        )
    if re.fullmatch(r"\d", entry):
        return f"lacks the minor version: write {entry}.0"
    return (
        "is not an architecture: write a compute capability (9.0, 90, 9.0a, 9.0+PTX) or one of "
        f"{', '.join(sorted(name.title() for name in _NAMED))}"
    )


def require_supported(
    archs: Iterable[Arch], supported: Collection[int], *, source: str, compiler: str
) -> None:
    """Raise ArchListError naming the architectures that aren't among the `supported` numbers."""
    bad = [f"{arch.number}{arch.suffix}" for arch in archs if arch.number not in supported]
    if bad:
        raise ArchListError(
            f"{source}: {compiler} can't compile for {', '.join(bad)}; it knows "
            f"{', '.join(map(str, sorted(supported)))}. Take them out, or use another CUDA toolkit"
        )


def with_newest_ptx(archs: Sequence[Arch]) -> tuple[Arch, ...]:
    """Add PTX to the newest portable architecture, for cards that are newer than the build."""
    portable = [arch for arch in archs if not arch.suffix]
    if not portable:
        return tuple(archs)
    newest = max(portable)
    return tuple(replace(arch, ptx=True) if arch == newest else arch for arch in archs)


def archs_for_cards(
    cards: Iterable[Capability], supported: Collection[int], *, compiler: str
) -> tuple[Arch, ...]:
    """The cards' own architectures, or PTX where the compiler is older than a card.

    Raises:
        ArchListError: a card is older than everything that the compiler knows.
    """
    numbers = set()
    for major, minor in cards:
        fitting = [number for number in supported if number <= major * 10 + minor]
        if not fitting:
            raise ArchListError(
                f"{compiler} can't compile for the visible sm_{major}{minor}; it knows "
                f"{', '.join(map(str, sorted(supported)))}. Use an older CUDA toolkit"
            )
        numbers.add(max(fitting))
    return with_newest_ptx([Arch(number) for number in sorted(numbers)])


def cards_without_code(
    archs: Collection[Arch], cards: Iterable[Capability]
) -> tuple[Capability, ...]:
    """The cards on which no code of these architectures runs."""
    return tuple(
        card for card in sorted(set(cards)) if not any(arch.runs_on(card) for arch in archs)
    )
