"""What PyTorch raises when the libraries below it fail, in its own words, and what batchtune makes of it."""

import fake_gpu
from cuda.tasks import TORCH
from fixtures.waiting import wait_until

FAILURES = """
import json, os, warnings, torch, fake_gpu
import torch.distributed as dist
from torch import nn
from batchtune.device.failures import classify, leaves_device_usable, message_of
from batchtune.device.memory import open_device

warnings.simplefilter("ignore")
machine, found = fake_gpu.this_machine(), {}
card = machine.cards[0]

def meet(name, action):
    try:
        action()
    except Exception as error:
        found[name] = [classify(error), leaves_device_usable(error), message_of(error)]
    else:
        found[name] = None

def failing(function, status, action, *, times=1):
    machine.fail(function, status, times=times, pid=os.getpid())
    meet(f"{function} {status}" + (" for ever" if times < 0 else ""), action)
    machine.mend()

GiB, capacity = 2**30, card.capacity
card.capacity = "100MiB"
meet("no memory for a context", lambda: torch.zeros(1, device="cuda"))
card.capacity = capacity
square = torch.zeros(64, 64, device="cuda")
half, image, sequence = square.half(), torch.zeros(2, 3, 32, 32, device="cuda"), torch.zeros(4, 2, 16, device="cuda")
linear, convolution = nn.Linear(64, 64).cuda(), nn.Conv2d(3, 8, 3).cuda()
sparse = torch.eye(64).to_sparse_csr().cuda()

def allocate(size): return torch.empty(size, dtype=torch.uint8, device="cuda")

meet("more than the card has", lambda: allocate(64 * GiB))
torch.cuda.set_per_process_memory_fraction(0.5)
meet("more than the limit", lambda: allocate(5 * GiB))
torch.cuda.set_per_process_memory_fraction(1.0)
failing("cudaMalloc", 2, lambda: allocate(GiB), times=-1)
for function in ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventCreateWithFlags"):
    work = {"cudaLaunchKernel": lambda: square + 1, "cudaMemcpyAsync": lambda: torch.ones(5).cuda(),
            "cudaEventCreateWithFlags": lambda: torch.cuda.Event().record()}[function]
    failing(function, 2, work)
failing("cudaHostAlloc", 2, lambda: torch.ones(5).pin_memory())
for status in (1, 9, 701):
    failing("cudaLaunchKernel", status, lambda: square + 1)
for status in (1, 3):
    failing("cublasCreate_v2", status, lambda: square @ square)
for function, matrix in (("cublasSgemm_v2", square), ("cublasGemmEx", half)):
    failing(function, 3, lambda: matrix @ matrix)
    failing(function, 13, lambda: matrix @ matrix)
failing("cublasLtMatmulAlgoGetHeuristic", 3, lambda: linear(square))
failing("cublasLtMatmul", 3, lambda: linear(square))
failing("cudnnCreate", 1001, lambda: convolution(image))
lstm = nn.LSTM(16, 16).cuda()
for status in (4003, 4004, 5000, 3000):
    failing("cudnnBackendFinalize", status, lambda: convolution(image), times=-1)
    failing("cudnnRNNForward", status, lambda: lstm(sequence))
def attempt():
    with open_device("cuda").attempt(1):  # what came before an attempt is not counted as its own
        convolution(image[:1])

failing("cudnnBackendExecute", 4000, attempt, times=-1)
card.cudnn_workspace_bytes = "64GiB"
meet("no room for the workspace of any engine", attempt)
card.cudnn_workspace_bytes = 0
for function in ("cufftCreate", "cufftXtExec"):
    failing(function, 2, lambda: torch.fft.fft(square))
for status in (1, 2, 7):
    failing("cusolverDnCreate", status, lambda: torch.linalg.cholesky(square))
for status in (2, 11):
    failing("cusparseCreateCsr", status, lambda: torch.sparse.mm(sparse, square))
def communicate():
    if not dist.is_initialized():  # which torch 2.15 makes the communicator for
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(square)

card.nccl_bytes = "64GiB"
meet("no memory for a communicator", communicate)
card.nccl_bytes = 0
failing("ncclAllReduce", 1, communicate)
for status in (700, 710, 719):
    failing("*", status, lambda: square + 1, times=-1)
print(json.dumps(found))
os._exit(0)
"""

