"""The numbers of every experiment, a class a chapter. Defaults are those of the `laptop` profile."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Latents:
    """Chapter 1."""
    probe_images: int = 4_000           # held-out images for PSNR, accuracy and statistics
    timing_batch: int = 512             # images in one timed call
    leak_batches: int = 12              # decoded batches kept; their graphs take about 136 MB each at laptop
    leak_batch_size: int = 64


@dataclass(frozen=True)
class Construction:
    """Chapter 2's table of harm: a short training for each mistake."""
    num_steps: int = 80
    batch_size: int = 64
    seeds: int = 3                      # correct runs; their spread is the yardstick
    loss_images: int = 256              # held-out images behind a loss
    processes: int | None = None        # models at once; 0: in the notebook's own; None: one a core


@dataclass(frozen=True)
class Sampling:
    """How previews and scores are sampled."""
    steps: str = "25"                   # respaced DDPM steps; the paper's tables use 250
    guidance_scale: float = 4.0         # the replication post's previews of XL/2; its previews of B/2 used 1.5
    per_class: int = 25                 # images of each class behind a score
    classes: int = 10                   # classes sampled; the post previewed 8 of ImageNet's 1,000
    checkpoints: int = 5                # archived checkpoints that are sampled, first and last among them
    batch_size: int = 250               # images at once
    loss_images: int = 512              # held-out images behind a loss by timestep
    covariance_images: int = 8_000      # training latents behind the covariance baseline


@dataclass(frozen=True)
class Speed:
    """Chapter 4. Latents are random, so no data is read. A triple is a model, images a step, and the latents' side."""
    ladders: tuple = (("DiT-nano/2", 64, 8),)
    alone: bool = True                  # each rung also by itself
    compile: bool = True                # half of the chapter's time on a CPU, and needs a C++ compiler
    repeats: int = 5                    # rounds over all rungs; at least 5 for a number to be quoted
    long: tuple = ("DiT-nano/2", 4, 32)  # 256 tokens, where attention is compared once more
    profiled: tuple = ("DiT-nano/2", 128, 8)
    growth: tuple = (8, 2, 128, 16)     # images, depth, width and tokens of the smallest step
    factors: tuple = (1, 2, 4, 8)       # tokens grow by their squares
    scaling: tuple = ("DiT-nano/2", 32, 8)      # two processes on the CPU
    scaling_gpus: tuple = ("DiT-XL/2", 128, 32)  # where there are two GPUs


@dataclass(frozen=True)
class Divergence:
    """Chapter 5: where training breaks, and what keeps it from breaking."""
    map_model: str = "DiT-deep/2"
    map_rates: tuple = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    map_steps: int = 100
    map_batch_size: int = 32
    long_steps: int = 240               # of the search for a run that breaks by itself, late
    long_rates: tuple = (1e-2, 3e-2)
    clip_norm: float = 1.0              # the post's
    low_clip_norm: float = 0.1
    trial_steps: int = 26               # from one checkpoint, for each setting with and without the fault
    trial_batch_size: int = 32
    trial_seeds: int = 3                # of the draws
    fault_step: int = 6                 # of a trial
    gradient_scale: float = 1_000.0     # of the one gradient that is the fault
    break_factor: float = 5.0           # on the learning rate, of the run that is broken for good
    break_steps: int = 60
    break_log_every: int = 5
    scales: tuple = (1.0, 1.5, 2.0, 4.0)    # guidance, of the post-mortem; the post's
    steps: str = "10"                   # sampling steps of the post-mortem
    per_class: int = 4
    processes: int | None = None        # trials at once; 0: in the notebook's own; None: one a core
    gpus: int = 0                       # of the runs at full size, which take these numbers; 0: they are not made
    full_model: str = "DiT-XL/2"
    full_steps: int = 400_000
    full_batch_size: int = 256
    full_checkpoint_every: int = 1_000  # every tenth is archived


@dataclass(frozen=True)
class Sweeps:
    """Chapter 6: a run in the post's first recipe, and everything that is sampled from it."""
    num_steps: int = 300                # of that run
    perturbed_from: int = 200           # its step from which another run goes on with input perturbation
    input_perturbation: float = 0.1     # the usual value
    processes: int = 1                  # of a run; 0: in the notebook's own
    steps: str = "10"                   # evenly spaced sampling steps ...
    dense: int = 20                     # ... and all of the noisiest timesteps: the start of the full chain
    plain_steps: str = "25"             # of chains without that start
    quantile: float = 0.001             # of real images beyond each threshold of the collapse detector
    real_images: int = 2_000            # behind the thresholds; as many of the test split behind rates and distances
    classes: int = 10
    scales: tuple = (1.0, 1.5, 2.0, 4.0)    # guidance, the post's
    scale: float = 4.0                  # guidance of the comparison of fixes; the one that rescued the post's tiger
    seeds: int = 6                      # of each class in the table of seeds; the post's
    scale_seeds: int = 3                # of each class at each scale
    per_class: int = 50                 # images of each class behind a fix
    few_per_class: int = 3              # the same in the table of causes
    some_per_class: int = 10            # the same for the interval and for mismatched schedules
    trace_steps: tuple = ("10", "50", "250", "1000")
    trace_per_class: int = 3
    epsilon_scale: float = 1.005
    batch_size: int = 250


