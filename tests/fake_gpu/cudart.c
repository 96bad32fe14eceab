/* libcudart: memory is charged to a card and lies in host address space, kernels are checked and counted, not run. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include "machine.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 2 << 20, BLOCK = 512, KiB = 1 << 10, MiB = 1 << 20 };
static __thread cudaError_t last;

static cudaError_t end(cudaError_t status) {
  if (status) last = status;
  return status;
}

static int here(void) { return visible_card(*current_card()); }
static struct card *card_here(void) { return &machine->cards[here()]; }

/* An error of a kernel is sticky: every later call returns it, and cudaGetLastError does not clear it
   (CUDA Runtime API, cudaGetLastError and cudaErrorAssert: "the process must be terminated and relaunched"). */
static cudaError_t failure_of(const char *function) {
  int status = fault("*");
  return status ? status : fault(function);
}

/* What is at the start of every call that opens a context on the current card, if there is none. */
static cudaError_t enter(const char *function) {
  if (!visible_count()) return cudaErrorNoDevice;
  cudaError_t status = failure_of(function);
  return status ? status : open_context(here());
}
#define ENTER                                  \
  do {                                         \
    cudaError_t status = enter(__func__);      \
    if (status) return end(status);            \
  } while (0)

static int64_t pages(size_t bytes) { return ((int64_t)bytes + PAGE - 1) / PAGE * PAGE; }

static void wait_for_card(void) {
  if (clock_on(here())) wait_until(card_here()->busy_until);
}

/* ---- memory ---- */

