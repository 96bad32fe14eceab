/* libcufft: plans without work areas. */
#include "machine.h"

int cufftCreate(int *plan) {
  *plan = 1;
  return fault(__func__);
}

int cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_stride,
                        long long in_distance, int in_type, long long *out_embed, long long out_stride,
                        long long out_distance, int out_type, long long batch, size_t *work_bytes, int type) {
  *work_bytes = 0;
  return fault(__func__);
}
