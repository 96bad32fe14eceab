/* libcupti: a profiler that records nothing of the card. */
#include <stddef.h>
#include <stdint.h>

enum { SUCCESS, MAX_LIMIT_REACHED = 12 }; /* cupti_result.h */

int cuptiGetVersion(uint32_t *version) {
  *version = 130000;
  return SUCCESS;
}

int cuptiGetResultString(int status, const char **text) {
  *text = "no result of CUPTI's";
  return SUCCESS;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t bytes, void **record) { return MAX_LIMIT_REACHED; }

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
  *count = 0;
  return SUCCESS;
}

int cuptiSubscribe(void **subscriber, void *callback, void *data) {
  static char some_subscriber;
  *subscriber = &some_subscriber;
  return SUCCESS;
}