static cudaError_t take(void **out, size_t bytes, int64_t charged) {
  if (charge(here(), charged)) return end(cudaErrorMemoryAllocation);
  *out = map_device(bytes);
  if (!*out) {
    give_back(here(), charged);
    fprintf(stderr, "fake_gpu: no address space for %zu bytes\n", bytes);
    return end(cudaErrorMemoryAllocation);
  }
  remember(*out, bytes, here(), DEVICE);
  __atomic_add_fetch(&card_here()->mallocs, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
  *out = NULL;
  ENTER;
  if (!bytes) return cudaSuccess;
  return take(out, pages(bytes), pages(bytes)); /* the driver maps pages of 2 MiB */
}

cudaError_t cudaFree(void *address) {
  struct memory found;
  ENTER;
  if (!address) return cudaSuccess;
  wait_for_card();
  if (forget(address, DEVICE, &found)) return end(cudaErrorInvalidValue);
  munmap(found.start, found.bytes);
  give_back(found.card, found.bytes);
  __atomic_add_fetch(&machine->cards[found.card].frees, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

/* The pool of cudaMallocAsync takes pages from the card and hands out blocks of them; it keeps what was freed up to
   its release threshold, which PyTorch sets to "everything". Fragmentation within the pool is not shown. */
static struct { int64_t used, used_high, reserved, reserved_high; } pools[CARDS];

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
  *out = NULL;
  ENTER;
  if (!bytes) return cudaSuccess;
  __typeof__(&pools[0]) pool = &pools[here()];
  size_t taken = (bytes + BLOCK - 1) / BLOCK * BLOCK;
  int64_t missing = pool->used + (int64_t)taken - pool->reserved, more = missing > 0 ? pages(missing) : 0;
  cudaError_t status = take(out, taken, more);
  if (status) return status;
  pool->used += taken;
  pool->reserved += more;
  if (pool->used > pool->used_high) pool->used_high = pool->used;
  if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
  struct memory found;
  ENTER;
  if (forget(address, DEVICE, &found)) return end(cudaErrorInvalidValue);
  munmap(found.start, found.bytes);
  pools[found.card].used -= found.bytes;
  __atomic_add_fetch(&machine->cards[found.card].frees, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int device) {
  *out = (cudaMemPool_t)&pools[visible_card(device)];
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep) {
  __typeof__(&pools[0]) pool = (void *)handle;
  int64_t needed = pages(pool->used > (int64_t)keep ? pool->used : (int64_t)keep);
  if (needed < pool->reserved) {
    give_back((int)(pool - pools), pool->reserved - needed);
    pool->reserved = needed;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr which, void *value) {
  __typeof__(&pools[0]) pool = (void *)handle;
  *(int64_t *)value = which == cudaMemPoolAttrUsedMemCurrent       ? pool->used
                      : which == cudaMemPoolAttrUsedMemHigh        ? pool->used_high
                      : which == cudaMemPoolAttrReservedMemCurrent ? pool->reserved
                      : which == cudaMemPoolAttrReservedMemHigh    ? pool->reserved_high
                                                                   : 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr which, void *value) {
  __typeof__(&pools[0]) pool = (void *)handle;
  if (which == cudaMemPoolAttrUsedMemHigh) pool->used_high = pool->used;
  if (which == cudaMemPoolAttrReservedMemHigh) pool->reserved_high = pool->reserved;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count) {
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  ENTER;
  int64_t left = card_here()->capacity - used(here());
  *total = card_here()->capacity;
  *free_bytes = left > 0 ? left : 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  *out = NULL;
  ENTER;
  if (!bytes) return cudaSuccess;
  void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return end(cudaErrorMemoryAllocation);
  remember(start, bytes, here(), HOST);
  *out = start;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
  struct memory found;
  ENTER;
  if (!address) return cudaSuccess;
  if (forget(address, HOST, &found)) return end(cudaErrorInvalidValue);
  munmap(found.start, found.bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  ENTER;
  remember(address, bytes, here(), HOST);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
  struct memory found;
  ENTER;
  return forget(address, HOST, &found) ? end(cudaErrorHostMemoryNotRegistered) : cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
  struct memory found;
  ENTER;
  memset(out, 0, sizeof *out);
  out->device = -2; /* cudaInvalidDeviceId */
  if (find_memory(address, &found)) return cudaSuccess; /* cudaMemoryTypeUnregistered */
  out->type = found.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = visible_ordinal(found.card);
  out->devicePointer = (void *)address;
  if (found.kind == HOST) out->hostPointer = (void *)address;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  ENTER;
  wait_for_card();
  copy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER;
  copy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  ENTER;
  copy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER;
  for (size_t row = 0; row < height; row++)
    copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
  ENTER;
  return cudaSuccess;
}

cudaError_t cudaMemset(void *address, int value, size_t bytes) {
  ENTER;
  fill(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
  ENTER;
  fill(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static char somewhere[1 << 20];
  ENTER;
  *out = somewhere;
  return cudaSuccess;
}

/* ---- cards ---- */

cudaError_t cudaGetDeviceCount(int *count) { /* opens no context */
  *count = visible_count();
  if (!*count) return end(cudaErrorNoDevice);
  return end(failure_of(__func__));
}

cudaError_t cudaGetDevice(int *device) {
  *device = *current_card();
  return visible_count() ? cudaSuccess : end(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) { /* CUDA 12.0 and later: initializes the primary context */
  if (!visible_count()) return end(cudaErrorNoDevice);
  if (device < 0 || device >= visible_count()) return end(cudaErrorInvalidDevice);
  int before = *current_card();
  *current_card() = device;
  cudaError_t status = enter(__func__);
  if (status) *current_card() = before;
  return end(status);
}

cudaError_t cudaDeviceSynchronize(void) {
  ENTER;
  wait_for_card();
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return end(cudaErrorPeerAccessUnsupported); }

cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
  pci_name(visible_card(device), text, room);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) { /* opens no context */
  if (device < 0 || device >= visible_count()) return end(cudaErrorInvalidDevice);
  int index = visible_card(device);
  struct card *card = &machine->cards[index];
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%s", card->name);
  uuid_bytes(index, (unsigned char *)&out->uuid);
  out->totalGlobalMem = card->capacity;
  out->major = card->major;
  out->minor = card->minor;
  out->multiProcessorCount = card->multiprocessors;
  out->pciBusID = (card->parent < 0 ? index : card->parent) + 1;
  out->warpSize = 32;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsPerMultiProcessor = threads_of_multiprocessor(card);
  out->maxBlocksPerMultiProcessor = card->major == 8 && card->minor > 0 ? 16 : 32;
  out->sharedMemPerBlock = 48 * KiB;
  out->sharedMemPerBlockOptin = shared_bytes_of_block(card);
  out->sharedMemPerMultiprocessor = shared_bytes_of_block(card) + KiB;
  out->reservedSharedMemPerBlock = KiB;
  out->totalConstMem = 64 * KiB;
  out->textureAlignment = out->surfaceAlignment = 512;
  out->texturePitchAlignment = 32;
  out->memPitch = 2147483647;
  out->l2CacheSize = 40 * MiB;
  out->memoryBusWidth = 5120;
  out->canMapHostMemory = out->unifiedAddressing = out->managedMemory = out->concurrentManagedAccess = 1;
  out->concurrentKernels = out->streamPrioritiesSupported = out->cooperativeLaunch = 1;
  out->globalL1CacheSupported = out->localL1CacheSupported = out->computePreemptionSupported = 1;
  out->hostRegisterSupported = out->memoryPoolsSupported = 1;
  out->asyncEngineCount = 3;
#if CUDART_VERSION >= 13000
  out->hostNumaId = -1;
#endif
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  if (device < 0 || device >= visible_count()) return end(cudaErrorInvalidDevice);
  *value = attribute(which, visible_card(device));
  return cudaSuccess;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void) {
  cudaError_t status = fault("*");
  if (!status) status = last;
  last = cudaSuccess;
  return status;
}

cudaError_t cudaPeekAtLastError(void) {
  cudaError_t status = fault("*");
  return status ? status : last;
}

static const struct { int status; const char *name, *text; } errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {217, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};

const char *cudaGetErrorName(cudaError_t status) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].status == (int)status) return errors[i].name;
  return "cudaErrorUnknown";
}

const char *cudaGetErrorString(cudaError_t status) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].status == (int)status) return errors[i].text;
  return "unknown error";
}

/* ---- streams, events, graphs: all streams of a card share its one queue ---- */

struct stream {
  int priority, capturing;
  unsigned long long capture;
};

static struct stream *stream_of(cudaStream_t handle) {
  static struct stream default_stream;
  return (uintptr_t)handle < 16 ? &default_stream : (struct stream *)handle; /* 1 and 2: legacy, per thread */
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  ENTER;
  struct stream *stream = calloc(1, sizeof *stream);
  stream->priority = priority;
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  free(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER;
  return clock_on(here()) && card_here()->busy_until > now() ? end(cudaErrorNotReady) : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER;
  wait_for_card();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  ENTER;
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  ENTER;
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  ENTER;
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = stream_of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000 /* edges came with CUDA 13 */
#define EDGES_OUT const cudaGraphEdgeData **edges,
#define EDGES cudaGraphEdgeData *edges,
#else
#define EDGES_OUT
#define EDGES
#endif

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     EDGES_OUT size_t *count) {
  static char some_graph;
  cudaStreamIsCapturing(stream, status);
  if (id) *id = stream_of(stream)->capture;
  if (graph) *graph = (cudaGraph_t)&some_graph;
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static unsigned long long captures;
  ENTER;
  stream_of(stream)->capturing = 1;
  stream_of(stream)->capture = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  stream_of(stream)->capturing = 0;
  *graph = calloc(1, 8);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  enum cudaStreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  *out = calloc(1, 8);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  ENTER;
  kernel_ran();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  free(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  if (nodes && *count) nodes[0] = (cudaGraphNode_t)graph;
  *count = 1; /* PyTorch warns of an empty graph */
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes, EDGES size_t *count) {
  *count = 0;
  return cudaSuccess;
}

struct event {
  double when;
  int recorded;
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  ENTER;
  *out = calloc(1, sizeof(struct event));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  struct event *event = (struct event *)handle;
  ENTER;
  event->when = now();
  if (clock_on(here()) && card_here()->busy_until > event->when) event->when = card_here()->busy_until;
  event->recorded = 1;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  ENTER;
  return event->recorded && event->when > now() ? end(cudaErrorNotReady) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  ENTER;
  if (event->recorded) wait_until(event->when);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  struct event *start = (struct event *)from, *stop = (struct event *)to;
  if (!start->recorded || !stop->recorded) return end(cudaErrorInvalidResourceHandle);
  if (stop->when > now() || start->when > now()) return end(cudaErrorNotReady);
  *milliseconds = (float)((stop->when - start->when) * 1e3);
  return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- kernels ---- */

static cudaError_t launch(dim3 grid, dim3 block, size_t shared) {
  cudaError_t status = enter("cudaLaunchKernel");
  if (status) return end(status);
  double threads = (double)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || block.z > 64 || grid.x > 2147483647u ||
      grid.y > 65535 || grid.z > 65535)
    return end(cudaErrorInvalidConfiguration); /* programming guide, the table of compute capabilities */
  if (shared > (size_t)shared_bytes_of_block(card_here())) return end(cudaErrorInvalidValue);
  __atomic_add_fetch(&card_here()->launches, 1, __ATOMIC_RELAXED);
  work(here(), threads * grid.x * grid.y * grid.z, 0);
  kernel_ran();
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  return launch(grid, block, shared);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return launch(grid, block, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return launch(grid, block, shared);
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) {
  *out = (cudaKernel_t)function;
  return cudaSuccess;
}

/* <<<…>>> pushes a configuration that the kernel's host function pops (crt/host_runtime.h, made by nvcc). */
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } pushed[8];
static __thread int pushed_count;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  if (pushed_count == 8) return 1;
  pushed[pushed_count].grid = grid;
  pushed[pushed_count].block = block;
  pushed[pushed_count].shared = shared;
  pushed[pushed_count++].stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (!pushed_count) return cudaErrorMissingConfiguration;
  pushed_count--;
  *grid = pushed[pushed_count].grid;
  *block = pushed[pushed_count].block;
  *shared = pushed[pushed_count].shared;
  *(cudaStream_t *)stream = pushed[pushed_count].stream;
  return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp) {}
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t bytes,
                       int constant, int global) {}
char __cudaInitModule(void **handle) { return 1; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel) {
  ENTER;
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = card_here()->major * 10 + card_here()->minor;
  out->maxDynamicSharedSizeBytes = 48 * KiB;
  out->preferredShmemCarveout = -1;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute which, int value) {
  ENTER;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
  ENTER;
  int most = threads > 0 ? threads_of_multiprocessor(card_here()) / threads : 1;
  int room = shared ? (int)(shared_bytes_of_block(card_here()) / shared) : most;
  *blocks = most < room ? most : room;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads,
                                                          size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}

/* ---- the driver's functions, which c10::cuda::DriverAPI asks for by name ---- */

static int not_supported(void) { return cudaErrorNotSupported; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  *out = driver ? dlsym(driver, name) : NULL;
  if (!*out && driver) *out = dlsym(driver, second);
  if (!*out) *out = (void *)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
