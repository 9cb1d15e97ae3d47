/* A training step of a mixture-of-experts layer in high throughput, over ranks that are threads of this program, on the
 * CPU: forward with exact sizes, backward along the same routes.
 *
 *     forward                                       backward
 *     rows = dispatch(x)                            grad_rows = cached dispatch(grad_y)
 *     out  = expert(rows)                           value     = out . grad_rows, a scalar for each row
 *     y    = combine(out), weighted                 grad_x    = combine(weight * expert's backward of grad_rows)
 *                                                   grad_w    = the values, brought home by the same combine
 *
 * Expert e multiplies a row by e + 1, so everybody can tell what must come home. Values are small integers and weights
 * quarters: sums are exact and are compared exactly. */
#include "thread_ranks.h"

enum { NUM_EXPERTS = 8, LOCAL_EXPERTS = NUM_EXPERTS / NUM_RANKS, MAX_TOKENS = 64, TOPK = 2, HIDDEN = 32 };

typedef struct {
  int num_tokens;
  _Alignas(16) float x[MAX_TOKENS][HIDDEN], grad_y[MAX_TOKENS][HIDDEN];
  _Alignas(16) int32_t origin[MAX_TOKENS][4]; /* rank and number of the token, twice: rows are 16 bytes at least */
  int64_t topk_idx[MAX_TOKENS][TOPK];
  float weights[MAX_TOKENS][TOPK];
} Tokens;

static void make_tokens(int rank, Tokens* tokens) {
  tokens->num_tokens = MAX_TOKENS - 5 * rank; /* ranks may have different numbers */
  for (int t = 0; t < tokens->num_tokens; t++) {
    for (int h = 0; h < HIDDEN; h++) {
      tokens->x[t][h] = (float)(rank + t % 7 + h % 5);
      tokens->grad_y[t][h] = (float)((rank + t + h) % 3 - 1);
    }
    for (int i = 0; i < 4; i++) tokens->origin[t][i] = i % 2 == 0 ? rank : t;
    tokens->topk_idx[t][0] = (rank + t) % NUM_EXPERTS;
    tokens->topk_idx[t][1] = (rank + 3 * t + 1) % NUM_EXPERTS;
    if (tokens->topk_idx[t][1] == tokens->topk_idx[t][0]) tokens->topk_idx[t][1] = -1;
    tokens->weights[t][0] = 0.75f;
    tokens->weights[t][1] = 0.25f;
  }
}

static float dot(const float* a, const float* b) {
  float sum = 0;
  for (int h = 0; h < HIDDEN; h++) sum += a[h] * b[h];
  return sum;
}

/* In memory where the other ranks store rows and read them, so that nobody copies them again. */
static void allocate(ncclEpGroup_t group, ncclEpTensor_t* tensor) {
  size_t bytes;
  CHECK(ncclEpTensorBytes(tensor, &bytes));
  CHECK(ncclEpMemAlloc(group, &tensor->data, bytes));
}

/* ---- The layer ---- */

typedef struct {
  ncclEpHandle_t handle;
  int32_t info[NCCL_EP_INFO_SIZE_PACKED(LOCAL_EXPERTS)];
  ncclEpTensor_t rows, origin, row_weights, row_expert; /* what came */
} Layer;

