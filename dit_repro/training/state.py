"""The state of a run: everything the next step depends on, in memory and as named tensors."""
import torch
from torch import Tensor

from dit_repro.models import create_model
from dit_repro.training.config import NUM_TIMESTEPS, TrainConfig
from dit_repro.training.ema import EMA
from dit_repro.training.monitor import Monitor
from dit_repro.training.parallel import Ranks, gather, like, wrap

SUMS = ("samples", "quarters", "classes")   # of the monitor: each rank holds those of its own samples


def build_model(config: TrainConfig):
    """The model of a config with its initial weights, which depend on the seed alone; on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return create_model(config.model, input_size=config.input_size, in_channels=config.in_channels,
                            num_classes=config.num_classes, learn_sigma=config.objective.learn_sigma, init=config.init)


class TrainState:
    """Model, EMA, optimizer, loss scale, monitor and counters of one rank.

    `tensors` and `scalars` hold all of it whole, so that any number of ranks resumes what any other number has saved.
    Random draws need no saving: they depend on the seed and the step.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks):
        self.ranks = ranks
        self.model = build_model(config).to(ranks.device).train()
        if config.activation_checkpointing:
            if not hasattr(self.model, "checkpoint_activations"):
                raise ValueError(f"activation_checkpointing = True: {config.model} does not offer it")
            self.model.checkpoint_activations = True
        if config.compile:
            # In place, so no name changes. FSDP hooks each block, so there each block is a graph of its own.
            sharded = config.parallel == "fsdp" and ranks.world_size > 1
            for module in self.model.blocks if sharded else [self.model]:
                module.compile()
        self.wrapped = wrap(self.model, config.parallel, ranks)   # what training calls
        self.ema = EMA(self.model, config.ema_decay, config.ema_warmup)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=config.learning_rate, betas=config.betas,
                                           weight_decay=config.weight_decay, fused=config.fused)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.precision == "fp16")
        self.monitor = Monitor(list(self.trained), config.num_classes, NUM_TIMESTEPS, ranks.device)
        self.step = 0       # optimizer steps done
        self.retry = 0      # roll-backs so far: later steps draw other noise

    def tensors(self) -> dict[str, Tensor]:
        """Sections model, ema, optimizer and monitor, on the CPU; all ranks must call it, the main one gets them.

        One tensor at a time is whole on the device, and no other rank copies what it would not write.
        """
        slots = self.optimizer.state_dict()["state"]
        named = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        named |= {f"ema.{name}": tensor for name, tensor in self.ema.tensors.items()}
        named |= {f"optimizer.{slot}.{name}": tensor for i, name in enumerate(self.trained)
                  for slot, tensor in slots.get(i, {}).items()}
        named |= {f"monitor.{name}": self.ranks.sum(tensor.clone()) if name in SUMS else tensor
                  for name, tensor in self.monitor.tensors.items()}
        wholes = ((name, gather(tensor)) for name, tensor in named.items())
        return {name: whole.cpu().contiguous() for name, whole in wholes if self.ranks.is_main}

    def scalars(self) -> dict:
        return {"step": self.step, "retry": self.retry, "scaler": self.scaler.state_dict(),
                "monitor": self.monitor.history}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], scalars: dict) -> None:
        """Take on a saved state; ValueError where its tensors are not those of this model."""
        for section, targets in (("model", self.model.state_dict()), ("ema", self.ema.tensors),
                                 ("monitor", self.monitor.tensors)):
            for name, target in targets.items():
                saved = tensors.get(f"{section}.{name}")
                if saved is None or saved.shape != target.shape:
                    held = "missing" if saved is None else tuple(saved.shape)
                    raise ValueError(f"the checkpoint's {section}.{name} is {held}, this run's {tuple(target.shape)}: "
                                     "it comes from another model")
                target.copy_(like(saved, target))
                if section == "monitor" and name in SUMS and not self.ranks.is_main:
                    target.zero_()   # the saved sums are of all ranks: the main one carries them on
        slots = {i: {} for i in range(len(self.trained))}
        position = {name: i for i, name in enumerate(self.trained)}
        for key, saved in tensors.items():
            if key.startswith("optimizer."):
                _, slot, name = key.split(".", 2)
                target = self.trained[name]
                slots[position[name]][slot] = like(saved, target) if saved.shape == target.shape else saved.clone()
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.optimizer.zero_grad()
        self.step, self.retry, self.monitor.history = scalars["step"], scalars["retry"], scalars["monitor"]
        if scalars["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(scalars["scaler"])
