"""A stand-in for a GPU: tensors that say they are on one, and hold their numbers on the CPU.

An operation on one of them and on a tensor of the CPU raises an error, as it would on a GPU, and so does numpy(); what
makes the CPU wait is noted. What it cannot show are CUDA's own kernels, and --compile.
"""

import contextlib
from typing import ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
UNCHANGED = (torch.device, torch._C._nn._parse_to)  # take a device, make nothing on it
INDEXES = ("index", "index_put", "index_put_")  # take indices from the CPU, too
ASKS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal")  # what a tensor holds


def is_device(x) -> bool:
    """Whether an argument names a device."""
    return isinstance(x, torch.device) or (isinstance(x, str) and x in ("cpu", "cuda"))


class OnGPU(Tensor):
    """A tensor whose numbers are in `held`, on the CPU; a view of it holds a view of them."""

    device, is_cuda, is_cpu = GPU, True, False

    @staticmethod
    def __new__(cls, held: Tensor):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype)
        return Tensor._make_wrapper_subclass(cls, held.size(), **layout)

    def __init__(self, held: Tensor):
        self.held = held

    def __reduce_ex__(self, protocol):
        """A checkpoint has it as a tensor of the CPU."""
        return self.held.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Compute on the CPU, once it is sure that a GPU could do it."""
        kwargs, name, operands = kwargs or {}, function.__name__.split(".")[0], []
        tree_map_only(Tensor, operands.append, (args, kwargs))
        on_gpu = [isinstance(x, OnGPU) for x in operands]
        indices = operands[1:] if name in INDEXES else []
        if name == "copy_" and on_gpu[0] != on_gpu[1]:
            StandIn.note("up" if on_gpu[0] else "down")
        elif name in ASKS or any(isinstance(x, OnGPU) and x.dtype == torch.bool for x in indices):
            StandIn.note("down")
        elif not (name in INDEXES and on_gpu[0]) and any(x.dim() and not g for x, g in zip(operands, on_gpu)):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but one is on the CPU")
        hold = lambda x: x.held
        result = function(*tree_map_only(OnGPU, hold, args), **tree_map_only(OnGPU, hold, kwargs))
        if name != "copy_" or on_gpu[0]:
            result = tree_map_only(Tensor, OnGPU, result)
        return return_and_correct_aliasing(function, args, kwargs, result)


class StandIn(TorchFunctionMode):
    """While it is entered, "cuda" is a device."""

    noted: ClassVar = []  # "up" to the GPU and "down" from it, in order; class-wide, for tensors do not know their mode

    @classmethod
    def note(cls, what: str) -> None:
        """Note a transfer."""
        cls.noted.append(what)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Make tensors on the GPU, and bring them there and back."""
        kwargs, source = kwargs or {}, args[0] if args else None
        name = getattr(function, "__name__", "")
        devices = [torch.device(x) for x in (*args, *kwargs.values()) if is_device(x)]
        if name in ("cpu", "tolist"):
            devices = [CPU]
        if name == "numpy" and isinstance(source, OnGPU):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if not devices or function in UNCHANGED:
            return function(*args, **kwargs)
        down = isinstance(source, OnGPU) and devices[0] == CPU
        args = [CPU if is_device(x) else x for x in args]
        kwargs = {key: CPU if is_device(x) else x for key, x in kwargs.items()}
        if down:
            self.note("down")
            args[0] = source.detach().held
        result = function(*args, **kwargs)
        if devices[0] == CPU or isinstance(source, OnGPU):
            return result
        if name in ("to", "as_tensor", "tensor"):
            self.note("up")
        return tree_map_only(Tensor, lambda x: OnGPU(x.detach()), result)


@contextlib.contextmanager
def stand_in(monkeypatch):
    """Have the scripts find a GPU; yields the list of transfers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)  # Adam's step asks it for a stream
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *_: state.clone())
    group = torch._C._group_tensors_by_device_and_dtype  # tells the device by which C++ knows them
    by_device = lambda lists, *rest: {(lists[0][0].device, key[1]): x for key, x in group(lists, *rest).items()}
    monkeypatch.setattr(torch._C, "_group_tensors_by_device_and_dtype", by_device)
    to = torch.nn.Module.to

    def swap_to(module, device):
        torch.__future__.set_swap_module_params_on_conversion(True)  # else they stay what they are, of another class
        try:
            return to(module, device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    monkeypatch.setattr(torch.nn.Module, "to", swap_to)
    with StandIn():
        StandIn.noted.clear()
        yield StandIn.noted
