/* libcublasLt: descriptors, and one algorithm with the workspace that the card's settings name. */
#include "machine.h"
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, MAX_WORKSPACE_BYTES = 1 }; /* cublasLt.h, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES */

struct layout { uint64_t rows, columns; };

static int create(void **out) {
  *out = calloc(1, 512);
  return SUCCESS;
}

static int destroy(void *descriptor) {
  free(descriptor);
  return SUCCESS;
}

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **out, int compute, int scale) { return create(out); }
int cublasLtMatmulDescDestroy(void *descriptor) { return destroy(descriptor); }
int cublasLtMatmulPreferenceCreate(void **out) { return create(out); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return destroy(preference); }

int cublasLtMatmulPreferenceSetAttribute(uint64_t *preference, int which, const uint64_t *value, size_t bytes) {
  if (which == MAX_WORKSPACE_BYTES) *preference = *value;
  return SUCCESS;
}

int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  create(out);
  *(struct layout *)*out = (struct layout){rows, columns};
  return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(void *layout) { return destroy(layout); }

struct result { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   const uint64_t *preference, int wanted, struct result *out, int *found) {
  int status = fault(__func__);
  uint64_t workspace = machine->cards[visible_card(*current_card())].cublaslt_workspace_bytes;
  memset(out, 0, sizeof *out);
  out->workspace = workspace < *preference ? workspace : *preference;
  out->waves = 1;
  *found = 1;
  return status;
}

int cublasLtMatmul(void *handle, void *operation, void *alpha, void *a, struct layout *a_layout, void *b,
                   struct layout *b_layout, void *beta, void *c, struct layout *c_layout, void *d,
                   struct layout *d_layout) {
  int status = fault(__func__);
  if (status) return status;
  int card = visible_card(*current_card());
  __atomic_add_fetch(&machine->cards[card].launches, 1, __ATOMIC_RELAXED);
  work(card, 0, 2.0 * (double)d_layout->columns * (double)(a_layout->rows * a_layout->columns)); /* 2 n (m k) */
  kernel_ran();
  return SUCCESS;
}
