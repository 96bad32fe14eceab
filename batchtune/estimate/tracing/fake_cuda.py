"""What makes tensors without data behave as CUDA tensors in a process that sees no GPU. Only for the tracing child."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.fake_tensor import run_fallback_kernel as _fallback_kernel

from batchtune.device.failures import is_users
from batchtune.errors import DeviceError
from batchtune.estimate.memory.convolutions import layout_of
from batchtune.estimate.memory.events import Assumption
from batchtune.estimate.tracing.kernels import cuda_kernels
from batchtune.estimate.tracing.recurrent import flatten_parameters
from batchtune.estimate.tracing.without_data import place_outside_torch
from batchtune.task.state import apply_to_fakes

_AS_DEVICES = (str, torch.device)
_CUDA = 1  # c10::DeviceType::CUDA
_DEVICE_TYPES = 22  # c10::COMPILE_TIME_MAX_DEVICE_TYPES
_VIRTUAL_METHODS = 64  # more than c10::impl::DeviceGuardImplInterface has
_HOOK_METHODS = 80  # more than at::CUDAHooksInterface has
_HOOK_OFFSET = 2  # a vtable's two words before its first method: offset to top, type information
_AMPERE = SimpleNamespace(major=8, minor=0)  # compute capability, from which on GPUs have bf16 and TF32
_version = torch.version
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4  # places in at::AcceleratorHooksInterface's vtable


class _FakeMode(FakeTensorMode):
    """Fake tensors that never ask for a device, whatever `torch.cuda.is_available` is made to answer."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, _: object) -> _FakeMode:
        """Itself: a fake tensor's copy is one of the same mode, or torch may crash."""
        return self


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """A mode in which `cuda` tensors have shapes and no data, and user code sees one CUDA device.

    Raises:
        DeviceError: this build of torch cannot be given what it lacks for that.
    """
    require_cuda_autograd()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for owner, name, value in _replacements():
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # modes belong to one thread
        stack.enter_context(cuda_kernels())
        mode: FakeTensorMode = _FakeMode(allow_non_fake_inputs=True)
        stack.enter_context(mode)
        yield mode


def require_cuda_autograd() -> None:
    """Gives torch the device guard and hooks of a CUDA device that is not there, whether the build is for CUDA or not.

    Autograd asks both when it meets a CUDA tensor. PyTorch's own `_ensureCUDADeviceGuardSet` installs a guard that does
    nothing, but only where a registered guard counts 0 devices: CUDA builds have one, which counts 0 as the GPUs are
    hidden; for CPU builds a stub that answers 0 to everything is registered first, and replaced at once. The count is
    what CUDA goes by from now on: user code that makes GPUs visible again comes too late.

    Raises:
        DeviceError: another platform or ABI, where this was not found to work.
    """
    if platform.system() != "Linux" and not torch.backends.cuda.is_built():
        raise DeviceError(
            f"estimate traces on fake CUDA tensors, which torch {torch.__version__} has on Linux or in CUDA builds, "
            f"not in this build for {platform.system()}"
        )
    try:
        done = _install_guard() and _install_hooks()
    except (OSError, AttributeError, ValueError):
        done = False
    if not done:
        raise DeviceError(
            f"estimate cannot trace with this build of torch ({torch.__version__}, {platform.machine()}): its CUDA "
            "device guard is not where it is expected; use an official build of torch 2.10 or later"
        )


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _addresses() -> tuple[int, int]:
    """Compiled functions that return 0 and 1 whatever they are called with, also while the process shuts down.

    Python callbacks would crash a process whose interpreter is gone when torch's static objects are destroyed.
    """
    return _address(ctypes.CDLL(None).sched_yield), _address(ctypes.pythonapi.Py_IsInitialized)