@dataclass(frozen=True)
class Scores:
    """Chapter 7."""
    real_images: int = 20_000           # halved for the floor, as the post's 10,000 real against 10,000 real
    counts: tuple[int, ...] = (100, 200, 500, 1_000, 2_000, 5_000, 10_000)   # images a side, in the curves
    few: int = 2_000                    # one of the counts; the post's first N
    many: int = 10_000                  # another; its second
    repeats: int = 50                   # shuffles behind each point of a curve; one draw scatters by a third
    reference_split: str = "train"      # what samples are compared with, unless a reference file is given
    samples: int = 2_000                # by the averaged weights at the end of the run
    samples_a_row: int = 500            # by each other checkpoint, and behind each fault
    checkpoints: int = 3                # archives in the table, first and last among them
    leak_batches: int = 10              # whose features are kept; their graphs take about 80 MB each at laptop
    leak_batch_size: int = 32
    doctor_images: int = 5_000          # real images that faults are planted in
    command_images: int = 2_000         # what the command scores, a rank a GPU, or two on a CPU


@dataclass(frozen=True)
class Recipe:
    """Chapter 8: six recipes, trained side by side."""
    num_steps: int = 100
    batch_size: int = 64
    seeds: int = 3
    log_every: int = 10
    checkpoint_every: int = 100
    processes: int | None = None        # of a run; 0: in the notebook's own; None: several runs at once, a core each
    steps: str = "15"                   # sampling steps
    per_class: int = 10                 # guided samples of each class from each run
    loss_images: int = 160              # held-out images behind a loss at a noise level
    detector_images: int = 2_000        # real images behind the collapse detector's thresholds
    reference_images: int = 2_000       # real images behind a distance
    bound_steps: int = 50               # of the shortened chain whose bound is taken apart
    bound_images: int = 64
    variance_steps: tuple = (8, 25, 100, 250)
    variance_images: int = 120          # samples behind each distance of the table of variances
    fid: bool = False                   # score as the paper does; needs ImageNet and Inception's weights
    fid_images: tuple = (50_000, 10_000)    # the paper's, and the post's
    flagship: str = "DiT-XL/2"          # what is scored beside the profile's own model


@dataclass(frozen=True)
class Backbones:
    """Chapter 9: a U-Net beside the DiT, and a lesson's advice on training either."""
    unet: str = "MiniUNet-S"            # as many multiply-accumulates as the profile's DiT
    num_steps: int = 200
    batch_size: int = 32                # in these few seconds more small steps bring more than fewer large ones
    log_every: int = 20
    checkpoint_every: int = 100         # steps between two points of a curve of distances
    ema_decay: float = 0.95
    seeds: int = 3                      # of the DiT, the U-Net, and the DiT with min-SNR weights
    variant_seeds: int = 2              # of the U-Net without skips and of that with adaptive group norm
    processes: int | None = None        # of a run; 0: in the notebook's own; None: several runs at once, a core each
    timing_steps: int = 6               # of each network, in turn
    loss_images: int = 200              # held-out images behind a loss by timestep
    reference_images: int = 4_000       # real images behind a distance
    steps: str = "10"                   # DDIM steps
    guidance_scale: float = 1.5
    per_class: int = 20
    chain_steps: tuple = ("25", "250")  # DDPM; the lesson compares 25 with 1,000
    chain_per_class: int = 6
    scales: tuple = (1.0, 1.5, 2.5, 4.0, 7.0)
    update_steps: int = 10              # optimizer steps that are compared under scaled and clipped gradients
    gradient_batches: int = 4           # whose gradients are counted in fp16


@dataclass(frozen=True)
class Folklore:
    """Chapter 10: a small experiment a claim, each of which goes on from the end of chapter 3's run."""
    seeds: int = 3
    rate: float = 1e-3                  # learning rate of what goes on
    num_steps: int = 60                 # with and without a noise offset, and on duplicates
    batch_size: int = 32                # of the same
    noise_offset: float = 0.1           # the usual value
    small_steps: int = 100              # in batches of one and of four
    small_rate: float = 3e-4            # a batch of one cannot bear a larger one
    seed_steps: int = 30                # with the seed reset and carried over; batches as large as chapter 3's
    copy_steps: int = 300               # on the small set
    copy_per_class: int = 8             # images of the small set; the blog had 80 in all
    unique_images: int = 350            # to which duplicates are added until they are 30%
    loss_batches: int = 40              # batches behind the spread of the loss
    loss_images: int = 256              # held-out images behind a loss with and without labels
    real_images: int = 2_000            # behind distances, and behind the detectors' thresholds
    steps: str = "10"                   # sampling steps
    per_class: int = 10                 # guided samples of each class from each model
    processes: int | None = None        # 0: one after another in the notebook's own; None: a run a core


@dataclass(frozen=True)
class Lab:
    """Chapter 11."""
    batch_size: int = 16                # images of a captured step
    fault_stride: int = 1               # every so many of FAULTS is planted
    clean_draws: int = 3                # draws of each clean step, in float32 and in bf16
    zero_images: int = 512              # behind the loss of the zero predictor, at each timestep
