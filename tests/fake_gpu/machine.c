/* What the stand-ins of all CUDA libraries share in one process: the mapped machine, its accounts, and addresses. */
#define _GNU_SOURCE
#include "machine.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static struct machine no_machine; /* no card, a driver that answers */
struct machine *machine = &no_machine;
static char attached[4096];

/* ---- the file ---- */

void machine_attach(void) {
  const char *path = getenv("FAKE_GPU");
  if (!path) path = "";
  if (!strcmp(path, attached)) return;
  snprintf(attached, sizeof attached, "%s", path);
  machine = &no_machine;
  int file = *path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  struct machine *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (found == MAP_FAILED) return;
  if (found->size != (int64_t)sizeof *found) {
    fprintf(stderr, "fake_gpu: %s describes %ld bytes, the libraries expect %zu: run environment.py again\n", path,
            (long)found->size, sizeof *found);
    abort();
  }
  machine = found;
}

/* The owner's pid is the lock: of a process that was killed inside it, the next one takes it over. */
static int alive(int64_t pid, int64_t started);

void lock_machine(void) {
  int64_t me = getpid();
  for (;;) {
    int64_t owner = 0;
    if (__atomic_compare_exchange_n(&machine->lock, &owner, me, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    if (owner != me && !alive(owner, 0) &&
        __atomic_compare_exchange_n(&machine->lock, &owner, me, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return;
    sched_yield();
  }
}

void unlock_machine(void) { __atomic_store_n(&machine->lock, 0, __ATOMIC_RELEASE); }

/* ---- processes ---- */

/* When the process started, in clock ticks; 0: it is gone, or a zombie, whose memory the driver has taken back. */
static int64_t start_of(int64_t pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  char *after_name = strrchr(text, ')'); /* proc(5): the name may hold anything */
  if (!after_name || after_name[2] == 'Z' || after_name[2] == 'X') return 0;
  long long started = 0;
  char *field = after_name + 2;
  for (int number = 3; field && number < 22; number++) field = strchr(field + 1, ' ');
  if (field) sscanf(field, " %lld", &started);
  return started;
}

static int alive(int64_t pid, int64_t started) {
  int64_t found = start_of(pid);
  return found && (!started || started == found);
}

/* Under the lock: the entries of processes that ended are free again, as a driver gives their memory back. */
static void sweep(void) {
  for (int i = 0; i < PROCESSES; i++) {
    struct process *process = &machine->processes[i];
    if (process->pid && process->pid != getpid() && !alive(process->pid, process->started))
      memset(process, 0, sizeof *process);
  }
}

static struct process *entry_of(int64_t pid) {
  for (int i = 0; i < PROCESSES; i++)
    if (machine->processes[i].pid == pid) return &machine->processes[i];
  return NULL;
}

static struct process *my_entry(void) {
  int64_t me = getpid(), started = start_of(me);
  struct process *mine = entry_of(me);
  if (mine && mine->started == started) return mine;
  if (!mine) mine = entry_of(0);
  if (!mine) {
    fprintf(stderr, "fake_gpu: more than %d processes on one machine\n", PROCESSES);
    abort();
  }
  memset(mine, 0, sizeof *mine);
  mine->started = started;
  mine->pid = me;
  return mine;
}

/* ---- memory of the cards ---- */

static int64_t used_now(int card) {
  int64_t sum = 0;
  for (int i = 0; i < machine->count; i++) {
    if (i != card && machine->cards[i].parent != card) continue;
    for (int other = 0; other < OTHERS; other++) sum += machine->cards[i].others[other].bytes;
    for (int process = 0; process < PROCESSES; process++) sum += machine->processes[process].bytes[i];
  }
  return sum;
}

int64_t used(int card) {
  lock_machine();
  sweep();
  int64_t sum = used_now(card);
  unlock_machine();
  return sum;
}

int64_t used_by(int card, int64_t pid) {
  struct process *process = entry_of(pid);
  return process ? process->bytes[card] : 0;
}

static int charge_locked(int card, int64_t bytes) {
  if (bytes < 0 || used_now(card) + bytes > machine->cards[card].capacity) {
    sweep(); /* what a dead process still has is free */
    if (bytes < 0 || used_now(card) + bytes > machine->cards[card].capacity) {
      machine->cards[card].ooms++;
      return -1;
    }
  }
  my_entry()->bytes[card] += bytes;
  return 0;
}

int charge(int card, int64_t bytes) {
  lock_machine();
  int refused = charge_locked(card, bytes);
  unlock_machine();
  return refused;
}

void give_back(int card, int64_t bytes) {
  lock_machine();
  my_entry()->bytes[card] -= bytes;
  unlock_machine();
}

static int context_pid[CARDS]; /* which process opened it: a forked child has the parent's variables */

/* cudaErrorInitializationError (3) in a forked child whose parent had a context: CUDA programming guide, "CUDA does
   not support fork". */
int open_context(int card) {
  if (context_pid[card] == getpid()) return 0;
  for (int i = 0; i < CARDS; i++)
    if (context_pid[i] && context_pid[i] != getpid()) return 3;
  lock_machine();
  int refused = charge_locked(card, machine->cards[card].context_bytes);
  if (!refused) my_entry()->context[card] = 1;
  unlock_machine();
  if (!refused) context_pid[card] = getpid();
  return refused ? 2 : 0;
}

int has_context(int card) { return context_pid[card] == getpid(); }

int list_processes(int card, int64_t *pids, int64_t *bytes, int room) {
  int count = 0;
  lock_machine();
  sweep();
  for (int i = 0; i < machine->count; i++) {
    if (i != card && machine->cards[i].parent != card) continue;
    for (int process = 0; process < PROCESSES; process++) {
      struct process *entry = &machine->processes[process];
      if (!entry->pid || !(entry->context[i] || entry->bytes[i])) continue;
      if (count < room) pids[count] = entry->pid, bytes[count] = entry->bytes[i];
      count++;
    }
    for (int other = 0; other < OTHERS; other++) {
      struct other *entry = &machine->cards[i].others[other];
      if (!entry->pid) continue;
      if (count < room) pids[count] = entry->pid, bytes[count] = entry->bytes;
      count++;
    }
  }
  unlock_machine();
  return count;
}

/* ---- which cards this process sees: CUDA programming guide, "CUDA Environment Variables" ---- */

static int visible[CARDS], visible_total;
static pthread_once_t visible_once = PTHREAD_ONCE_INIT;

static int is_gpu(int card) { return machine->cards[card].parent < 0; }

static int first_slice(int gpu) {
  for (int i = 0; i < machine->count; i++)
    if (machine->cards[i].parent == gpu) return i;
  return -1;
}

static int by_index(const char *text) {
  char *end;
  long index = strtol(text, &end, 10);
  if (*end || end == text || index < 0) return -1;
  for (int i = 0; i < machine->count; i++)
    if (is_gpu(i) && index-- == 0) return machine->cards[i].mig ? first_slice(i) : i;
  return -1;
}

/* "GPU-8932f937-…" or as much of it as is needed to be unique; a slice's name is written out. */
static int by_uuid(const char *text) {
  int found = -1;
  for (int i = 0; i < machine->count; i++) {
    struct card *card = &machine->cards[i];
    if (is_gpu(i) ? strncasecmp(card->uuid, text, strlen(text)) : strcasecmp(card->uuid, text)) continue;
    if (found >= 0) return -1;
    found = card->mig ? first_slice(i) : i;
  }
  return found;
}

static void see_all(void) {
  for (int i = 0; i < machine->count; i++)
    if (is_gpu(i) && !machine->cards[i].mig) visible[visible_total++] = i;
  for (int i = 0; i < machine->count && !visible_total; i++)
    if (machine->cards[i].mig && first_slice(i) >= 0) visible[visible_total++] = first_slice(i);
}

static void see(void) {
  machine_attach();
  const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
  if (!wanted) {
    see_all();
    return;
  }
  char text[4096], *rest;
  snprintf(text, sizeof text, "%s", wanted);
  for (char *name = strtok_r(text, ", ", &rest); name; name = strtok_r(NULL, ", ", &rest)) {
    int card = strncmp(name, "GPU-", 4) && strncmp(name, "MIG-", 4) ? by_index(name) : by_uuid(name);
    if (card < 0) break; /* "only the devices whose index precedes the invalid index are visible" */
    for (int i = 0; i < visible_total; i++)
      if (visible[i] == card) {
        visible_total = 0; /* a card named twice: none is visible */
        return;
      }
    visible[visible_total++] = card;
    if (!is_gpu(card)) break; /* MIG user guide: a process can enumerate a single MIG device */
  }
}

int visible_count(void) {
  pthread_once(&visible_once, see);
  return visible_total;
}

int visible_card(int ordinal) { return visible[ordinal]; }

int visible_ordinal(int card) {
  for (int i = 0; i < visible_total; i++)
    if (visible[i] == card) return i;
  return 0;
}

int *current_card(void) {
  static __thread int current;
  return &current;
}

/* ---- names ---- */

void pci_name(int card, char *text, size_t room) {
  int gpu = machine->cards[card].parent < 0 ? card : (int)machine->cards[card].parent;
  snprintf(text, room, "00000000:%02X:00.0", gpu + 1);
}

void uuid_bytes(int card, unsigned char *bytes) {
  const char *text = strchr(machine->cards[card].uuid, '-');
  memset(bytes, 0, 16);
  for (int digit = 0; text && *text && digit < 32; text++) {
    const char *hexadecimal = "0123456789abcdef", *found = *text == '-' ? NULL : strchr(hexadecimal, *text | 32);
    if (found) bytes[digit / 2] |= (found - hexadecimal) << (digit % 2 ? 0 : 4), digit++;
  }
}

/* ---- faults ---- */

int fault(const char *function) {
  if (!machine->faults_set) return 0;
  int64_t me = getpid();
  int status = 0;
  lock_machine();
  for (int i = 0; i < FAULTS && !status; i++) {
    struct fault *wanted = &machine->faults[i];
    if (!wanted->active || (wanted->pid && wanted->pid != me) || strcmp(wanted->function, function)) continue;
    if (wanted->after-- > 0) continue;
    if (wanted->times == 0) continue;
    if (wanted->times > 0) wanted->times--;
    status = (int)wanted->status;
  }
  unlock_machine();
  return status;
}

/* ---- the clock: every card has one queue; who waits for the card sleeps until it is empty ---- */

double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int clock_on(int card) {
  struct card *it = &machine->cards[card];
  return it->launch_seconds > 0 || it->thread_seconds > 0 || it->flops > 0;
}

void work(int card, double threads, double flops) {
  struct card *it = &machine->cards[card];
  if (!clock_on(card)) return;
  double seconds = it->launch_seconds + threads * it->thread_seconds + (it->flops > 0 ? flops / it->flops : 0);
  lock_machine();
  double start = now();
  it->busy_until = (it->busy_until > start ? it->busy_until : start) + seconds;
  it->busy_seconds += seconds;
  unlock_machine();
}

void wait_until(double when) {
  struct timespec time = {(time_t)when, (long)((when - floor(when)) * 1e9)};
  while (when > now() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR) {}
}

double busy_done(int card) {
  double left = machine->cards[card].busy_until - now();
  return machine->cards[card].busy_seconds - (left > 0 ? left : 0);
}

/* NVML averages over a sample period of 1/6 s to 1 s (nvml.h, nvmlUtilization_t); heat follows within seconds. */
void look_at_sensors(int card) {
  struct card *it = &machine->cards[card];
  lock_machine();
  double time = now(), passed = time - (it->looked ? it->looked : machine->started), done = busy_done(card);
  if (passed >= 0.1 || !it->looked) {
    it->utilization = fmin(1, fmax(0, (done - it->looked_busy) / fmax(passed, 0.1)) + it->busy_by_others);
    double wanted = 35 + 45 * it->utilization;
    it->celsius += (wanted - it->celsius) * (1 - exp(-passed / 5));
    it->looked = time;
    it->looked_busy = done;
  }
  unlock_machine();
}

/* ---- addresses ---- */

static struct memory *memories;
static size_t memory_count, memory_room;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

enum { PAGE = 2 << 20 };

/* Addresses rise from one allocation to the next and come again only once all were used: among free blocks of one size
   PyTorch's allocator takes the one at the lowest address, so what a run takes depends on them. */
static char *const first_address = (char *)0x100000000000, *const last_address = (char *)0x600000000000;
static char *next_address = (char *)0x100000000000;

void *map_device(size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  size_t room = (bytes + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&memory_lock);
  char *start = MAP_FAILED;
  for (int round = 0; start == MAP_FAILED && round < 2; round++) {
    for (; start == MAP_FAILED && next_address + room < last_address; next_address += room) {
      start = mmap(next_address, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
      if (start == MAP_FAILED && errno != EEXIST) round = 2; /* not taken: the host has no room */
      if (round == 2) break;
    }
    if (start == MAP_FAILED) next_address = first_address;
  }
  pthread_mutex_unlock(&memory_lock);
  if (start == MAP_FAILED) return NULL;
  madvise(start, bytes, MADV_NOHUGEPAGE); /* a stored byte shall cost 4 KiB, not 2 MiB */
  return start;
}

void remember(void *start, size_t bytes, int card, int kind) {
  pthread_mutex_lock(&memory_lock);
  if (memory_count == memory_room) {
    memory_room = memory_room ? 2 * memory_room : 256;
    memories = realloc(memories, memory_room * sizeof *memories);
  }
  memories[memory_count++] = (struct memory){start, bytes, card, kind};
  pthread_mutex_unlock(&memory_lock);
}

int forget(void *start, int kind, struct memory *found) {
  int missing = -1;
  pthread_mutex_lock(&memory_lock);
  for (size_t i = memory_count; i-- > 0;)
    if (memories[i].start == (char *)start && memories[i].kind == kind) {
      *found = memories[i];
      memories[i] = memories[--memory_count];
      missing = 0;
      break;
    }
  pthread_mutex_unlock(&memory_lock);
  return missing;
}

int find_memory(const void *address, struct memory *found) {
  int missing = -1;
  pthread_mutex_lock(&memory_lock);
  for (size_t i = memory_count; i-- > 0 && missing;)
    if ((char *)address >= memories[i].start && (char *)address < memories[i].start + memories[i].bytes) {
      *found = memories[i];
      missing = 0;
    }
  pthread_mutex_unlock(&memory_lock);
  return missing;
}

static int on_device(const void *address) {
  struct memory found;
  return !find_memory(address, &found) && found.kind == DEVICE;
}

/* ---- values ----
   No kernel runs, so what one leaves behind is not known. Known is what a copy put there, until a kernel may have
   changed it: enough for what processes tell each other before they train (DDP compares the shapes of the
   parameters). Everything else reads as zeros; a single byte, which is a flag, as 1: torch.isfinite(loss).all(). */

enum { KNOWN_BYTES = 64 << 10, KNOWN = 64 };
static struct { const char *at; size_t bytes; char *value; } known[KNOWN];
static int known_count;
static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;

void kernel_ran(void) { known_count = 0; }

static char *known_at(const char *at, size_t bytes) {
  for (int i = 0; i < known_count; i++)
    if (at >= known[i].at && at + bytes <= known[i].at + known[i].bytes) return known[i].value + (at - known[i].at);
  return NULL;
}

static void learn(const char *at, const void *value, size_t bytes) {
  int kept = 0;
  for (int i = 0; i < known_count; i++) /* what it covers even in part is known no longer */
    if (at + bytes <= known[i].at || at >= known[i].at + known[i].bytes) {
      __typeof__(known[0]) swap = known[kept];
      known[kept++] = known[i];
      known[i] = swap;
    }
  known_count = kept;
  if (!value || bytes > KNOWN_BYTES) return;
  if (known_count == KNOWN) { /* the oldest gives way */
    __typeof__(known[0]) oldest = known[0];
    memmove(known, known + 1, sizeof known - sizeof oldest);
    known[kept = --known_count] = oldest;
  }
  known[kept].at = at;
  known[kept].bytes = bytes;
  known[kept].value = realloc(known[kept].value, bytes);
  memcpy(known[kept].value, value, bytes);
  known_count++;
}

int read_known(void *to, const void *from, size_t bytes) {
  if (machine->reads == READS_STORED) {
    memcpy(to, from, bytes);
    return 1;
  }
  pthread_mutex_lock(&known_lock);
  const char *value = machine->reads == READS_ZERO ? NULL : known_at(from, bytes);
  if (value) memcpy(to, value, bytes);
  pthread_mutex_unlock(&known_lock);
  return value != NULL;
}

void copy(void *to, const void *from, size_t bytes) {
  if (!bytes || to == from) return;
  if (machine->reads == READS_STORED) {
    memmove(to, from, bytes);
    return;
  }
  int to_device = on_device(to), from_device = on_device(from);
  pthread_mutex_lock(&known_lock);
  const void *value = from_device ? known_at(from, bytes) : from;
  if (machine->reads == READS_ZERO && from_device) value = NULL;
  if (to_device)
    learn(to, value, bytes);
  else if (value)
    memmove(to, value, bytes);
  else
    memset(to, machine->reads == READS_KNOWN && bytes == 1, bytes);
  pthread_mutex_unlock(&known_lock);
}

void fill(void *to, int value, size_t bytes) {
  if (machine->reads == READS_STORED) {
    memset(to, value, bytes);
    return;
  }
  pthread_mutex_lock(&known_lock);
  learn(to, NULL, bytes);
  pthread_mutex_unlock(&known_lock);
}