def _keep(table: ctypes.Array[ctypes.c_void_p]) -> int:
    """The address of a table that is never freed: compiled code holds on to it until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
    return ctypes.addressof(table)


def _install_guard() -> bool:
    torch._C._ensureCUDADeviceGuardSet()  # noqa: SLF001
    if torch.backends.cuda.is_built():
        return True
    registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(
        _library("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    if registry[_CUDA]:
        return True
    zero, _ = _addresses()
    methods = (ctypes.c_void_p * _VIRTUAL_METHODS)(*[zero] * _VIRTUAL_METHODS)
    stub = _keep((ctypes.c_void_p * 2)(_keep(methods), 0))
    registry[_CUDA] = stub
    torch._C._ensureCUDADeviceGuardSet()  # noqa: SLF001
    if registry[_CUDA] == stub:
        registry[_CUDA] = None
        return False
    return True


def _install_hooks() -> bool:
    """Makes `torch.accelerator` answer `cuda`: autograd asks it for streams, and user code for the device.

    The hooks of a CUDA build ask the driver for a device, and raise where it has none; they give way to those of a CPU
    build, the methods of the interface itself, with two answers of their own.
    """
    if platform.system() != "Linux":
        return True
    torch_cpu = _library("libtorch_cpu.so")
    find = torch_cpu._ZN2at6detail12getCUDAHooksEv  # noqa: SLF001
    find.restype, find.argtypes = ctypes.c_void_p, []
    methods = (ctypes.c_void_p * _HOOK_METHODS).in_dll(torch_cpu, "_ZTVN2at18CUDAHooksInterfaceE")
    answering = (ctypes.c_void_p * _HOOK_METHODS)(*methods)
    answering[_HOOK_OFFSET + _HAS_PRIMARY_CONTEXT], answering[_HOOK_OFFSET + _IS_BUILT] = _addresses()
    table = ctypes.c_void_p.from_address(find())
    table.value = _keep(answering) + _HOOK_OFFSET * ctypes.sizeof(ctypes.c_void_p)
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return accelerator is not None and accelerator.type == "cuda"


_is_inference = [False]  # of inference modes within one another


@contextlib.contextmanager
def _inference_mode(on: bool) -> Iterator[None]:
    """Without gradients alone: torch's own hides the parts of operators."""
    _is_inference.append(on)
    try:
        with torch.set_grad_enabled(not on):
            yield
    finally:
        _is_inference.pop()


def _replacements() -> list[tuple[object, str, object]]:
    """Python names of torch that would answer for a machine without a GPU, or refuse fake tensors."""
    import torch._subclasses as subclasses
    import torch._subclasses.fake_impls as rules
    import torch._subclasses.fake_tensor as fakes
    import torch.optim.optimizer as optimizers
    import torch.utils._foreach_utils as foreach

    tensors = [Tensor, nn.Parameter, FakeTensor]
    return [
        (fakes, "init_gpu_context", lambda _: None),  # which makes a real tensor where `is_available` says so
        (fakes, "run_fallback_kernel", _run_fallback_kernel),
        (rules, "run_fallback_kernel", _run_fallback_kernel),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "get_device_capability", lambda *_, **__: (8, 0)),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch._C, "_InferenceMode", _inference_mode),  # noqa: SLF001
        (torch, "is_inference_mode_enabled", lambda: _is_inference[-1]),
        (subclasses, "FakeTensor", _NobodysTensor),  # by which libraries ask whether they are being compiled
        (torch._C, "_conv_determine_backend_memory_format", lambda image, weight, _: layout_of(image, weight)),  # noqa: SLF001
        (torch.backends.cudnn, "is_acceptable", lambda _: False),
        (torch.backends.cudnn, "version", lambda: None),
        (torch.backends.mha, "get_fastpath_enabled", lambda: False),  # torch has no shapes of it, see trace.py
        (torch.distributions.Distribution, "_validate_args", False),  # there are no values to look at
        (nn.Module, "_apply", apply_to_fakes),
        (nn.RNNBase, "flatten_parameters", flatten_parameters),
        (Tensor, "__deepcopy__", _deep_copied),
        (optimizers, "_foreach_supported_types", tensors),
        (foreach, "_foreach_supported_types", tensors),
    ]


