"""Mean and covariance of features in one pass: float64, mergeable across batches, shards and ranks."""
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dit_repro.files import atomic_write


@contextmanager
def threads_for(dim: int):
    """One thread inside for matrices of less than 1,000 dimensions, where more threads only wait for each other.

    On two cores that a training shares, a decomposition at 96 dimensions takes 12 ms with one and seconds with two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if dim < 1_000 else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_features(features, name: str = "features") -> Tensor:
    """Features (N, D) as a tensor on the CPU; raises ValueError on another shape, and names rows of NaN or infinity."""
    features = torch.as_tensor(features).detach().cpu()
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"{name}: expected shape (N, D), found {tuple(features.shape)}")
    finite = torch.cat([torch.isfinite(rows).all(1) for rows in features.split(4096)])  # no mask of all N x D at once
    bad = (~finite).nonzero().flatten().tolist()
    if bad:
        rows = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        raise ValueError(f"{name}: NaN or infinity in {len(bad)} of {len(features)} rows ({rows}). "
                         "Look at those images, and at the dtype the network ran in")
    return features


class FeatureStatistics:
    """Count, mean (D,) and covariance (D, D) of feature vectors, in float64.

    Kept as mean and centered scatter, joined by the pairwise update of Chan, Golub and LeVeque (1983), so that any
    split into batches, shards or ranks gives the same result to rounding. `metadata` is saved with it: the protocol
    that the features were made under.
    """

    def __init__(self, dim: int, metadata: dict | None = None):
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.metadata = metadata or {}
        self._scatter = torch.zeros(dim, dim, dtype=torch.float64)  # sum of (x - mean)(x - mean)^T
        self._factor = None

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def covariance(self) -> Tensor:
        """Unbiased (divided by N - 1, as np.cov); raises ValueError with fewer than two samples."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, these statistics hold {self.count}")
        return self._scatter / (self.count - 1)

    def update(self, features) -> "FeatureStatistics":
        """Add features (N, D), a tensor or an array; returns itself."""
        x = check_features(features).double()
        if x.shape[1] != self.dim:
            raise ValueError(f"these statistics have {self.dim} dimensions, the features {x.shape[1]}")
        if len(x):
            with threads_for(self.dim):
                mean = x.mean(0)
                centered = x - mean
                self._join(len(x), mean, centered.T @ centered)
        return self

    def merge(self, other: "FeatureStatistics") -> "FeatureStatistics":
        """Add the samples that `other` has seen; returns itself."""
        if other.dim != self.dim:
            raise ValueError(f"cannot merge statistics of {other.dim} dimensions into {self.dim}")
        if other.count:
            self._join(other.count, other.mean, other._scatter)
        return self

    def _join(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.count + count
        delta = mean - self.mean
        self._scatter = self._scatter + scatter + torch.outer(delta, delta) * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count, self._factor = total, None

    def all_reduce(self) -> "FeatureStatistics":
        """Join the statistics of all ranks of torch.distributed in place; a rank may be empty, none is padded."""
        import torch.distributed as dist
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        sums = torch.cat([self.mean * self.count, torch.tensor([self.count], dtype=torch.float64)]).to(device)
        dist.all_reduce(sums)
        total = round(sums[-1].item())
        mean = sums[:-1].cpu() / max(total, 1)
        delta = self.mean - mean
        scatter = (self._scatter + torch.outer(delta, delta) * self.count).to(device)
        dist.all_reduce(scatter)
        self.count, self.mean, self._scatter, self._factor = total, mean, scatter.cpu(), None
        return self

    def factor(self) -> Tensor:
        """A (D, rank) with A A^T = covariance: eigenvectors times roots, those at rounding level dropped; cached."""
        if self._factor is None:
            with threads_for(self.dim):
                values, vectors = torch.linalg.eigh(self.covariance)
            kept = values > values[-1] * self.dim * torch.finfo(torch.float64).eps
            self._factor = vectors[:, kept] * values[kept].sqrt()
        return self._factor

    def save(self, path: str | Path) -> None:
        """Write an .npz with `mu` and `sigma`, as other FID tools name them, `count` and `metadata`."""
        sigma = self._scatter / max(self.count - 1, 1)
        with atomic_write(path, "wb") as file:
            np.savez(file, mu=self.mean.numpy(), sigma=sigma.numpy(), count=np.int64(self.count),
                     metadata=np.array(json.dumps(self.metadata)))

    @classmethod
    def load(cls, path: str | Path, count: int | None = None, suffix: str = "") -> "FeatureStatistics":
        """Read what `save` wrote, or another tool's `mu` and `sigma`; those do not say N, so pass `count` for them.

        `suffix` "_s" takes `mu_s` and `sigma_s`, the spatial statistics in a reference of the ADM evaluator.
        """
        with np.load(path, allow_pickle=False) as file:
            missing = {f"mu{suffix}", f"sigma{suffix}"} - set(file.files)
            if missing:
                raise ValueError(f"{path}: no {', '.join(sorted(missing))}; it holds {', '.join(file.files)}")
            if "count" not in file.files and count is None:
                raise ValueError(f"{path}: does not say how many images it was made from; pass count=")
            mu, sigma = (torch.from_numpy(file[name + suffix]).double() for name in ("mu", "sigma"))
            if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
                raise ValueError(f"{path}: mu {tuple(mu.shape)} and sigma {tuple(sigma.shape)} do not fit together")
            check_features(torch.cat([mu[None], sigma]), f"{path}, mu above sigma")
            statistics = cls(len(mu), json.loads(str(file["metadata"])) if "metadata" in file.files else {})
            statistics.count = int(file["count"]) if "count" in file.files else count
        statistics.mean, statistics._scatter = mu, sigma * max(statistics.count - 1, 1)
        return statistics