static void forward(ncclEpGroup_t group, int rank, Tokens* tokens, Layer* layer, float y[][HIDDEN]) {
  const int T = tokens->num_tokens;
  ncclEpTensor_t x = matrix(NCCL_EP_FLOAT32, tokens->x, T, HIDDEN);
  ncclEpTensor_t origin = matrix(NCCL_EP_INT32, tokens->origin, T, 4);
  ncclEpTensor_t topk_idx = matrix(NCCL_EP_INT64, tokens->topk_idx, T, TOPK);
  ncclEpTensor_t topk_weights = matrix(NCCL_EP_FLOAT32, tokens->weights, T, TOPK);
  ncclEpTensor_t result = matrix(NCCL_EP_FLOAT32, y, T, HIDDEN);
  ncclEpTensor_t info = matrix(NCCL_EP_INT32, layer->info, 0, 0);
  info.ndim = 1;
  info.sizes[0] = NCCL_EP_INFO_SIZE_PACKED(LOCAL_EXPERTS);

  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.layout = NCCL_EP_LAYOUT_PACKED;
  config.capacity = NCCL_EP_CAPACITY_EXACT;
  CHECK(ncclEpCreateHandle(&layer->handle, group, &config, &topk_idx, NULL));
  CHECK(ncclEpRouteHandle(layer->handle, &info, NULL)); /* now the number of rows is known */

  const ncclEpTensor_t none = NCCL_EP_TENSOR_INIT;
  layer->rows = layer->origin = layer->row_weights = layer->row_expert = none;
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  inputs.tokens = &x;
  inputs.topk_weights = &topk_weights;
  inputs.further[0] = &origin; /* a second tensor, which goes where the rows go */
  outputs.tokens = &layer->rows;
  outputs.topk_weights = &layer->row_weights;
  outputs.row_expert = &layer->row_expert;
  outputs.further[0] = &layer->origin;
  CHECK(ncclEpDispatchShapes(layer->handle, &inputs, NULL, &outputs));
  allocate(group, &layer->rows);
  allocate(group, &layer->row_weights);
  allocate(group, &layer->row_expert);
  allocate(group, &layer->origin);
  CHECK(ncclEpDispatch(layer->handle, &inputs, &outputs, NULL, NULL));

  float(*rows)[HIDDEN] = layer->rows.data;
  const int32_t* expert = layer->row_expert.data;
  for (int64_t i = 0; i < layer->rows.sizes[0]; i++) {
    for (int h = 0; h < HIDDEN; h++) rows[i][h] *= (float)(rank * LOCAL_EXPERTS + expert[i] + 1);
  }
  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  back.tokens = &layer->rows;
  home.tokens = &result;
  CHECK(ncclEpCombine(layer->handle, &back, &home, NULL, NULL));
}

static void backward(ncclEpGroup_t group, int rank, Tokens* tokens, const Layer* layer, float grad_x[][HIDDEN],
                     float grad_w[][TOPK]) {
  const int T = tokens->num_tokens;
  ncclEpTensor_t grad_y = matrix(NCCL_EP_FLOAT32, tokens->grad_y, T, HIDDEN);
  ncclEpTensor_t x_home = matrix(NCCL_EP_FLOAT32, grad_x, T, HIDDEN);
  ncclEpTensor_t w_home = matrix(NCCL_EP_FLOAT32, grad_w, T, TOPK);
  ncclEpTensor_t grad_rows = NCCL_EP_TENSOR_INIT, values = layer->row_weights;

  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t cached = NCCL_EP_DISPATCH_CONFIG_INIT;
  inputs.tokens = &grad_y;
  outputs.tokens = &grad_rows;
  cached.cached = 1; /* to the rows of the forward pass */
  CHECK(ncclEpDispatchShapes(layer->handle, &inputs, &cached, &outputs));
  allocate(group, &grad_rows);
  allocate(group, &values);
  CHECK(ncclEpDispatch(layer->handle, &inputs, &outputs, &cached, NULL));

  float(*rows)[HIDDEN] = grad_rows.data;
  float(*out)[HIDDEN] = layer->rows.data;
  const float* weights = layer->row_weights.data;
  const int32_t* expert = layer->row_expert.data;
  for (int64_t i = 0; i < grad_rows.sizes[0]; i++) {
    ((float*)values.data)[i] = dot(out[i], rows[i]);
    for (int h = 0; h < HIDDEN; h++) rows[i][h] *= weights[i] * (float)(rank * LOCAL_EXPERTS + expert[i] + 1);
  }
  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  back.tokens = &grad_rows;
  back.values = &values;
  home.tokens = &x_home;
  home.values = &w_home;
  config.weights = NCCL_EP_WEIGHTS_NONE; /* they are in the rows */
  CHECK(ncclEpCombine(layer->handle, &back, &home, &config, NULL));
  CHECK(ncclEpMemFree(group, grad_rows.data));
  CHECK(ncclEpMemFree(group, values.data));
}

/* ---- What must come out ---- */