_deep_copy: Callable[[Tensor, dict[int, object]], Tensor] = Tensor.__deepcopy__


def _deep_copied(tensor: Tensor, copies: dict[int, object]) -> Tensor:
    """Of a tensor with data, with its data, as a buffer's: it becomes fake when it is moved to the device."""
    with contextlib.nullcontext() if isinstance(tensor, FakeTensor) else unset_fake_temporarily():
        return _deep_copy(tensor, copies)


class _NobodysTensor(Tensor):
    """A class of which no tensor is."""


def _run_fallback_kernel(
    mode: FakeTensorMode, func: OpOverload, flat_args: Sequence[object], spec: object, error: RuntimeError
) -> FakeTensor:
    """Torch's way with an operator that has no rule for shapes, the kernel itself, where the CPU can run it."""
    if any(isinstance(each, FakeTensor) and each.fake_device.type == "cuda" for each in flat_args):
        raise NotImplementedError(f"torch knows no shape of what {func} makes") from error
    return _fallback_kernel(mode, func, flat_args, spec, error)


class _Version(ModuleType):
    """`torch.version`, for Transformers that of a build for CUDA."""

    def __getattr__(self, name: str) -> Any:
        return "13.0" if name == "cuda" and _transformers_asks() else getattr(_version, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_version, name, value)


def _transformers_asks() -> bool:
    """Whether the caller's caller is a function of Transformers that looks for a precision."""
    asking = ("is_torch_bf16_gpu_available", "is_torch_tf32_available")
    return sys._getframe(2).f_code.co_name in asking  # noqa: SLF001


def precisions_supported() -> contextlib.ExitStack:
    """Answers Transformers as with a GPU that has bf16 and TF32; to anybody else there is one where there is."""
    cuda, stack = torch.cuda, contextlib.ExitStack()
    really, properties, current = cuda.is_available, cuda.get_device_properties, cuda.current_device
    stack.enter_context(
        mock.patch.multiple(
            cuda,
            is_available=lambda: _transformers_asks() or really(),
            is_bf16_supported=lambda *_, **__: True,
            current_device=lambda: 0 if _transformers_asks() else current(),
            get_device_properties=lambda *given: _AMPERE if _transformers_asks() else properties(*given),
        )
    )
    stack.enter_context(mock.patch.object(torch, "version", _Version(_version.__name__)))
    return stack


def chosen_at_import() -> list[tuple[ModuleType, str]]:
    """Names in files of the user's that hold the CPU as a device: on a machine with a GPU, that may be another.

    `DEVICE = "cuda" if torch.cuda.is_available() else "cpu"` is such, where no GPU is to be seen.
    """
    files = [(each, getattr(each, "__file__", None)) for each in [*sys.modules.values()]]
    modules = {id(each): each for each, file in files if file and is_users(file)}.values()
    names = [(module, name, value) for module in modules for name, value in vars(module).items()]
    return [(module, name) for module, name, value in names if type(value) in _AS_DEVICES and str(value) == "cpu"]


@contextlib.contextmanager
def taken_to_be_cuda(chosen: Iterable[tuple[ModuleType, str]]) -> Iterator[None]:
    """Within it, such names hold cuda."""
    with contextlib.ExitStack() as stack:
        for module, name in chosen:
            stack.enter_context(mock.patch.object(module, name, type(getattr(module, name))("cuda")))
        yield


def compilation_ignored(notes: list[Assumption]) -> AbstractContextManager[object]:
    """Leaves `torch.compile` out: compiled code plans its own memory, so what is traced is the eager step."""

    def eager(model: Callable[..., object] | None = None, **_: object) -> object:
        place = place_outside_torch(sys._getframe())  # noqa: SLF001
        where = f"{place}: " if place else ""
        text = f"{where}torch.compile: traced as eager code; compiled code fuses operators and usually takes less"
        note = Assumption(text)
        if note not in notes:
            notes.append(note)
        return (lambda function: function) if model is None else model

    return mock.patch.object(torch, "compile", eager)
