/* libnvidia-ml: the driver's own view of the cards. It ignores CUDA_VISIBLE_DEVICES and opens no context. */
#define _GNU_SOURCE
#include "machine.h"
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* nvml.h, nvmlReturn_t */
enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, ALREADY, NOT_FOUND, TOO_SMALL };
enum { NO_DRIVER = 9, NO_LIBRARY = 12, NO_FUNCTION = 13, UNKNOWN = 999 };
typedef void *handle_t;
typedef unsigned long long bytes_t;

static int initialized;

#define HANDLE(index) ((handle_t)(uintptr_t)(0x4000 + (index)))
#define CARD int card = (int)((uintptr_t)device - 0x4000); \
  if (!initialized) return UNINITIALIZED;                  \
  if (card < 0 || card >= machine->count) return INVALID_ARGUMENT
/* A function that the driver of 2021 (R470) lacks: pynvml cannot tell this from a symbol that is not there. */
#define SINCE_2021 \
  if (machine->nvml == NVML_OLD) return NO_FUNCTION
/* CUDA on WSL user guide, "Known Limitations": not all of NVML's queries are supported. */
#define NOT_ON_WSL \
  if (machine->nvml == NVML_WSL) return NOT_SUPPORTED
/* MIG user guide: sensors are the GPU's, not a slice's. */
#define NOT_OF_SLICE \
  if (machine->cards[card].parent >= 0) return NOT_SUPPORTED

/* ---- the library ---- */

int nvmlInitWithFlags(unsigned flags) {
  machine_attach();
  if (machine->nvml == NVML_ABSENT) return NO_LIBRARY;
  initialized++;
  return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
  if (!initialized) return UNINITIALIZED;
  initialized--;
  return SUCCESS;
}

