/* libnccl: communicators of any size that take memory. In small collectives the ranks hear each other through the
   machine, as far as what they say is known: that is how they agree on something. Large ones succeed at once: what a
   rank gathers or is sent is what it holds itself, and a sum over several ranks is not known. */
#include "machine.h"
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { SUCCESS, UNHANDLED_CUDA_ERROR, INVALID_USAGE = 5 }; /* nccl.h, ncclResult_t */

struct id { char bytes[128]; };
struct communicator { int ranks, rank, card; volatile int aborted; int64_t bytes, id, sequence; };

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
  return getrandom(out, sizeof *out, 0) == sizeof *out ? SUCCESS : 2;
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

static int create(struct communicator **out, int ranks, int rank, int64_t id) {
  int card = visible_card(*current_card());
  int64_t bytes = machine->cards[card].nccl_bytes;
  if (fault("*") || open_context(card) || charge(card, bytes)) {
    last_error = "Cuda failure 2 'out of memory'";
    return UNHANDLED_CUDA_ERROR;
  }
  *out = malloc(sizeof **out);
  **out = (struct communicator){ranks, rank, card, 0, bytes, id ? id : 1, 0};
  return SUCCESS;
}

static int64_t number_of(const struct id *id) {
  int64_t number;
  memcpy(&number, id, sizeof number);
  return number;
}

int ncclCommInitRank(struct communicator **out, int ranks, struct id id, int rank) {
  int status = fault(__func__);
  return status ? status : create(out, ranks, rank, number_of(&id));
}

int ncclCommInitRankConfig(struct communicator **out, int ranks, struct id id, int rank, void *config) {
  int status = fault(__func__);
  return status ? status : create(out, ranks, rank, number_of(&id));
}

int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int ids, struct id *id, void *config) {
  int status = fault(__func__);
  return status ? status : create(out, ranks, rank, number_of(id));
}

int ncclCommDestroy(struct communicator *communicator) {
  give_back(communicator->card, communicator->bytes);
  free(communicator);
  return SUCCESS;
}

int ncclCommAbort(struct communicator *communicator) { /* from PyTorch's watchdog, while another thread waits */
  communicator->aborted = 1;
  give_back(communicator->card, communicator->bytes);
  return SUCCESS;
}

int ncclCommFinalize(struct communicator *communicator) { return SUCCESS; }

/* A group, which PyTorch 2.15 makes of every collective: what is in it is done at once, and not at its end. */
int ncclGroupStart(void) { return SUCCESS; }

int ncclGroupEnd(void) { return SUCCESS; }

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

/* Memory may be registered, which costs nothing here. */
static char some_handle;

int ncclCommRegister(struct communicator *communicator, void *buffer, size_t bytes, void **handle) {
  *handle = &some_handle;
  return fault(__func__);
}
int ncclCommDeregister(struct communicator *communicator, void *handle) { return SUCCESS; }

int ncclCommWindowRegister(struct communicator *communicator, void *buffer, size_t bytes, void **window, int flags) {
  *window = &some_handle;
  return fault(__func__);
}
int ncclCommWindowDeregister(struct communicator *communicator, void *window) { return SUCCESS; }

/* ---- collectives ---- */

static int begin(const char *function, struct communicator *communicator) {
  int status = fault("*") ? UNHANDLED_CUDA_ERROR : fault(function);
  if (!status) work(communicator->card, 0, 0);
  return status;
}

/* Every rank says something, waits for the others, and hears what all said. The ranks of which it is known, as bits;
   -1: they do not hear each other here. */
static int exchange(struct communicator *me, const void *mine, int known, size_t bytes,
                    char heard[RANKS][SAID_BYTES]) {
  if (!machine->peers || me->ranks < 2 || me->ranks > RANKS || bytes > SAID_BYTES) return -1;
  struct exchange *here = NULL;
  int64_t sequence = ++me->sequence;
  while (!here && !me->aborted) {
    struct exchange *empty = NULL;
    lock_machine();
    for (struct exchange *it = machine->exchanges; it < machine->exchanges + EXCHANGES; it++) {
      if (it->communicator == me->id && it->sequence == sequence) here = it;
      if (!it->communicator && !empty) empty = it;
    }
    if (!here) here = empty;
    if (here) {
      here->communicator = me->id;
      here->sequence = sequence;
      here->known[me->rank] = known;
      memcpy(here->said[me->rank], mine, bytes);
      here->arrived++;
    }
    unlock_machine();
    if (!here) usleep(200);
  }
  while (!me->aborted && __atomic_load_n(&here->arrived, __ATOMIC_ACQUIRE) < me->ranks) usleep(200);
  if (me->aborted) return 0;
  int known_of = 0;
  for (int rank = 0; rank < me->ranks; rank++) {
    memcpy(heard[rank], here->said[rank], bytes);
    known_of |= (int)here->known[rank] << rank;
  }
  lock_machine();
  if (++here->left == me->ranks) here->communicator = here->arrived = here->left = 0;
  unlock_machine();
  return known_of;
}

