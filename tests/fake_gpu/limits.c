/* What a compute capability allows: CUDA programming guide, "Technical Specifications per Compute Capability". */
#include <cuda_runtime_api.h>
#include "machine.h"

enum { KiB = 1 << 10, MiB = 1 << 20 };

int threads_of_multiprocessor(struct card *card) {
  if (card->major == 7) return card->minor == 5 ? 1024 : 2048;
  return (card->major == 8 && card->minor > 0) || card->major == 12 ? 1536 : 2048;
}

int shared_bytes_of_block(struct card *card) {
  if (card->major == 7) return (card->minor == 5 ? 64 : 96) * KiB;
  if (card->major == 8) return (card->minor == 0 || card->minor == 7 ? 163 : 99) * KiB;
  return (card->major == 12 ? 99 : 227) * KiB;
}

int attribute(int which, int index) { /* cudaDeviceAttr and CUdevice_attribute have the same numbers */
  struct card *card = &machine->cards[index];
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * KiB;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return shared_bytes_of_block(card);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared_bytes_of_block(card) + KiB;
    case cudaDevAttrReservedSharedMemoryPerBlock: return KiB;
    case cudaDevAttrTotalConstantMemory: return 64 * KiB;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1410000;
    case cudaDevAttrMemoryClockRate: return 1215000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return (int)card->multiprocessors;
    case cudaDevAttrL2CacheSize: return 40 * MiB;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return threads_of_multiprocessor(card);
    case cudaDevAttrMaxBlocksPerMultiprocessor: return card->major == 8 && card->minor > 0 ? 16 : 32;
    case cudaDevAttrComputeCapabilityMajor: return (int)card->major;
    case cudaDevAttrComputeCapabilityMinor: return (int)card->minor;
    case cudaDevAttrPciBusId: return (int)(card->parent < 0 ? index : card->parent) + 1;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported: return 1;
    case 102: /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 103: return 1; /* …_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    default: return 0;
  }
}
