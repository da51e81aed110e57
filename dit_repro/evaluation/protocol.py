"""What a score was measured under. Two scores compare when this is the same, and a name says the main part."""
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version

from dit_repro.evaluation.features import FeatureExtractor


@dataclass(frozen=True)
class Protocol:
    """Every choice that moves a score. The fields of the generator stay at their defaults for real images."""
    num_generated: int
    num_reference: int
    reference_sha256: str
    features: str                # id of the extractor
    features_sha256: str         # of its weights
    resize: str                  # inside the extractor
    dtype: str                   # of the network that makes features
    versions: str
    mode: str = "adm"            # "adm", "strict": how Inception Score, precision and recall are computed
    rounding: str = "round"      # float to uint8: "round", "truncate"
    label_policy: str = ""       # "50 a class", "uniform"
    seeds: str = ""              # "0 to 9999"
    guidance: str = ""           # "scale 1.5, channels 3"
    sampler: str = ""            # "ddpm, learned variance"
    num_steps: int = 0
    checkpoint_sha256: str = ""  # of the weights that sampled
    autoencoder_sha256: str = ""

    @classmethod
    def of(cls, extractor: FeatureExtractor, **fields) -> "Protocol":
        """The protocol of scores in this extractor's features; the other fields by name."""
        return cls(features=extractor.id, features_sha256=extractor.sha256, resize=extractor.resize, dtype="float32",
                   versions=", ".join(f"{package} {version(package)}" for package in extractor.packages), **fields)

    @property
    def fingerprint(self) -> str:
        """12 hexadecimal digits that change when any field does."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def compare(self, other: "Protocol", vary: Iterable[str] = ()) -> None:
        """Raise ValueError naming the fields that differ, other than those in `vary`, which are varied on purpose."""
        mine, theirs = asdict(self), asdict(other)
        if unknown := set(vary) - set(mine):
            raise ValueError(f"no such field: {', '.join(sorted(unknown))}. Fields: {', '.join(mine)}")
        different = [f"{name} {mine[name]!r} against {theirs[name]!r}" for name in mine
                     if mine[name] != theirs[name] and name not in vary]
        if different:
            raise ValueError(f"these scores do not compare: {'; '.join(different)}. "
                             "Measure both the same way, or name in vary what differs on purpose")

    def frechet_name(self, head: str = "pool") -> str:
        """"FID-10K" for Inception's pool features, "sFID-10K" for its spatial ones, never FID for any other network."""
        if head not in ("pool", "spatial"):
            raise ValueError(f"head {head!r}: expected 'pool' or 'spatial'")
        if self.features != "Inception":
            return ("spatial Frechet" if head == "spatial" else "Frechet") + f" distance ({self.features})"
        n = self.num_generated
        return ("sFID-" if head == "spatial" else "FID-") + (f"{n // 1000}K" if n % 1000 == 0 else str(n))

    def report(self, value: float, interval: tuple[float, float] | None = None, head: str = "pool") -> str:
        """One line to print: the name, the value, its 95% interval, both N, and the fingerprint."""
        spread = f" (95% interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        return (f"{self.frechet_name(head)} = {value:.2f}{spread}, {self.num_generated:,} images against "
                f"{self.num_reference:,}, protocol {self.fingerprint}")
