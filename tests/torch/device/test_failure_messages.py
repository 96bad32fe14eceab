"""The messages of torch 2.9 to 2.13 and of the libraries below it, each with the outcome it stands for."""

import mmap
import platform
from types import CodeType, ModuleType

import numpy as np
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, ObservedException, Unsupported

from batchtune.device.failures import classify, free_frames, leaves_device_usable, maps_file, message_of
from batchtune.device.host_memory import HostMemory

GIB = 2**30
AcceleratorError = torch.AcceleratorError
DistBackendError = torch.distributed.DistBackendError if torch.distributed.is_available() else RuntimeError

OUT_OF_MEMORY = {
    "torch's own type": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "the CPU allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 70368744177664 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "the CPU allocator, in the last bytes there are": RuntimeError("[enforce fail a"),
    "the CUDA runtime": AcceleratorError(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the CUDA documentation for more.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call"
    ),
    "expandable segments": RuntimeError("CUDA driver error: out of memory"),
    "ROCm": AcceleratorError("HIP error: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "a cuBLAS handle": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cuDNN 8": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cuDNN 9 on the host": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "cuSOLVER": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "NCCL": DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
        "NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Failed to CUDA calloc 8388608 bytes"
    ),
    "NCCL, newer": DistBackendError("Last error:\nCuda failure 2 'out of memory'"),
    "NCCL of torch 2.15": DistBackendError("Failed to initialize NCCL communicator: unhandled cuda error"),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "Metal": RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB)"),
    "a Metal buffer": RuntimeError("Invalid buffer size: 72.00 GiB"),
    "level zero": RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "oneDNN": RuntimeError("could not create a primitive"),
    "C++": MemoryError("std::bad_alloc"),
}
KERNEL_LIMITS = {
    "a grid": AcceleratorError(
        "CUDA error: invalid configuration argument\nSearch for `cudaErrorInvalidConfiguration'"
    ),
    "registers": AcceleratorError("CUDA error: too many resources requested for launch"),
    "an overflowed index": AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "cuDNN": RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"
    ),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED_SHAPE"),
    "cuDNN engines": RuntimeError("GET was unable to find an engine to execute this computation"),
    "cuDNN plans": RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa, opb, m)`"),
    "nonzero": RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"),
    "sort": RuntimeError("The dimension being sorted can not have more than INT_MAX elements."),
    "upsampling": RuntimeError(
        "Expected output.numel() <= std::numeric_limits<int32_t>::max() to be true, but got false."
    ),
    "grid_sample": RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false."),
    "quantile": RuntimeError("quantile() input tensor is too large"),
    "multinomial": RuntimeError("number of categories cannot exceed 2^24"),
    "a shape": RuntimeError("Storage size calculation overflowed with sizes=[1099511627776, 1099511627776]"),
    "a conversion": RuntimeError("value cannot be converted to type int without overflow"),
    "oneDNN": RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    "a launch": AcceleratorError("CUDA error: unspecified launch failure"),
    "an argument of a launch": AcceleratorError("CUDA error: invalid argument"),
    "cuDNN's kernels": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "cuDNN 9's kernels": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART"),
    "cuDNN's insides": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    "cuBLAS's kernels": RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m)`"
    ),
    "cuBLAS's insides": RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"),
}
USER_ERRORS = {
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (32x10 and 11x4)"),
    "a label": AcceleratorError("CUDA error: device-side assert triggered"),
    "a type": TypeError("forward() got an unexpected keyword argument 'labels'"),
    "NCCL's net": DistBackendError(
        "NCCL error: unhandled system error. Last error:\nsocketProgress: Connection closed"
    ),
}


def chained(error, *, cause=None, context=None, inner=None):
    error.__context__ = context  # as an except block sets it
    if cause is not None:  # `raise … from`
        error.__cause__ = cause
    if inner is not None:
        error.inner_exception = inner
    return error


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_running_out_of_memory_is_oom_whoever_says_it(name):
    assert classify(OUT_OF_MEMORY[name]) == "oom"


@pytest.mark.parametrize("name", KERNEL_LIMITS)
def test_a_size_that_a_kernel_cannot_take_is_a_kernel_limit(name):
    assert classify(KERNEL_LIMITS[name]) == "kernel_limit"


@pytest.mark.parametrize("name", USER_ERRORS)
def test_anything_else_is_the_users(name):
    assert classify(USER_ERRORS[name]) == "user_error"


