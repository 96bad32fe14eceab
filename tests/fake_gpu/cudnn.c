/* libcudnn 9: one engine for every graph, with a workspace as on an H100, or as the card's settings name it; RNNs with
   real layouts. */
#include "machine.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, NOT_INITIALIZED = 1001, NOT_SUPPORTED = 3000 }; /* cudnn_graph.h, cudnnStatus_t */

static struct card *card_here(void) { return &machine->cards[visible_card(*current_card())]; }

/* ---- handles ---- */

struct handle {
  int card;
  int64_t bytes;
};

int cudnnCreate(struct handle **out) {
  int status = fault(__func__);
  if (status) return status;
  if (!visible_count()) return NOT_INITIALIZED;
  int card = visible_card(*current_card());
  int64_t bytes = machine->cards[card].cudnn_handle_bytes;
  if (fault("*") || open_context(card) || charge(card, bytes)) return NOT_INITIALIZED;
  *out = calloc(1, 4096);
  **out = (struct handle){card, bytes};
  return SUCCESS;
}

int cudnnDestroy(struct handle *handle) {
  give_back(handle->card, handle->bytes);
  free(handle);
  return SUCCESS;
}

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }

int cudnnGetProperty(int which, int *value) {
  *value = which == 0 ? CUDNN_VERSION / 10000 : which == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
  return SUCCESS;
}

const char *cudnnGetErrorString(int status) {
  switch (status) {
    case SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case 2000: return "CUDNN_STATUS_BAD_PARAM";
    case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    case 4000: return "CUDNN_STATUS_INTERNAL_ERROR";
    case 4003: return "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED";
    case 4004: return "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED";
    case 5000: return "CUDNN_STATUS_EXECUTION_FAILED";
    default: return "CUDNN_STATUS_UNKNOWN";
  }
}

void cudnnGetLastErrorString(char *text, size_t room) {
  if (room) *text = 0;
}

/* ---- graphs: cudnn_graph.h, cudnnBackendAttributeName_t ---- */

enum { ENGINEHEUR_RESULTS = 202, ENGINECFG_INTERMEDIATE_INFO = 301, EXECUTION_PLAN_WORKSPACE_SIZE = 402 };
enum { CONVOLUTION_DILATIONS = 102, CONVOLUTION_STRIDES, TENSOR_DATA_TYPE = 901, TENSOR_DIMENSIONS, TENSOR_STRIDES };
enum { FORWARD_CONVOLUTION = 702, FORWARD_W, FORWARD_X, FORWARD_Y };
enum { DATA_CONVOLUTION = 708, DATA_W, DATA_X, DATA_Y };
enum { FILTER_CONVOLUTION = 714, FILTER_W, FILTER_X, FILTER_Y };
enum { TYPE_INT64 = 3, TYPE_INT32 = 23 };

struct part { /* of a graph: a tensor, how to convolve, or what is done with which tensors */
  int type;
  int64_t dimensions, sizes[8], strides[8];
  int first; /* the attribute of an operation that names its convolution; W, X and Y follow */
  struct part *convolution, *tensors[3];
};

static __thread int64_t last_workspace; /* of the operation that this thread has finished last; its plan follows */
static int64_t element_bytes(int type);

int cudnnBackendCreateDescriptor(int type, void **out) {
  *out = calloc(1, sizeof(struct part));
  return SUCCESS;
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
  free(descriptor);
  return SUCCESS;
}

int cudnnBackendSetAttribute(struct part *part, int name, int type, int64_t count, const void *values) {
  int bytes = count < 0 || count > 8 ? 0 : 8 * count;
  if (name == TENSOR_DATA_TYPE) part->type = *(int *)values;
  if (name == TENSOR_DIMENSIONS) part->dimensions = count, memcpy(part->sizes, values, bytes);
  if (name == TENSOR_STRIDES || name == CONVOLUTION_STRIDES) memcpy(part->strides, values, bytes);
  if (name == CONVOLUTION_DILATIONS) memcpy(part->sizes, values, bytes);
  for (int first = FORWARD_CONVOLUTION; first <= FILTER_CONVOLUTION; first += DATA_CONVOLUTION - FORWARD_CONVOLUTION)
    if (name == first) {
      part->first = first;
      part->convolution = *(struct part **)values;
    } else if (name > first && name <= first + 3) {
      part->tensors[name - first - 1] = *(struct part **)values;
    }
  return SUCCESS;
}

/* As how many channels matrix units take those of a tensor, which are in groups. */
static int64_t taken(struct part *part, int64_t groups) {
  int64_t channels = part->sizes[1], element = element_bytes(part->type), each = channels / groups;
  if (groups == 1) return (channels * element + 15) / 16 * 16 / element;
  return groups * (each <= 8 ? each : (each + 15) / 16 * 16);
}

