/* libnccl: communicators of any size that take memory; collectives succeed. Ranks do not hear each other: what one
   gathers or is sent is what it holds itself, as if all ranks held the same; a sum over several ranks is not known. */
#include "machine.h"
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, UNHANDLED_CUDA_ERROR, INVALID_USAGE = 5 }; /* nccl.h, ncclResult_t */

struct id { char bytes[128]; };
struct communicator { int ranks, rank, card; int64_t bytes; };

static const char *last_error = "";

static size_t bytes_of(size_t count, int type) { /* ncclDataType_t */
  static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return count * (type >= 0 && type < 12 ? sizes[type] : 1);
}

int ncclGetVersion(int *version) {
  *version = NCCL_VERSION;
  return SUCCESS;
}

int ncclGetUniqueId(struct id *out) {
  memset(out, 1, sizeof *out);
  return SUCCESS;
}

const char *ncclGetErrorString(int status) {
  switch (status) {
    case SUCCESS: return "no error";
    case UNHANDLED_CUDA_ERROR: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case 2: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case 3: return "internal error - please report this issue to the NCCL developers";
    case INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case 6: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}

const char *ncclGetLastError(void *communicator) { return last_error; }

static int create(struct communicator **out, int ranks, int rank) {
  int card = visible_card(*current_card());
  int64_t bytes = machine->cards[card].nccl_bytes;
  if (fault("*") || open_context(card) || charge(card, bytes)) {
    last_error = "Cuda failure 2 'out of memory'";
    return UNHANDLED_CUDA_ERROR;
  }
  *out = malloc(sizeof **out);
  **out = (struct communicator){ranks, rank, card, bytes};
  return SUCCESS;
}

int ncclCommInitRank(struct communicator **out, int ranks, struct id id, int rank) {
  int status = fault(__func__);
  return status ? status : create(out, ranks, rank);
}

int ncclCommInitRankConfig(struct communicator **out, int ranks, struct id id, int rank, void *config) {
  int status = fault(__func__);
  return status ? status : create(out, ranks, rank);
}

int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, struct id *id, void *config) {
  int status = fault(__func__);
  return status ? status : create(out, ranks, rank);
}

int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **out, void *config) {
  int status = fault(__func__);
  return status ? status : create(out, parent->ranks, parent->rank);
}

int ncclCommDestroy(struct communicator *communicator) {
  give_back(communicator->card, communicator->bytes);
  free(communicator);
  return SUCCESS;
}
int ncclCommAbort(struct communicator *communicator) { return ncclCommDestroy(communicator); }
int ncclCommFinalize(struct communicator *communicator) { return SUCCESS; }

int ncclCommCount(struct communicator *communicator, int *ranks) {
  *ranks = communicator->ranks;
  return SUCCESS;
}

int ncclCommUserRank(struct communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return SUCCESS;
}

int ncclCommGetAsyncError(struct communicator *communicator, int *status) {
  *status = SUCCESS;
  return SUCCESS;
}

/* ---- collectives ---- */

static int begin(const char *function, struct communicator *communicator) {
  int status = fault("*") ? UNHANDLED_CUDA_ERROR : fault(function);
  if (!status) work(communicator->card, 0, 0);
  return status;
}

int ncclAllGather(const char *from, char *to, size_t count, int type, struct communicator *communicator) {
  int status = begin(__func__, communicator);
  size_t bytes = bytes_of(count, type);
  for (int rank = 0; !status && rank < communicator->ranks; rank++) copy(to + rank * bytes, from, bytes);
  return status;
}

int ncclBroadcast(const char *from, char *to, size_t count, int type, int root, struct communicator *communicator) {
  int status = begin(__func__, communicator);
  if (!status) copy(to, from, bytes_of(count, type));
  return status;
}

int ncclBcast(char *buffer, size_t count, int type, int root, struct communicator *communicator) {
  return begin(__func__, communicator);
}

static int reduce(const char *function, const char *from, char *to, size_t bytes, struct communicator *communicator) {
  int status = begin(function, communicator);
  if (status) return status;
  if (communicator->ranks == 1 || machine->reads == READS_STORED)
    copy(to, from, bytes);
  else
    fill(to, 0, bytes);
  return SUCCESS;
}

int ncclAllReduce(const char *from, char *to, size_t count, int type, int operation,
                  struct communicator *communicator) {
  return reduce(__func__, from, to, bytes_of(count, type), communicator);
}

int ncclReduce(const char *from, char *to, size_t count, int type, int operation, int root,
               struct communicator *communicator) {
  return reduce(__func__, from, to, bytes_of(count, type), communicator);
}

int ncclReduceScatter(const char *from, char *to, size_t count, int type, int operation,
                      struct communicator *communicator) {
  size_t bytes = bytes_of(count, type);
  return reduce(__func__, from + communicator->rank * bytes, to, bytes, communicator);
}
