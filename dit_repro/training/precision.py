"""What a number format changes: matrix products, autocast around the model, and fp16's loss scale."""
from contextlib import contextmanager, nullcontext

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def matmul_precision(precision: str):
    """Exact float32 products for "fp32", TF32 where the hardware has it for the others; restored afterwards."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def autocast(precision: str, device: torch.device):
    """The context for the model's forward pass; the losses' arithmetic stays outside of it, in float32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype) if dtype else nullcontext()