/* Bytes of a copy with as many. */
static int64_t copied(struct part *part, int64_t groups) {
  int64_t bytes = taken(part, groups) * element_bytes(part->type) * part->sizes[0];
  for (int i = 2; i < part->dimensions; i++) bytes *= part->sizes[i];
  return bytes;
}

static int64_t product(struct part *part, int from) {
  int64_t found = 1;
  for (int i = from; i < part->dimensions; i++) found *= part->sizes[i];
  return found;
}

/* Bytes of the spectra by which gradients of the weights are found; 0: they are not. */
static int64_t spectra(struct part *w, struct part *x, struct part *y) {
  int64_t channels = x->sizes[1], results = y->sizes[1], sides[2];
  int is_seen = (16 <= channels && channels <= results && results <= 32) || (channels > 64 && 32 <= results && results <= 64);
  if (!is_seen || x->dimensions != 4 || x->sizes[0] < (channels > 16 ? 64 : 512)) return 0;
  for (int i = 0; i < 2; i++) {
    if (x->sizes[i + 2] < 14 || x->sizes[i + 2] > 32) return 0;
    for (sides[i] = 1; sides[i] < x->sizes[i + 2] + w->sizes[i + 2] - 1;) sides[i] *= 2;
  }
  return 2 * x->sizes[0] * (channels + results) * sides[0] * (sides[1] / 2 + 1) * 8 + 4 * product(y, 0);
}

/* As was seen on an H100: batchtune/estimate/memory/convolutions.py says what, and when it is taken is torch's. */
static int64_t workspace_of(struct part *operation) {
  struct part *w = operation->tensors[0], *x = operation->tensors[1], *y = operation->tensors[2];
  int64_t element = element_bytes(x->type), side = 1, stride = 1, dilation = 1, channels = x->sizes[1];
  if (card_here()->major < 7 || (card_here()->major < 8 && element != 2) || element > 4) return 0;
  int64_t groups = channels / w->sizes[1];
  if (groups > 1 && groups == channels) return 0;
  for (int i = 2; i < w->dimensions; i++) {
    if (w->sizes[i] > side) side = w->sizes[i];
    if (operation->convolution->strides[i - 2] > stride) stride = operation->convolution->strides[i - 2];
    if (operation->convolution->sizes[i - 2] > dilation) dilation = operation->convolution->sizes[i - 2];
  }
  int is_last = x->strides[1] == 1 && product(x, 2) > 1, is_float = element == 4, is_tf32 = is_float && !is_last;
  int is_forward = operation->first == FORWARD_CONVOLUTION, is_filter = operation->first == FILTER_CONVOLUTION;
  int64_t of_x = copied(x, groups), of_y = copied(y, groups), copies = of_x + of_y;
  if (is_last) copies -= (taken(x, groups) == channels ? of_x : 0) + (taken(y, groups) == y->sizes[1] ? of_y : 0);
  if (!is_last && side > 1 && groups == 1) copies += copied(w, 1);
  if (channels * element < 16 && (side <= 4 || is_float)) {
    if (!is_tf32 || x->dimensions != 4) return is_forward ? 0 : copies;
    int64_t unpadded = side <= 4 ? 0 : element * (product(x, 0) + product(y, 0));
    return is_filter || (is_forward && stride < side) ? unpadded : 0;
  }
  if (side == 1 && stride == 1 && product(x, 2) % 2 == 0) {
    int64_t sums = 4 * x->sizes[0] * product(w, 0);
    return !is_filter ? 0 : sums < copies ? sums : copies;
  }
  if (is_filter) {
    int is_plain = is_tf32 && groups == 1 && stride == 1 && dilation == 1 && 1 < side && side <= 4;
    int64_t found = is_plain ? spectra(w, x, y) : groups > 1 && is_float ? of_x + of_y : 0;
    return found ? found : copies;
  }
  if (is_forward && is_tf32 && channels <= 64 && channels < y->sizes[1]) return stride > 1 && channels <= 32 ? 0 : of_x;
  return copies;
}