const char *nvmlErrorString(int status) {
  static const char *const texts[] = {"Success", "Uninitialized", "Invalid Argument", "Not Supported",
                                      "Insufficient Permissions", "Already Initialized", "Not Found",
                                      "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
                                      "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
                                      "Function Not Found"};
  return status >= 0 && status < (int)(sizeof texts / sizeof *texts) ? texts[status] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned room) {
  snprintf(text, room, "%s", machine->nvml == NVML_OLD ? "470.57.02" : "580.95.05");
  return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *text, unsigned room) {
  snprintf(text, room, "%s", machine->nvml == NVML_OLD ? "11.470.57.02" : "13.580.95.05");
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = machine->nvml == NVML_OLD ? 11040 : 13000;
  return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ---- handles ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
  if (!initialized) return UNINITIALIZED;
  *count = 0;
  for (int i = 0; i < machine->count; i++) *count += machine->cards[i].parent < 0;
  return SUCCESS;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t *out) {
  if (!initialized) return UNINITIALIZED;
  for (int i = 0; i < machine->count; i++)
    if (machine->cards[i].parent < 0 && index-- == 0) {
      *out = HANDLE(i);
      return SUCCESS;
    }
  return INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByIndex(unsigned index, handle_t *out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

int nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *out) {
  if (!initialized) return UNINITIALIZED;
  for (int i = 0; i < machine->count; i++)
    if (!strcasecmp(machine->cards[i].uuid, uuid)) {
      *out = HANDLE(i);
      return SUCCESS;
    }
  return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, handle_t *out) {
  if (!initialized) return UNINITIALIZED;
  for (int i = 0; i < machine->count; i++) {
    char name[32];
    pci_name(i, name, sizeof name);
    if (machine->cards[i].parent < 0 && strcasestr(name, bus)) {
      *out = HANDLE(i);
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId(const char *bus, handle_t *out) { return nvmlDeviceGetHandleByPciBusId_v2(bus, out); }

int nvmlDeviceGetIndex(handle_t device, unsigned *index) {
  CARD;
  *index = 0;
  for (int i = 0; i < card; i++) *index += machine->cards[i].parent == machine->cards[card].parent;
  return SUCCESS;
}

int nvmlDeviceGetName(handle_t device, char *text, unsigned room) {
  CARD;
  snprintf(text, room, "%s", machine->cards[card].name);
  return SUCCESS;
}

int nvmlDeviceGetUUID(handle_t device, char *text, unsigned room) {
  CARD;
  snprintf(text, room, "%s", machine->cards[card].uuid);
  return SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char name[32]; };

int nvmlDeviceGetPciInfo_v3(handle_t device, struct pci *out) {
  CARD;
  memset(out, 0, sizeof *out);
  out->bus = card + 1;
  pci_name(card, out->name, sizeof out->name);
  snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus & 0xff);
  return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(handle_t device, int *major, int *minor) {
  CARD;
  *major = (int)machine->cards[card].major;
  *minor = (int)machine->cards[card].minor;
  return SUCCESS;
}

/* ---- slices ---- */

int nvmlDeviceGetMigMode(handle_t device, unsigned *current, unsigned *pending) {
  CARD;
  if (machine->cards[card].parent >= 0 || !machine->cards[card].mig) return NOT_SUPPORTED;
  *current = *pending = 1;
  return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(handle_t device, unsigned *is) {
  CARD;
  *is = machine->cards[card].parent >= 0;
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(handle_t device, unsigned *count) {
  CARD;
  *count = machine->cards[card].mig ? 7 : 0;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(handle_t device, unsigned index, handle_t *out) {
  CARD;
  for (int i = 0; i < machine->count; i++)
    if (machine->cards[i].parent == card && index-- == 0) {
      *out = HANDLE(i);
      return SUCCESS;
    }
  return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle_t device, handle_t *out) {
  CARD;
  if (machine->cards[card].parent < 0) return INVALID_ARGUMENT;
  *out = HANDLE(machine->cards[card].parent);
  return SUCCESS;
}

/* ---- memory and who has it ---- */

struct memory_v1 { bytes_t total, free, used; };
struct memory_v2 { unsigned version; bytes_t total, reserved, free, used; };
struct rates { unsigned gpu, memory; };
struct temperature { unsigned version, sensor; int celsius; };

int nvmlDeviceGetMemoryInfo(handle_t device, struct memory_v1 *out) {
  CARD;
  out->total = machine->cards[card].capacity;
  out->used = used(card);
  out->free = out->used < out->total ? out->total - out->used : 0;
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(handle_t device, struct memory_v2 *out) {
  CARD;
  SINCE_2021;
  out->total = machine->cards[card].capacity;
  out->reserved = 0;
  out->used = used(card);
  out->free = out->used < out->total ? out->total - out->used : 0;
  return SUCCESS;
}

struct process_v1 { unsigned pid; bytes_t used; };
struct process_v3 { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; };

static int list(int card, unsigned *count, struct process_v1 *old, struct process_v3 *recent) {
  int64_t pids[PROCESSES + OTHERS], bytes[PROCESSES + OTHERS];
  unsigned room = *count, found = list_processes(card, pids, bytes, PROCESSES + OTHERS);
  *count = found;
  if (found > room || (found && !old && !recent)) return TOO_SMALL;
  for (unsigned i = 0; i < found; i++)
    if (old)
      old[i] = (struct process_v1){pids[i], bytes[i]};
    else
      recent[i] = (struct process_v3){pids[i], bytes[i], ~0u, ~0u};
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(handle_t device, unsigned *count, struct process_v1 *out) {
  CARD;
  NOT_ON_WSL;
  return list(card, count, out, NULL);
}

int nvmlDeviceGetComputeRunningProcesses_v2(handle_t device, unsigned *count, struct process_v3 *out) {
  CARD;
  NOT_ON_WSL;
  return list(card, count, NULL, out);
}

int nvmlDeviceGetComputeRunningProcesses_v3(handle_t device, unsigned *count, struct process_v3 *out) {
  CARD;
  SINCE_2021;
  NOT_ON_WSL;
  return list(card, count, NULL, out);
}

static int nobody(unsigned *count) {
  *count = 0;
  return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(handle_t device, unsigned *count, void *out) {
  CARD;
  NOT_ON_WSL;
  return nobody(count);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(handle_t device, unsigned *count, void *out) {
  CARD;
  SINCE_2021;
  NOT_ON_WSL;
  return nobody(count);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(handle_t device, unsigned *count, void *out) {
  CARD;
  SINCE_2021;
  NOT_ON_WSL;
  return nobody(count);
}

/* ---- sensors: they follow the clock's queue ---- */

int nvmlDeviceGetUtilizationRates(handle_t device, struct rates *out) {
  CARD;
  NOT_OF_SLICE;
  look_at_sensors(card);
  out->gpu = (unsigned)(100 * machine->cards[card].utilization + 0.5);
  out->memory = out->gpu * 6 / 10;
  return SUCCESS;
}

int nvmlDeviceGetTemperature(handle_t device, int sensor, unsigned *celsius) {
  CARD;
  NOT_OF_SLICE;
  look_at_sensors(card);
  *celsius = (unsigned)machine->cards[card].celsius;
  return SUCCESS;
}

int nvmlDeviceGetTemperatureV(handle_t device, struct temperature *out) {
  SINCE_2021;
  return nvmlDeviceGetTemperature(device, 0, (unsigned *)&out->celsius);
}

static double watts(int card) {
  struct card *it = &machine->cards[card];
  return it->idle_watts + (it->full_watts - it->idle_watts) * it->utilization;
}

int nvmlDeviceGetPowerUsage(handle_t device, unsigned *milliwatts) {
  CARD;
  NOT_OF_SLICE;
  look_at_sensors(card);
  *milliwatts = (unsigned)(watts(card) * 1e3);
  return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(handle_t device, unsigned *milliwatts) {
  CARD;
  NOT_OF_SLICE;
  *milliwatts = (unsigned)(machine->cards[card].full_watts * 1e3);
  return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(handle_t device, bytes_t *millijoules) {
  CARD;
  NOT_ON_WSL;
  NOT_OF_SLICE;
  struct card *it = &machine->cards[card];
  double seconds = now() - machine->started, busy = busy_done(card) + it->busy_by_others * seconds;
  *millijoules = (bytes_t)((it->idle_watts * seconds + (it->full_watts - it->idle_watts) * busy) * 1e3);
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(handle_t device, bytes_t *reasons) {
  CARD;
  NOT_ON_WSL;
  NOT_OF_SLICE;
  *reasons = machine->cards[card].throttle_reasons;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(handle_t device, bytes_t *reasons) {
  SINCE_2021;
  return nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons);
}

int nvmlDeviceGetClockInfo(handle_t device, int which, unsigned *megahertz) {
  CARD;
  NOT_OF_SLICE;
  *megahertz = 1410;
  return SUCCESS;
}
int nvmlDeviceGetMaxClockInfo(handle_t device, int which, unsigned *megahertz) {
  return nvmlDeviceGetClockInfo(device, which, megahertz);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(handle_t device, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle_t device, unsigned link, void *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(handle_t device, void *out) { return NOT_SUPPORTED; }
