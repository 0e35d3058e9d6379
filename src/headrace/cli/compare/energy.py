"""Energy of this machine's packages, where the kernel counts it (RAPL). Reads /sys; owns nothing."""

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class Energy:
    """From when it is made. Counters of other machines' shares are not told apart: it is all of the package's."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._domains = sorted(powercap.glob("intel-rapl:[0-9]*"))
        self._domains = [domain for domain in self._domains if domain.name.count(":") == 1]  # parts are in their whole
        self._begin = self._read()

    @property
    def is_counted(self) -> bool:
        return bool(self._begin)

    def joules(self) -> float | None:
        """Since the begin; None where nothing is counted."""
        now = self._read()
        if not self._begin or now.keys() != self._begin.keys():
            return None
        return sum((now[name] - begin) % self._range(name) for name, begin in self._begin.items()) / 1e6

    def _read(self) -> dict[Path, int]:
        try:
            return {domain: int((domain / "energy_uj").read_text()) for domain in self._domains}
        except OSError:  # only root may read it, mostly
            return {}

    def _range(self, domain: Path) -> int:
        """At which its counter begins again."""
        return int((domain / "max_energy_range_uj").read_text()) + 1
