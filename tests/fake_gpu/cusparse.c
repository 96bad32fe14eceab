/* libcusparse: only what PyTorch calls for its words; everything else is refused (see build.py). */

const char *cusparseGetErrorString(int status) { /* cusparse.h, cusparseStatus_t; the words are the library's own */
  switch (status) {
    case 0: return "success";
    case 2: return "allocation failed";
    case 10: return "operation not supported";
    case 11: return "insufficient resources";
    default: return "internal error";
  }
}