@pytest.mark.parametrize(
    ("provoke", "outcome"),
    [
        (lambda: torch.empty(2**44), "oom"),
        (lambda: torch.empty(2**62), "kernel_limit"),
        (lambda: torch.quantile(torch.zeros(17_000_000), 0.5), "kernel_limit"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "user_error"),
    ],
)
def test_errors_that_torch_really_raises_here_are_typed(provoke, outcome):
    with pytest.raises(RuntimeError) as caught:
        provoke()
    assert classify(caught.value) == outcome


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere the system keeps no limit of address space")
@pytest.mark.parametrize(
    ("provoke", "maps"),
    [
        (lambda file: mmap.mmap(file.fileno(), GIB), True),
        (lambda file: np.memmap(file, mode="r+"), True),
        (lambda file: torch.from_file(file.name, size=GIB // 4), True),
        (lambda _file: torch.empty(GIB), False),
    ],
    ids=["mmap", "numpy", "torch", "no file"],
)
def test_a_file_that_finds_no_room_is_an_oom_that_says_so(tmp_path, provoke, maps):
    file, memory = (tmp_path / "tokens.bin").open("w+b"), HostMemory()
    file.truncate(GIB)
    memory.enforce(100 << 20)
    try:
        with file, pytest.raises((OSError, RuntimeError)) as caught:
            provoke(file)
    finally:
        memory.lift()
    assert classify(caught.value) == "oom"
    assert maps_file(caught.value) == maps


def test_a_users_sentence_about_memory_is_no_oom():
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("CUDA error: out of memory")
    assert classify(caught.value) == "user_error"


def test_a_users_folder_named_torch_is_not_torch():
    where: CodeType = compile("raise RuntimeError('CUDA error: out of memory')", "/home/me/torch/model.py", "exec")
    with pytest.raises(RuntimeError) as caught:
        exec(where, {})
    assert classify(caught.value) == "user_error"


def test_an_error_raised_while_handling_an_oom_is_that_oom():
    error = ValueError("failed")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")  # as `raise` in an except block sets it
    assert classify(error) == "oom"


@pytest.mark.parametrize("name", ["the CPU allocator", "cuBLAS", "C++"])
def test_so_is_one_of_any_library_and_its_words_are_what_is_told(name):
    error = chained(ValueError("forward failed"), context=chained(KeyError("x"), context=OUT_OF_MEMORY[name]))
    assert classify(error) == "oom"
    assert message_of(error) == str(OUT_OF_MEMORY[name])


def test_an_error_without_words_is_told_by_its_name():
    assert message_of(MemoryError()) == "MemoryError"


def test_a_users_sentence_that_was_being_handled_is_no_oom():
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("CUDA error: out of memory")
    error = chained(ValueError("failed"), context=caught.value)
    assert (classify(error), message_of(error)) == ("user_error", "failed")


def test_a_kernels_limit_that_was_being_handled_is_not_the_reason():
    assert classify(chained(ValueError("failed"), context=KERNEL_LIMITS["a grid"])) == "user_error"
    assert classify(chained(ValueError("failed"), cause=KERNEL_LIMITS["a grid"])) == "kernel_limit"


def test_an_error_that_disowns_its_context_is_its_own():
    error = ValueError("failed")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    error.__suppress_context__ = True  # `raise … from None`
    assert classify(error) == "user_error"


def test_what_a_compiler_met_counts():
    inner = torch.OutOfMemoryError("CUDA out of memory")
    assert classify(BackendCompilerFailed(lambda: None, inner, None)) == "oom"


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_what_a_compiler_hides_counts(name):
    error = InternalTorchDynamoError(f"{type(OUT_OF_MEMORY[name])}: {OUT_OF_MEMORY[name]}")
    hidden = chained(error, context=OUT_OF_MEMORY[name])
    hidden.__suppress_context__ = True  # Dynamo raises it `from None`
    assert classify(hidden) == "oom"


def test_a_users_sentence_that_a_compiler_quotes_is_no_oom():
    quoted = ObservedException("raised exception RuntimeError('CUDA error: out of memory')")
    assert classify(chained(Unsupported("Observed exception: CUDA error: out of memory"), cause=quoted)) == "user_error"
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("CUDA error: out of memory")
    assert classify(chained(InternalTorchDynamoError("RuntimeError: …"), context=caught.value)) == "user_error"


def test_tritons_own_type_is_a_kernel_limit():
    triton = ModuleType("triton.runtime.errors")
    exec("class OutOfResources(Exception): pass", triton.__dict__)
    assert classify(triton.OutOfResources("out of resource: shared memory, Required: 200000")) == "kernel_limit"


@pytest.mark.parametrize("name", ["torch's own type", "the CPU allocator", "cuDNN 9", "cuDNN 9 on the host"])
def test_an_allocation_that_failed_leaves_the_device_usable(name):
    assert leaves_device_usable(OUT_OF_MEMORY[name])


@pytest.mark.parametrize(
    "error",
    [
        *(OUT_OF_MEMORY[name] for name in ("the CUDA runtime", "NCCL", "Triton")),
        *(KERNEL_LIMITS[name] for name in ("a grid", "a launch", "cuDNN's kernels", "cuDNN's insides")),
    ],
)
def test_a_failed_runtime_call_does_not(error):
    assert not leaves_device_usable(error)


def test_once_onednn_had_no_memory_for_a_primitive_it_makes_no_other():
    assert not leaves_device_usable(OUT_OF_MEMORY["oneDNN"])
    assert leaves_device_usable(KERNEL_LIMITS["oneDNN"])


POISON = AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    "error",
    [
        chained(ValueError("the step failed"), cause=POISON),
        chained(ValueError("the step failed"), context=POISON),
        chained(torch.OutOfMemoryError("CUDA out of memory"), context=POISON),
        chained(RuntimeError("backend='inductor' raised"), inner=chained(ValueError("no"), cause=POISON)),
        chained(KeyError("x"), cause=ValueError("y"), context=POISON),
    ],
    ids=["stated", "handled", "out of memory later", "in a compiler", "handled beside a cause"],
)
def test_a_device_that_failed_stays_so_whatever_was_raised_next(error):
    assert not leaves_device_usable(error)


def test_errors_that_only_led_to_one_another_leave_the_device_usable():
    first, second = ValueError("x"), KeyError("y")
    first.__context__, second.__context__ = second, first  # not even this goes on for ever
    assert leaves_device_usable(first)
    assert leaves_device_usable(chained(ValueError("z"), cause=torch.OutOfMemoryError("CUDA out of memory")))


def test_the_frames_of_all_errors_are_freed_even_where_they_led_to_one_another():
    errors = [ValueError("x"), KeyError("y"), TypeError("z")]
    for error in errors:
        with pytest.raises(type(error)):
            raise error
    first, second, met_by_a_compiler = errors
    chained(first, cause=second, inner=met_by_a_compiler)
    chained(second, cause=first)
    free_frames(first)
    assert [error.__traceback__ for error in errors] == [None] * 3
