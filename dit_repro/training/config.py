"""The settings of one training run, checked before anything is spent on it."""
import dataclasses
import hashlib
import json
from dataclasses import dataclass

from dit_repro.diffusion import NoiseSchedule, Objective

NUM_TIMESTEPS = 1000   # of the training schedule; a sampler may take fewer
# Two recipes that differ in declared choices only, each of which may be changed alone: the paper's, and the one that
# the replication post trained for 400K steps before it read section 4 line by line.
RECIPES = {
    "paper": {"schedule": "linear", "objective": Objective(), "init": "paper"},
    "post-first": {"schedule": "cosine", "objective": Objective(learn_sigma=False), "init": "pytorch"},
}
CHOICES = {
    "init": ("paper", "pytorch"),
    "schedule": ("linear", "cosine"),
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "parallel": ("ddp", "fsdp"),
    "on_alarm": ("record", "stop", "skip", "rollback"),
}
# A run may go on under other values of these: step s keeps its draws, and its numbers up to rounding.
MAY_CHANGE = frozenset({
    "latents", "num_steps", "micro_batch_size", "compile", "fused", "activation_checkpointing", "parallel",
    "checkpoint_every", "keep_last", "archive_every", "export_ema_every", "preview_every", "on_alarm",
    "alarm_loss_ratio", "alarm_grad_ratio", "tensorboard",
})


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Everything that changes a number is here, and is written to the run's config.json.

    The defaults are the paper's recipe for DiT-B/2 (section 4). Raises ValueError naming the field for a value of the
    wrong type or out of range.
    """
    latents: str                        # folder of the LatentStore; it may move, its contents may not change
    model: str = "DiT-B/2"              # a name in DIT_CONFIGS or UNET_CONFIGS; the flagship is DiT-XL/2
    num_classes: int = 1000             # ImageNet-1k
    input_size: int = 32                # latent height and width: 256 px / 8
    in_channels: int = 4
    init: str = "paper"                 # the released initialization, or PyTorch's defaults ("pytorch")
    schedule: str = "linear"            # ADM's, 1e-4 to 2e-2 over 1000 steps; or "cosine"
    objective: Objective = dataclasses.field(default_factory=Objective)   # learned variance, mse + vb
    label_dropout: float = 0.1          # share of labels replaced by the null class, for guidance
    flip: bool = True                   # the only augmentation

    seed: int = 0
    num_steps: int = 400_000            # the paper's scaling table; its headline model took 7M
    global_batch_size: int = 256        # images a step, over all ranks and micro-batches
    micro_batch_size: int | None = None  # images a forward pass on one rank; None: the rank's whole share
    learning_rate: float = 1e-4         # constant, no warm-up
    betas: tuple = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float | None = None      # none in the paper
    ema_decay: float = 0.9999           # half-life 6,931 steps
    ema_warmup: bool = False            # decay (1 + step) / (10 + step) while that is smaller; not in the paper

    precision: str = "fp32"             # tf32: faster products; bf16, fp16: autocast around the model
    compile: bool = False
    fused: bool = True                  # fused AdamW
    activation_checkpointing: bool = False
    parallel: str = "ddp"               # or "fsdp", for a model whose optimizer state does not fit on one device

    log_every: int = 100                # steps a line of metrics.jsonl stands for
    checkpoint_every: int = 1_000       # rolling: the last `keep_last` of these stay
    keep_last: int = 3
    archive_every: int = 10_000         # kept for ever; 0: none
    export_ema_every: int = 0           # EMA weights alone, in the released layout; 0: none
    preview_every: int = 0              # 0: none
    on_alarm: str = "stop"              # record (go on, the last good state kept), stop, skip the step, or rollback
    alarm_loss_ratio: float | None = 2.0    # window MSE over the median of earlier windows; a divergence gave 3.7
    alarm_grad_ratio: float | None = None   # gradient norm over the median of earlier ones
    tensorboard: bool = False           # needs the extra: pip install 'dit-repro[tensorboard]'

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and field.type in (float, float | None):
                object.__setattr__(self, field.name, float(value))
            elif not isinstance(value, field.type) or (type(value) is bool and field.type is not bool):
                expected = getattr(field.type, "__name__", field.type)
                raise ValueError(f"{field.name} = {value!r}: expected {expected}")
        for name, choices in CHOICES.items():
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        for name in ("num_classes", "input_size", "in_channels", "num_steps", "global_batch_size", "log_every",
                     "checkpoint_every", "keep_last"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("seed", "archive_every", "export_ema_every", "preview_every", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        for name in ("learning_rate", "micro_batch_size", "clip_norm"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 0, "more than 0")
        for name in ("alarm_loss_ratio", "alarm_grad_ratio"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 1, "more than 1, or none")
        self._require("label_dropout", 0 <= self.label_dropout < 1, "at least 0 and below 1")
        self._require("ema_decay", 0 <= self.ema_decay < 1, "at least 0 and below 1")
        self._require("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)")
        self._require("checkpoint_every", self.checkpoint_every % self.log_every == 0,
                      f"a multiple of log_every = {self.log_every}, so that a state is judged before it is saved")
        for name in ("archive_every", "export_ema_every", "preview_every"):
            self._require(name, getattr(self, name) % self.checkpoint_every == 0,
                          f"a multiple of checkpoint_every = {self.checkpoint_every}")
        self._require("preview_every", not (self.preview_every and self.parallel == "fsdp"),
                      "0 with parallel = 'fsdp': sample from the exported EMA weights instead")
        self._require("on_alarm", self.on_alarm != "skip" or self.precision != "fp16",
                      "another policy with fp16, whose loss scaling skips overflowing steps itself")
        self._require("on_alarm", self.on_alarm != "rollback" or self.archive_every > 0,
                      "another policy when archive_every = 0: there would be no archive to return to")

    def _require(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            raise ValueError(f"{name} = {getattr(self, name)!r}: expected {expected}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """The config that `to_json` wrote, or one written by hand; ValueError names keys that do not exist."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the config is not JSON: {error}") from error
        _refuse_unknown(values, cls)
        if "latents" not in values:
            raise ValueError("the config has no 'latents': give the folder of an encoded latent store")
        if "objective" in values:
            _refuse_unknown(values["objective"], Objective, "objective.")
            values["objective"] = Objective(**values["objective"])
        if isinstance(values.get("betas"), list):
            values["betas"] = tuple(values["betas"])
        return cls(**values)

    def override(self, assignments) -> "TrainConfig":
        """A config with assignments such as "learning_rate=3e-4", "objective.vb_weight=0" applied; values are JSON."""
        values = json.loads(self.to_json())
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            parent, _, leaf = key.rpartition(".")
            if not equals:
                raise ValueError(f"override {assignment!r}: expected key=value")
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = text   # a bare word: model=DiT-B/2
            if parent == "objective":
                values[parent][leaf] = value
            else:
                values[key] = value
        return self.from_json(json.dumps(values))

    def with_recipe(self, name: str) -> "TrainConfig":
        """This config under a recipe of RECIPES; what a recipe does not declare stays."""
        if name not in RECIPES:
            raise ValueError(f"recipe {name!r}: expected one of {', '.join(RECIPES)}")
        return dataclasses.replace(self, **RECIPES[name])

    def noise_schedule(self) -> NoiseSchedule:
        """The schedule that the model is trained under, and sampled from."""
        return getattr(NoiseSchedule, self.schedule)(NUM_TIMESTEPS)

    def differences(self, other: "TrainConfig") -> dict:
        """Fields in which two configs make different runs, {name: (this, other)}, without those that may change."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in MAY_CHANGE)
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def digest(self) -> str:
        """A short hash of what makes this run another run; it is written into every checkpoint."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in MAY_CHANGE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _refuse_unknown(values, cls, prefix: str = "") -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'the config'}: expected a JSON object, got {type(values).__name__}")
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = [prefix + key for key in values if key not in known]
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}; expected some of {', '.join(known)}")