OUT_OF_MEMORY = {  # by what was done: whether the process may go on, and how the message begins or what is in it
    "no memory for a context": (False, "CUDA error: out of memory"),
    "more than the card has": (True, "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has"),
    "more than the limit": (True, "CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has"),
    "cudaMalloc 2 for ever": (True, "CUDA out of memory. Tried to allocate 1024.00 MiB"),
    "cudaLaunchKernel 2": (False, "CUDA error: out of memory"),
    "cudaMemcpyAsync 2": (False, "CUDA error: out of memory"),
    "cudaEventCreateWithFlags 2": (False, "CUDA error: out of memory"),
    "cudaHostAlloc 2": (False, "CUDA error: out of memory"),
    "cublasCreate_v2 1": (False, "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"),
    "cublasCreate_v2 3": (False, "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate"),
    "cublasSgemm_v2 3": (False, "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm("),
    "cublasGemmEx 3": (False, "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasGemmEx("),
    "cublasLtMatmulAlgoGetHeuristic 3": (False, "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmulAlgoGetHeur"),
    "cudnnCreate 1001": (True, "CUDNN_STATUS_NOT_INITIALIZED"),
    "cudnnBackendFinalize 4003 for ever": (True, "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    "cudnnBackendFinalize 4004 for ever": (True, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cudnnRNNForward 4003": (True, "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    "cudnnRNNForward 4004": (True, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "no room for the workspace of any engine": (True, "was unable to find an engine to execute this computation"),
    "cufftCreate 2": (True, "CUFFT_ALLOC_FAILED"),
    "cufftXtExec 2": (True, "CUFFT_ALLOC_FAILED"),
    "cusolverDnCreate 1": (True, "CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate"),
    "cusolverDnCreate 2": (True, "CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate"),
    "cusolverDnCreate 7": (True, "CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate"),
    "cusparseCreateCsr 2": (False, "CUDA error: allocation failed when calling `cusparseCreateCsr"),
    "cusparseCreateCsr 11": (False, "CUDA error: insufficient resources when calling `cusparseCreateCsr"),
    "no memory for a communicator": (False, "unhandled cuda error"),
    "ncclAllReduce 1": (False, "unhandled cuda error"),
}
KERNEL_LIMITS = {
    "cudaLaunchKernel 1": (False, "CUDA error: invalid argument"),
    "cudaLaunchKernel 9": (False, "CUDA error: invalid configuration argument"),
    "cudaLaunchKernel 701": (False, "CUDA error: too many resources requested for launch"),
    "cublasSgemm_v2 13": (False, "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm("),
    "cublasGemmEx 13": (False, "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx("),
    "cudnnBackendFinalize 5000 for ever": (False, "CUDNN_STATUS_EXECUTION_FAILED"),
    "cudnnBackendFinalize 3000 for ever": (True, "CUDNN_STATUS_NOT_SUPPORTED"),
    "cudnnRNNForward 5000": (False, "CUDNN_STATUS_EXECUTION_FAILED"),
    "cudnnRNNForward 3000": (True, "CUDNN_STATUS_NOT_SUPPORTED"),
    "cudnnBackendExecute 4000 for ever": (True, "was unable to find an engine to execute this computation"),
    "* 700 for ever": (False, "CUDA error: an illegal memory access was encountered"),
    "* 719 for ever": (False, "CUDA error: unspecified launch failure"),
}
USER_ERRORS = {"* 710 for ever": (False, "CUDA error: device-side assert triggered")}
NOT_CALLED = set()
if TORCH >= (2, 15):  # there, products of fp32 are cublasGemmEx's, too
    NOT_CALLED = {"cublasSgemm_v2 3", "cublasSgemm_v2 13"}
RECOVERED_BY_TORCH = {"cublasLtMatmul 3"}  # with a warning, by a product without its fused bias


def test_each_failure_of_a_library_has_its_outcome_in_torchs_own_words(script):
    with fake_gpu.machine(fake_gpu.Card("8GiB", context_bytes="300MiB")) as machine:
        found = script(FAILURES)
        assert wait_until(lambda: machine.cards[0].used == 0)
    expected = {"oom": OUT_OF_MEMORY, "kernel_limit": KERNEL_LIMITS, "user_error": USER_ERRORS}
    wanted = {name: (outcome, *rest) for outcome, cases in expected.items() for name, rest in cases.items()}
    told = {}
    for name, (outcome, usable, words) in ((name, row) for name, row in found.items() if row):
        in_it = wanted.get(name, ("", False, ""))[2]
        told[name] = outcome, usable, in_it if in_it in words else words
    assert told == {name: row for name, row in wanted.items() if name not in NOT_CALLED}
    assert {name for name, row in found.items() if row is None} == RECOVERED_BY_TORCH | NOT_CALLED