static int hear(struct communicator *me, const char *from, size_t bytes, char heard[RANKS][SAID_BYTES]) {
  char mine[SAID_BYTES];
  int known = bytes <= sizeof mine && read_known(mine, from, bytes);
  return exchange(me, mine, known, bytes, heard);
}

int ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **out, void *config) {
  int status = fault(__func__), mine[2] = {color, key}, ranks = 0, rank = 0;
  char heard[RANKS][SAID_BYTES];
  if (status) return status;
  int heard_all = exchange(parent, mine, 1, sizeof mine, heard) > 0;
  for (int other = 0; heard_all && other < parent->ranks; other++) {
    int *its = (int *)heard[other];
    ranks += its[0] == color;
    rank += its[0] == color && (its[1] < key || (its[1] == key && other < parent->rank));
  }
  *out = NULL;
  if (color < 0) return SUCCESS; /* NCCL_SPLIT_NOCOLOR */
  int64_t id = (parent->id * 31 + parent->sequence) * 31 + color;
  return heard_all ? create(out, ranks, rank, id) : create(out, parent->ranks, parent->rank, id);
}

int ncclAllGather(const char *from, char *to, size_t count, int type, struct communicator *communicator) {
  int status = begin(__func__, communicator);
  size_t bytes = bytes_of(count, type);
  char heard[RANKS][SAID_BYTES];
  int known = status ? 0 : hear(communicator, from, bytes, heard);
  for (int rank = 0; !status && rank < communicator->ranks; rank++)
    if (known < 0)
      copy(to + rank * bytes, from, bytes);
    else if (known >> rank & 1)
      copy(to + rank * bytes, heard[rank], bytes);
    else
      fill(to + rank * bytes, 0, bytes);
  return status;
}

int ncclBroadcast(const char *from, char *to, size_t count, int type, int root, struct communicator *communicator) {
  int status = begin(__func__, communicator);
  size_t bytes = bytes_of(count, type);
  char heard[RANKS][SAID_BYTES];
  if (status) return status;
  int known = hear(communicator, from, bytes, heard);
  if (known < 0)
    copy(to, from, bytes);
  else if (known >> root & 1)
    copy(to, heard[root], bytes);
  else
    fill(to, 0, bytes);
  return SUCCESS;
}

int ncclBcast(char *buffer, size_t count, int type, int root, struct communicator *communicator) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator);
}

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE }; /* ncclDataType_t */
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };                                /* ncclRedOp_t */

#define EACH_TYPE(DO) \
  DO(INT8, int8_t) DO(UINT8, uint8_t) DO(INT32, int32_t) DO(UINT32, uint32_t) DO(INT64, int64_t) \
  DO(UINT64, uint64_t) DO(FLOAT, float) DO(DOUBLE, double)

static long double element(const char *at, size_t index, int type) {
  switch (type) {
#define READ(name, c_type) case name: return ((const c_type *)at)[index];
    EACH_TYPE(READ)
    default: return 0;
  }
}

static void set_element(char *at, size_t index, int type, long double value) {
  switch (type) {
#define WRITE(name, c_type) case name: ((c_type *)at)[index] = (c_type)value; break;
    EACH_TYPE(WRITE)
  }
}

static long double both(long double one, long double other, int operation) {
  if (operation == MAX) return one > other ? one : other;
  if (operation == MIN) return one < other ? one : other;
  return operation == PRODUCT ? one * other : one + other;
}

/* What all ranks' elements from `first` on make together: every rank gets the part that it keeps. */
static int reduce(const char *function, const char *from, char *to, size_t said, size_t first, size_t kept, int type,
                  int operation, struct communicator *me) {
  int status = begin(function, me);
  char heard[RANKS][SAID_BYTES], together[SAID_BYTES];
  if (status) return status;
  if (me->ranks == 1 || machine->reads == READS_STORED) copy(to, from + bytes_of(first, type), bytes_of(kept, type));
  if (me->ranks == 1) return SUCCESS;
  int of_all = hear(me, from, bytes_of(said, type), heard) == (1 << me->ranks) - 1;
  int known = of_all && type != HALF && type <= DOUBLE;
  for (size_t i = 0; known && i < kept; i++) {
    long double value = element(heard[0], first + i, type);
    for (int rank = 1; rank < me->ranks; rank++) value = both(value, element(heard[rank], first + i, type), operation);
    set_element(together, i, type, operation == AVERAGE ? value / me->ranks : value);
  }
  if (known)
    copy(to, together, bytes_of(kept, type));
  else if (machine->reads != READS_STORED)
    fill(to, 0, bytes_of(kept, type));
  return SUCCESS;
}

int ncclAllReduce(const char *from, char *to, size_t count, int type, int operation,
                  struct communicator *communicator) {
  return reduce(__func__, from, to, count, 0, count, type, operation, communicator);
}

int ncclReduce(const char *from, char *to, size_t count, int type, int operation, int root,
               struct communicator *communicator) {
  return reduce(__func__, from, to, count, 0, count, type, operation, communicator);
}

int ncclReduceScatter(const char *from, char *to, size_t count, int type, int operation,
                      struct communicator *communicator) {
  size_t first = communicator->rank * count;
  return reduce(__func__, from, to, count * communicator->ranks, first, count, type, operation, communicator);
}
