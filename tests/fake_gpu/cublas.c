/* libcublas: handles that take memory, and matrix products that take the clock's time. The rest does nothing. */
#include "machine.h"
#include <stdlib.h>

enum { SUCCESS, NOT_INITIALIZED, ALLOC_FAILED = 3 }; /* cublas_api.h, cublasStatus_t */

struct handle {
  int card;
  int64_t bytes;
};

int cublasCreate_v2(struct handle **out) {
  int status = fault(__func__);
  if (status) return status;
  if (!visible_count()) return NOT_INITIALIZED;
  int card = visible_card(*current_card());
  if (fault("*") || open_context(card)) return NOT_INITIALIZED;
  int64_t bytes = machine->cards[card].cublas_handle_bytes;
  if (charge(card, bytes)) return ALLOC_FAILED;
  *out = calloc(1, 4096);
  **out = (struct handle){card, bytes};
  return SUCCESS;
}

int cublasDestroy_v2(struct handle *handle) {
  give_back(handle->card, handle->bytes);
  free(handle);
  return SUCCESS;
}

int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return SUCCESS;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return SUCCESS;
}

static int product(const char *function, double flops) {
  int status = fault(function);
  if (status) return status;
  int card = visible_card(*current_card());
  __atomic_add_fetch(&machine->cards[card].launches, 1, __ATOMIC_RELAXED);
  work(card, 0, flops);
  kernel_ran();
  return SUCCESS;
}

#define PRODUCT(name) \
  int name(void *handle, int trans_a, int trans_b, int m, int n, int k) { return product(#name, 2.0 * m * n * k); }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasCgemm_v2)
PRODUCT(cublasZgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)

#define ARGUMENTS void *handle, int trans_a, int trans_b, int m, int n, int k, void *alpha
#define BATCHED(name)                                                                                          \
  int name(ARGUMENTS, void *a, int lda, long long step_a, void *b, int ldb, long long step_b, void *beta, void *c, \
           int ldc, long long step_c, int count) {                                                             \
    return product(#name, 2.0 * m * n * k * count);                                                            \
  }
BATCHED(cublasSgemmStridedBatched)
BATCHED(cublasDgemmStridedBatched)
BATCHED(cublasCgemmStridedBatched)
BATCHED(cublasZgemmStridedBatched)

int cublasGemmStridedBatchedEx(ARGUMENTS, void *a, int type_a, int lda, long long step_a, void *b, int type_b, int ldb,
                               long long step_b, void *beta, void *c, int type_c, int ldc, long long step_c,
                               int count) {
  return product(__func__, 2.0 * m * n * k * count);
}
