/* The machine that all processes share: its cards, the processes on them, and the faults that a test asked for.
   It lies in the file that FAKE_GPU names. __init__.py describes the same layout to Python: change both.
   Only 8-byte fields and texts of multiples of 8 bytes, so that no compiler puts holes in it. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Names that everything in a process can see: none of them may meet another library's. */
#define machine fake_gpu_machine
#define machine_attach fake_gpu_machine_attach
#define visible_count fake_gpu_visible_count
#define visible_card fake_gpu_visible_card
#define visible_ordinal fake_gpu_visible_ordinal
#define charge fake_gpu_charge
#define give_back fake_gpu_give_back
#define open_context fake_gpu_open_context
#define has_context fake_gpu_has_context
#define used fake_gpu_used
#define used_by fake_gpu_used_by
#define list_processes fake_gpu_list_processes
#define fault fake_gpu_fault
#define now fake_gpu_now
#define clock_on fake_gpu_clock_on
#define work fake_gpu_work
#define wait_until fake_gpu_wait_until
#define busy_done fake_gpu_busy_done
#define look_at_sensors fake_gpu_look_at_sensors
#define map_device fake_gpu_map_device
#define remember fake_gpu_remember
#define forget fake_gpu_forget
#define find_memory fake_gpu_find_memory
#define copy fake_gpu_copy
#define fill fake_gpu_fill
#define kernel_ran fake_gpu_kernel_ran
#define read_known fake_gpu_read_known
#define lock_machine fake_gpu_lock_machine
#define unlock_machine fake_gpu_unlock_machine
#define current_card fake_gpu_current_card
#define pci_name fake_gpu_pci_name
#define uuid_bytes fake_gpu_uuid_bytes
#define attribute fake_gpu_attribute
#define threads_of_multiprocessor fake_gpu_threads_of_multiprocessor
#define shared_bytes_of_block fake_gpu_shared_bytes_of_block

enum { CARDS = 32, PROCESSES = 64, OTHERS = 8, FAULTS = 16 };
enum { NVML_FULL, NVML_OLD, NVML_WSL, NVML_ABSENT };
enum { READS_KNOWN, READS_ZERO, READS_STORED, READS_FALSE }; /* the last: as the first, but flags as 0 */
enum { EXCHANGES = 32, RANKS = 16, SAID_BYTES = 4096 };

struct other { /* a process that is not ours: it only has memory */
  int64_t pid, bytes;
};

struct card { /* a GPU, or a MIG slice of one */
  char name[96], uuid[64];
  int64_t parent;  /* of a slice: the GPU that it is cut from; else -1 */
  int64_t mig;     /* this GPU is cut into slices and is no device of CUDA's itself */
  int64_t capacity, major, minor, multiprocessors;
  int64_t context_bytes, cublas_handle_bytes, cudnn_handle_bytes, nccl_bytes;
  int64_t cudnn_workspace_bytes, cublaslt_workspace_bytes, rnn_workspace_bytes, rnn_reserve_bytes;
  int64_t throttle_reasons;
  double launch_seconds, thread_seconds, flops; /* the clock; all 0: off */
  double idle_watts, full_watts, busy_by_others;
  struct other others[OTHERS];
  /* what happened */
  int64_t mallocs, frees, ooms, launches;
  double busy_until, busy_seconds;                   /* end of the queue; seconds of work put into it */
  double looked, looked_busy, utilization, celsius;  /* NVML's last sample */
};

struct process {
  int64_t pid, started;            /* a pid is used again; with the time it started it is not */
  int64_t context[CARDS], bytes[CARDS]; /* bytes: with the context's own */
};

struct fault {
  int64_t active, pid, status, after, times; /* pid 0: of every process; times < 0: for ever */
  char function[64];                         /* "*": every call of CUDA's */
};

struct exchange { /* what the ranks of one communicator say in one small collective */
  int64_t communicator, sequence, arrived, left, known[RANKS];
  char said[RANKS][SAID_BYTES];
};

struct machine {
  int64_t size, lock, count, nvml, reads, peers, faults_set;
  double started;
  struct fault faults[FAULTS];
  struct card cards[CARDS];
  struct process processes[PROCESSES];
  struct exchange exchanges[EXCHANGES];
};

extern struct machine *machine; /* never NULL: without FAKE_GPU a machine with no card */

void machine_attach(void);
void lock_machine(void);
void unlock_machine(void);
int visible_count(void);
int visible_card(int ordinal); /* index into machine->cards of what this process calls device `ordinal` */
int visible_ordinal(int card);

int charge(int card, int64_t bytes); /* 0, or -1 where they do not fit */
void give_back(int card, int64_t bytes);
int open_context(int card); /* 0, or a cudaError_t */
int has_context(int card);
int64_t used(int card);          /* by all, a GPU's slices included */
int64_t used_by(int card, int64_t pid);
int list_processes(int card, int64_t *pids, int64_t *bytes, int room); /* how many there are */

int fault(const char *function); /* the status that this call shall end with, or 0 */

double now(void);
int clock_on(int card);
void work(int card, double threads, double flops); /* one launch into the card's queue */
void wait_until(double when);
double busy_done(int card); /* seconds that the card has worked until now */
void look_at_sensors(int card);

struct memory {
  char *start;
  size_t bytes;
  int card, kind;
};
enum { HOST = 1, DEVICE = 2 };
void *map_device(size_t bytes); /* address space, no memory */
void remember(void *start, size_t bytes, int card, int kind);
int forget(void *start, int kind, struct memory *found); /* 0 where it was known */
int find_memory(const void *address, struct memory *found);
void copy(void *to, const void *from, size_t bytes);
void fill(void *to, int value, size_t bytes);
int read_known(void *to, const void *from, size_t bytes); /* whether what lies there is known */
void kernel_ran(void); /* what lay on the device may be anything now */
int *current_card(void);  /* the thread's, as an ordinal */
void pci_name(int card, char *text, size_t room);
void uuid_bytes(int card, unsigned char *bytes);
int attribute(int which, int card);
int threads_of_multiprocessor(struct card *card);
int shared_bytes_of_block(struct card *card);