/* Of rows that came: each from a token with that expert, expert after expert, by rank and token inside one. */
static int count_wrong_origins(const Layer* layer, int rank) {
  const int32_t(*origin)[4] = layer->origin.data;
  const int32_t* offsets = layer->info + NCCL_EP_INFO_OFFSETS(LOCAL_EXPERTS);
  const int32_t* expert = layer->row_expert.data;
  static const char* const kNames[] = {"first", "second"};
  int num_wrong = 0;
  for (int e = 0; e < LOCAL_EXPERTS; e++) {
    printf("rank %d: its %s expert received %d rows\n", rank, kNames[e], offsets[e + 1] - offsets[e]);
    for (int i = offsets[e]; i < offsets[e + 1]; i++) {
      const int from = origin[i][0], t = origin[i][1], id = rank * LOCAL_EXPERTS + e;
      const int first = (from + t) % NUM_EXPERTS, second = (from + 3 * t + 1) % NUM_EXPERTS;
      const int is_later =
          i == offsets[e] || from > origin[i - 1][0] || (from == origin[i - 1][0] && t > origin[i - 1][1]);
      num_wrong += expert[i] != e || (id != first && id != second) || !is_later;
    }
  }
  return num_wrong;
}

static int count_wrong(const Tokens* tokens, float y[][HIDDEN], float grad_x[][HIDDEN], float grad_w[][TOPK]) {
  int num_wrong = 0;
  for (int t = 0; t < tokens->num_tokens; t++) {
    float factor = 0;
    for (int k = 0; k < TOPK; k++) {
      const float times = (float)(tokens->topk_idx[t][k] + 1); /* 0 where there is no expert */
      factor += tokens->weights[t][k] * times;
      num_wrong += grad_w[t][k] != times * dot(tokens->x[t], tokens->grad_y[t]);
    }
    for (int h = 0; h < HIDDEN; h++) {
      num_wrong += y[t][h] != factor * tokens->x[t][h];
      num_wrong += grad_x[t][h] != factor * tokens->grad_y[t][h];
    }
  }
  return num_wrong;
}

/* ---- A rank ---- */

static int run_step(ncclEpGroup_t group, int rank) {
  Tokens tokens;
  Layer layer;
  _Alignas(16) float y[MAX_TOKENS][HIDDEN], grad_x[MAX_TOKENS][HIDDEN];
  float grad_w[MAX_TOKENS][TOPK];
  make_tokens(rank, &tokens);
  forward(group, rank, &tokens, &layer, y);
  const int num_wrong_origins = count_wrong_origins(&layer, rank);
  backward(group, rank, &tokens, &layer, grad_x, grad_w);
  CHECK(ncclEpCheck(group));
  CHECK(ncclEpHandleDestroy(layer.handle));
  return num_wrong_origins + count_wrong(&tokens, y, grad_x, grad_w); /* the group frees the arena's memory */
}

static void* run_rank(void* argument) {
  Rank* rank = argument;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.device = NCCL_EP_DEVICE_CPU;
  config.algorithm = NCCL_EP_ALGORITHM_HIGH_THROUGHPUT;
  config.num_experts = NUM_EXPERTS;
  config.max_tokens = MAX_TOKENS;
  config.topk = TOPK;
  config.max_token_bytes = HIDDEN * sizeof(float) + 4 * sizeof(int32_t); /* a row of each tensor */
  config.arena_bytes = 1 << 20;
  config.timeout_ns = 30000000000u;
  ncclEpGroup_t group;
  ncclEpGroupInfo_t info = NCCL_EP_GROUP_INFO_INIT;
  CHECK(ncclEpCreateGroupFromCallback(&group, rank->rank, NUM_RANKS, allgather, rank, &config));
  rank->num_wrong = run_step(group, rank->rank);
  CHECK(ncclEpGroupGetInfo(group, &info));
  printf("rank %d: %d values are wrong; %d dispatches copied rows\n", rank->rank, rank->num_wrong,
         (int)info.num_staged_dispatches);
  CHECK(ncclEpGroupDestroy(group));
  return NULL;
}

int main(void) {
  const int num_wrong = run_ranks(run_rank);
  printf("%s\n", num_wrong == 0 ? "sums and gradients are those of one rank" : "something came home wrong");
  return num_wrong != 0;
}