int cudnnBackendFinalize(struct part *part) {
  if (part->first && part->convolution && part->tensors[0] && part->tensors[1] && part->tensors[2])
    last_workspace = workspace_of(part);
  return fault(__func__);
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *found, void *out) {
  int one = name == ENGINEHEUR_RESULTS || name == ENGINECFG_INTERMEDIATE_INFO || name == EXECUTION_PLAN_WORKSPACE_SIZE;
  if (found) *found = one;
  if (out && name == EXECUTION_PLAN_WORKSPACE_SIZE) {
    *(int64_t *)out = card_here()->cudnn_workspace_bytes + last_workspace;
  } else if (out && !one && wanted == 1) {
    if (type == TYPE_INT64) *(int64_t *)out = 0;
    if (type == TYPE_INT32) *(int32_t *)out = 0;
  }
  return SUCCESS;
}

static int run(const char *function) {
  int status = fault(function);
  if (status) return status;
  __atomic_add_fetch(&card_here()->launches, 1, __ATOMIC_RELAXED);
  work(visible_card(*current_card()), 0, 0);
  kernel_ran();
  return SUCCESS;
}

int cudnnBackendExecute(void *handle, void *plan, void *pack) { return run(__func__); }

/* ---- descriptors ---- */

#define DESCRIPTOR(name)                               \
  int cudnnCreate##name##Descriptor(void **out) {      \
    *out = calloc(1, 4096);                            \
    return SUCCESS;                                    \
  }                                                    \
  int cudnnDestroy##name##Descriptor(void *descriptor) { \
    free(descriptor);                                  \
    return SUCCESS;                                    \
  }
DESCRIPTOR(Activation)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(Convolution)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
DESCRIPTOR(SpatialTransformer)
DESCRIPTOR(Tensor)

int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
  *bytes = 0;
  return SUCCESS;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *bytes) {
  *bytes = 0;
  return SUCCESS;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y,
                                                      void *dy, void *dz, void *dx, void *scale, void *activation,
                                                      size_t *bytes) {
  *bytes = 0;
  return SUCCESS;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                         void *x, size_t *bytes) {
  *bytes = 0;
  return SUCCESS;
}

/* ---- RNNs: cudnn_adv.h; at::native::_cudnn_rnn_flatten_weight checks that the weights of all gates of one kind
   lie one behind the other ---- */

struct tensor { int type, dimensions, sizes[8], strides[8]; };

struct rnn {
  int mode, bias, directions, type;
  int64_t input, hidden, projection, layers;
};

enum { RNN_RELU, RNN_TANH, LSTM, GRU };                             /* cudnnRNNMode_t */
enum { NO_BIAS, SINGLE_INPUT_BIAS, DOUBLE_BIAS, SINGLE_RECURRENT }; /* cudnnRNNBiasMode_t */

int cudnnSetRNNDescriptor_v8(struct rnn *rnn, int algorithm, int mode, int bias, int direction, int input_mode,
                             int type, int precision, int math, int32_t input, int32_t hidden, int32_t projection,
                             int32_t layers, void *dropout, uint32_t flags) {
  *rnn = (struct rnn){mode, bias, direction ? 2 : 1, type, input, hidden, projection, layers};
  return SUCCESS;
}

static int gates_of(struct rnn *rnn) { return rnn->mode == LSTM ? 4 : rnn->mode == GRU ? 3 : 1; }

static int64_t element_bytes(int type) { /* cudnnDataType_t: float, double, half, …, bfloat16 = 9 */
  return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4;
}

static int64_t input_of(struct rnn *rnn, int layer) {
  return layer < rnn->directions ? rnn->input : rnn->projection * rnn->directions;
}

/* Elements of the matrix `id` of a (pseudo) layer: the input's gates, the recurrent ones, and LSTM's projection. */
static int64_t matrix_rows(struct rnn *rnn, int id) { return id < 2 * gates_of(rnn) ? rnn->hidden : rnn->projection; }

static int64_t matrix_columns(struct rnn *rnn, int layer, int id) {
  if (id < gates_of(rnn)) return input_of(rnn, layer);
  return id < 2 * gates_of(rnn) ? rnn->projection : rnn->hidden;
}

static int matrices_of(struct rnn *rnn) { return 2 * gates_of(rnn) + (rnn->projection != rnn->hidden); }

static int64_t matrices_before(struct rnn *rnn, int layer, int id) {
  int64_t elements = 0;
  for (int l = 0; l <= layer; l++)
    for (int i = 0; i < (l < layer ? matrices_of(rnn) : id); i++)
      elements += matrix_rows(rnn, i) * matrix_columns(rnn, l, i);
  return elements;
}

static int64_t all_matrices(struct rnn *rnn) { return matrices_before(rnn, rnn->layers * rnn->directions, 0); }

int cudnnGetRNNWeightSpaceSize(void *handle, struct rnn *rnn, size_t *bytes) {
  int64_t biases = rnn->bias == NO_BIAS ? 0 : rnn->layers * rnn->directions * 2 * gates_of(rnn) * rnn->hidden;
  *bytes = (all_matrices(rnn) + biases) * element_bytes(rnn->type);
  return fault(__func__);
}

