/* libcuda: the virtual memory that expandable segments are made of, contexts, and modules that load nothing. */
#define _GNU_SOURCE
#include <cuda.h>
#include "machine.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef cuMemGetInfo

#define PAGE ((size_t)2 << 20)
#define FAULTY                           \
  do {                                   \
    int status = fault("*");             \
    if (!status) status = fault(__func__); \
    if (status) return status;           \
  } while (0)

/* ---- virtual memory management: the card's bytes belong to the physical allocation, which lives until it is
   released and mapped nowhere (CUDA Driver API, cuMemRelease) ---- */

struct physical {
  size_t bytes;
  int card, maps, held;
};
static struct mapped { char *start; size_t bytes; struct physical *physical; } *mapped;
static size_t mapped_count, mapped_room;
static pthread_mutex_t mapped_lock = PTHREAD_MUTEX_INITIALIZER;

static void drop(struct physical *physical) {
  if (physical->held || physical->maps) return;
  give_back(physical->card, physical->bytes);
  __atomic_add_fetch(&machine->cards[physical->card].frees, 1, __ATOMIC_RELAXED);
  free(physical);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  FAULTY;
  if (!bytes || bytes % PAGE) return CUDA_ERROR_INVALID_VALUE;
  void *start = map_device(bytes);
  if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
  mprotect(start, bytes, PROT_NONE);
  *out = (CUdeviceptr)start;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  munmap((void *)start, bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  FAULTY;
  if (!bytes || bytes % PAGE) return CUDA_ERROR_INVALID_VALUE;
  int card = visible_card(properties->location.id);
  if (charge(card, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  __atomic_add_fetch(&machine->cards[card].mallocs, 1, __ATOMIC_RELAXED);
  struct physical *physical = malloc(sizeof *physical);
  *physical = (struct physical){bytes, card, 0, 1};
  *out = (CUmemGenericAllocationHandle)(uintptr_t)physical;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct physical *physical = (struct physical *)(uintptr_t)handle;
  pthread_mutex_lock(&mapped_lock);
  physical->held = 0;
  drop(physical);
  pthread_mutex_unlock(&mapped_lock);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  struct physical *physical = (struct physical *)(uintptr_t)handle;
  FAULTY;
  if (offset || bytes != physical->bytes) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&mapped_lock);
  if (mapped_count == mapped_room) {
    mapped_room = mapped_room ? 2 * mapped_room : 256;
    mapped = realloc(mapped, mapped_room * sizeof *mapped);
  }
  mapped[mapped_count++] = (struct mapped){(char *)start, bytes, physical};
  physical->maps++;
  pthread_mutex_unlock(&mapped_lock);
  remember((void *)start, bytes, physical->card, DEVICE);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *access, size_t count) {
  FAULTY;
  return mprotect((void *)start, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  char *start = (char *)at;
  struct memory found;
  pthread_mutex_lock(&mapped_lock);
  for (size_t i = mapped_count; i-- > 0;) {
    if (mapped[i].start < start || mapped[i].start + mapped[i].bytes > start + bytes) continue;
    forget(mapped[i].start, DEVICE, &found);
    mapped[i].physical->maps--;
    drop(mapped[i].physical);
    mapped[i] = mapped[--mapped_count];
  }
  pthread_mutex_unlock(&mapped_lock);
  mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}

/* ---- devices and contexts ---- */

CUresult cuInit(unsigned flags) { return visible_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = visible_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal) {
  if (ordinal < 0 || ordinal >= visible_count()) return CUDA_ERROR_INVALID_DEVICE;
  *out = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *text, int room, CUdevice device) {
  snprintf(text, room, "%s", machine->cards[visible_card(device)].name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) {
  uuid_bytes(visible_card(device), (unsigned char *)out->bytes);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  *bytes = machine->cards[visible_card(device)].capacity;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  if (device < 0 || device >= visible_count()) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute(which, visible_card(device));
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  int card = visible_card(*current_card());
  int64_t left = machine->cards[card].capacity - used(card);
  *total = machine->cards[card].capacity;
  *free_bytes = left > 0 ? left : 0;
  return CUDA_SUCCESS;
}

/* at::cuda::detail::hasPrimaryContext asks this before it dares to touch a card. */
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (device < 0 || device >= visible_count()) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = has_context(visible_card(device));
  return CUDA_SUCCESS;
}

static CUcontext context_of(int ordinal) { return (CUcontext)(uintptr_t)(0x2000 + ordinal); }

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
  *out = context_of(device);
  return open_context(visible_card(device));
}

CUresult cuCtxGetCurrent(CUcontext *out) {
  *out = visible_count() && has_context(visible_card(*current_card())) ? context_of(*current_card()) : NULL;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

static const struct { int status; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

CUresult cuGetErrorString(CUresult status, const char **text) {
  *text = "unknown error";
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].status == (int)status) *text = errors[i].text;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult status, const char **name) {
  *name = "CUDA_ERROR_UNKNOWN";
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].status == (int)status) *name = errors[i].name;
  return CUDA_SUCCESS;
}

/* ---- modules and kernels of just-in-time compilers ---- */

CUresult cuModuleLoad(CUmodule *out, const char *path) {
  *out = (CUmodule)0x3000;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image) { return cuModuleLoad(out, NULL); }

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoad(out, NULL);
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
  *out = (CUfunction)0x3001;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
  *blocks = threads ? 2048 / threads : 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
  int card = visible_card(*current_card());
  FAULTY;
  __atomic_add_fetch(&machine->cards[card].launches, 1, __ATOMIC_RELAXED);
  work(card, (double)grid_x * grid_y * grid_z * block_x * block_y * block_z, 0);
  kernel_ran();
  return CUDA_SUCCESS;
}