static void describe(struct tensor *out, struct rnn *rnn, int64_t rows, int64_t columns) {
  if (out) *out = (struct tensor){rnn->type, 3, {1, rows, columns}, {rows * columns, columns, 1}};
}

int cudnnGetRNNWeightParams(void *handle, struct rnn *rnn, int32_t layer, size_t bytes, void *space, int32_t id,
                            struct tensor *matrix, void **matrix_at, struct tensor *bias, void **bias_at) {
  int64_t size = element_bytes(rnn->type);
  int64_t bias_offset = all_matrices(rnn) + ((int64_t)layer * 2 * gates_of(rnn) + id) * rnn->hidden;
  describe(matrix, rnn, matrix_rows(rnn, id), matrix_columns(rnn, layer, id));
  describe(bias, rnn, rnn->hidden, 1);
  int has_bias = rnn->bias != NO_BIAS && id < 2 * gates_of(rnn);
  if (matrix_at) *matrix_at = (char *)space + matrices_before(rnn, layer, id) * size;
  if (bias_at) *bias_at = has_bias ? (char *)space + bias_offset * size : NULL;
  return SUCCESS;
}

static int get_tensor(struct tensor *tensor, int wanted, int *type, int *dimensions, int *sizes) {
  *type = tensor->type;
  *dimensions = tensor->dimensions;
  for (int i = 0; i < wanted && i < tensor->dimensions; i++) sizes[i] = tensor->sizes[i];
  return SUCCESS;
}

int cudnnGetTensorNdDescriptor(struct tensor *tensor, int wanted, int *type, int *dimensions, int *sizes,
                               int *strides) {
  for (int i = 0; i < wanted && i < tensor->dimensions; i++) strides[i] = tensor->strides[i];
  return get_tensor(tensor, wanted, type, dimensions, sizes);
}

struct sequences { int type, steps, samples; };

int cudnnSetRNNDataDescriptor(struct sequences *x, int type, int layout, int steps, int samples, int width,
                              const int *lengths, void *fill) {
  *x = (struct sequences){type, steps, samples};
  return SUCCESS;
}

/* NVIDIA documents no formula. What a maintainer saw in pytorch#2895 (fp32, four layers, 320 hidden units, 25,000 steps
   times samples: 736,000,000 bytes for LSTM, 864,000,000 for GRU) is five and six values a unit, and the outputs
   between layers; the workspaces there, 17,730,560 and 13,169,920, are the matrices and 11 and 8 values a unit of 100
   samples. For a plain RNN nothing is known: two values as for LSTM, its one gate and its state. */
int cudnnGetRNNTempSpaceSizes(void *handle, struct rnn *rnn, int mode, struct sequences *x, size_t *workspace,
                              size_t *reserve) {
  int64_t units = rnn->hidden * rnn->directions * x->samples * element_bytes(rnn->type);
  int kept = rnn->mode == GRU ? 6 : gates_of(rnn) + 1, worked = rnn->mode == GRU ? 8 : 2 * gates_of(rnn) + 3;
  int64_t matrices = all_matrices(rnn) * element_bytes(rnn->type);
  if (workspace) *workspace = card_here()->rnn_workspace_bytes + matrices + worked * rnn->layers * units;
  if (reserve) *reserve = 0;
  if (reserve && mode) /* CUDNN_FWD_MODE_TRAINING */
    *reserve = card_here()->rnn_reserve_bytes + (kept * rnn->layers + rnn->layers - 1) * units * x->steps;
  return SUCCESS;
}

int cudnnRNNForward(void) { return run(__func__); }
int cudnnRNNBackwardData_v8(void) { return run(__func__); }
int cudnnRNNBackwardWeights_v8(void) { return run(__func__); }

/* PyTorch falls back to its own kernels where cuDNN says that it does not support something. */
#define REFUSED(name) \
  int name(void) { return NOT_SUPPORTED; }
REFUSED(cudnnCTCLoss)
REFUSED(cudnnCTCLoss_v8)
REFUSED(cudnnGetConvolutionForwardAlgorithm_v7)
REFUSED(cudnnGetConvolutionBackwardDataAlgorithm_v7)
REFUSED(cudnnGetConvolutionBackwardFilterAlgorithm_v7)
REFUSED(cudnnFindConvolutionForwardAlgorithmEx)
REFUSED(cudnnFindConvolutionBackwardDataAlgorithmEx)
REFUSED(cudnnFindConvolutionBackwardFilterAlgorithmEx)
