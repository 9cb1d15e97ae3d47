/* A training step of a mixture-of-experts layer in high throughput, over ranks that are processes of this
 * program, on the CPU or on GPUs (ranks.h says how it is called): forward with exact sizes, backward along the same
 * routes.
 *
 *     forward                                       backward
 *     rows = dispatch(x)                            grad_rows = cached dispatch(grad_y)
 *     out  = expert(rows)                           value     = out . grad_rows, a scalar for each row
 *     y    = combine(out), weighted                 grad_x    = combine(weight * expert's backward of grad_rows)
 *                                                   grad_w    = the values, brought home by the same combine
 *
 * Expert e multiplies a row by e + 1, so everybody can tell what must come home. Values are small integers and weights
 * quarters: sums are exact and are compared exactly. The experts' work is done on the host, which any C compiler can
 * do: a real program launches kernels, on the stream of the dispatch. */
#include "ranks.h"

enum { MAX_TOKENS = 64, TOPK = 2, HIDDEN = 32 };

typedef struct {
  int num_tokens;
  float x[MAX_TOKENS][HIDDEN], grad_y[MAX_TOKENS][HIDDEN];
  int32_t origin[MAX_TOKENS][4]; /* rank and number of the token, twice: rows are 16 bytes at least */
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
static void allocate_shared(ncclEpGroup_t group, ncclEpTensor_t* tensor) {
  CHECK(ncclEpMemAlloc(group, &tensor->data, bytes_of(tensor)));
}

/* ---- The layer ---- */

typedef struct {
  ncclEpHandle_t handle;
  ncclEpTensor_t topk_idx, info;
  ncclEpTensor_t rows, origin, row_weights, row_expert; /* what came */
} Layer;

/* Returns y. */
static ncclEpTensor_t forward(ncclEpGroup_t group, const Rank* me, const Tokens* tokens, Layer* layer) {
  const int T = tokens->num_tokens;
  const ncclEpTensor_t none = NCCL_EP_TENSOR_INIT;
  ncclEpTensor_t x = matrix(me, NCCL_EP_FLOAT32, T, HIDDEN, tokens->x);
  ncclEpTensor_t origin = matrix(me, NCCL_EP_INT32, T, 4, tokens->origin);
  ncclEpTensor_t topk_weights = matrix(me, NCCL_EP_FLOAT32, T, TOPK, tokens->weights);
  ncclEpTensor_t y = matrix(me, NCCL_EP_FLOAT32, T, HIDDEN, NULL);
  layer->topk_idx = matrix(me, NCCL_EP_INT64, T, TOPK, tokens->topk_idx);
  layer->info = none;
  layer->info.ndim = 1;
  layer->info.dtype = NCCL_EP_INT32;
  layer->info.sizes[0] = NCCL_EP_INFO_SIZE_PACKED(me->num_local_experts);
  layer->info.data = allocate(me, bytes_of(&layer->info));

  ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
  config.layout = NCCL_EP_LAYOUT_PACKED;
  config.capacity = NCCL_EP_CAPACITY_EXACT;
  CHECK(ncclEpCreateHandle(&layer->handle, group, &config, &layer->topk_idx, NULL));
  CHECK(ncclEpRouteHandle(layer->handle, &layer->info, NULL)); /* now the number of rows is known */

  layer->rows = layer->origin = layer->row_weights = layer->row_expert = none;
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  inputs.tokens = &x;
  inputs.topk_weights = &topk_weights;
  inputs.extra[0] = &origin; /* a second tensor, which goes where the rows go */
  outputs.tokens = &layer->rows;
  outputs.topk_weights = &layer->row_weights;
  outputs.row_expert = &layer->row_expert;
  outputs.extra[0] = &layer->origin;
  CHECK(ncclEpDispatchShapes(layer->handle, &inputs, NULL, &outputs));
  allocate_shared(group, &layer->rows);
  allocate_shared(group, &layer->row_weights);
  allocate_shared(group, &layer->row_expert);
  allocate_shared(group, &layer->origin);
  CHECK(ncclEpDispatch(layer->handle, &inputs, &outputs, NULL, NULL));

  float(*rows)[HIDDEN] = fetch(me, &layer->rows);
  int32_t* expert = fetch(me, &layer->row_expert);
  for (int64_t i = 0; i < layer->rows.sizes[0]; i++) {
    for (int h = 0; h < HIDDEN; h++) rows[i][h] *= (float)(me->rank * me->num_local_experts + expert[i] + 1);
  }
  store(me, &layer->rows, rows);
  free(expert);

  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  back.tokens = &layer->rows;
  home.tokens = &y;
  CHECK(ncclEpCombine(layer->handle, &back, &home, NULL, NULL));
  release(me, x.data); /* the dispatch is done with them: fetch has waited for it */
  release(me, origin.data);
  release(me, topk_weights.data);
  return y;
}

/* Puts the weighted gradient of an expert's input in the place of that of its output, and out . grad_rows into values.
 */
static void experts_backward(const Rank* me, const Layer* layer, const ncclEpTensor_t* grad_rows,
                             const ncclEpTensor_t* values) {
  float(*rows)[HIDDEN] = fetch(me, grad_rows);
  float(*out)[HIDDEN] = fetch(me, &layer->rows);
  float* scalars = fetch(me, &layer->row_weights); /* the weights, and then the values */
  int32_t* expert = fetch(me, &layer->row_expert);
  for (int64_t i = 0; i < grad_rows->sizes[0]; i++) {
    const float factor = scalars[i] * (float)(me->rank * me->num_local_experts + expert[i] + 1);
    scalars[i] = dot(out[i], rows[i]);
    for (int h = 0; h < HIDDEN; h++) rows[i][h] *= factor;
  }
  store(me, grad_rows, rows);
  store(me, values, scalars);
  free(out);
  free(expert);
}

static void backward(ncclEpGroup_t group, const Rank* me, const Tokens* tokens, const Layer* layer,
                     ncclEpTensor_t* grad_x, ncclEpTensor_t* grad_w) {
  const int T = tokens->num_tokens;
  ncclEpTensor_t grad_y = matrix(me, NCCL_EP_FLOAT32, T, HIDDEN, tokens->grad_y);
  ncclEpTensor_t grad_rows = NCCL_EP_TENSOR_INIT, values = layer->row_weights;
  *grad_x = matrix(me, NCCL_EP_FLOAT32, T, HIDDEN, NULL);
  *grad_w = matrix(me, NCCL_EP_FLOAT32, T, TOPK, NULL);

  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpDispatchConfig_t cached = NCCL_EP_DISPATCH_CONFIG_INIT;
  inputs.tokens = &grad_y;
  outputs.tokens = &grad_rows;
  cached.cached = 1; /* to the rows of the forward pass */
  CHECK(ncclEpDispatchShapes(layer->handle, &inputs, &cached, &outputs));
  allocate_shared(group, &grad_rows);
  allocate_shared(group, &values);
  CHECK(ncclEpDispatch(layer->handle, &inputs, &outputs, &cached, NULL));
  experts_backward(me, layer, &grad_rows, &values);

  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  back.tokens = &grad_rows;
  back.values = &values;
  home.tokens = grad_x;
  home.values = grad_w;
  config.weights = NCCL_EP_WEIGHTS_NONE; /* they are in the rows */
  CHECK(ncclEpCombine(layer->handle, &back, &home, &config, NULL));
  CHECK(ncclEpMemFree(group, grad_rows.data)); /* what uses this memory next is on the same stream */
  CHECK(ncclEpMemFree(group, values.data));
  release(me, grad_y.data);
}

/* ---- What must come out ---- */

/* Of rows that came: each from a token with that expert, expert after expert, by rank and token inside one. */
static int count_wrong_origins(const Rank* me, const Layer* layer) {
  int32_t(*origin)[4] = fetch(me, &layer->origin);
  int32_t* expert = fetch(me, &layer->row_expert);
  int32_t* info = fetch(me, &layer->info);
  const int32_t* offsets = info + NCCL_EP_INFO_OFFSETS(me->num_local_experts);
  int num_wrong = 0;
  for (int e = 0; e < me->num_local_experts; e++) {
    const int id = me->rank * me->num_local_experts + e;
    printf("rank %d: expert %d received %d rows\n", me->rank, id, offsets[e + 1] - offsets[e]);
    for (int i = offsets[e]; i < offsets[e + 1]; i++) {
      const int from = origin[i][0], t = origin[i][1];
      const int first = (from + t) % NUM_EXPERTS, second = (from + 3 * t + 1) % NUM_EXPERTS;
      const int is_later =
          i == offsets[e] || from > origin[i - 1][0] || (from == origin[i - 1][0] && t > origin[i - 1][1]);
      num_wrong += expert[i] != e || (id != first && id != second) || !is_later;
    }
  }
  free(origin);
  free(expert);
  free(info);
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

/* Ends the use of a tensor: its values, on the host, to be freed. */
static void* take_home(const Rank* me, const ncclEpTensor_t* tensor) {
  void* values = fetch(me, tensor);
  release(me, tensor->data);
  return values;
}

static int run_step(ncclEpGroup_t group, const Rank* me) {
  Tokens tokens;
  Layer layer;
  ncclEpTensor_t y, grad_x, grad_w;
  make_tokens(me->rank, &tokens);
  y = forward(group, me, &tokens, &layer);
  int num_wrong = count_wrong_origins(me, &layer);
  backward(group, me, &tokens, &layer, &grad_x, &grad_w);

  float(*y_home)[HIDDEN] = take_home(me, &y);
  float(*x_home)[HIDDEN] = take_home(me, &grad_x);
  float(*w_home)[TOPK] = take_home(me, &grad_w);
  CHECK(ncclEpCheck(group)); /* it does not wait for the stream, taking them home has */
  num_wrong += count_wrong(&tokens, y_home, x_home, w_home);
  free(y_home);
  free(x_home);
  free(w_home);
  CHECK(ncclEpHandleDestroy(layer.handle));
  release(me, layer.topk_idx.data);
  release(me, layer.info.data);
  return num_wrong; /* the group frees the arena's memory */
}

static int run_rank(Rank* me) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.device = me->device;
  config.algorithm = NCCL_EP_ALGORITHM_HIGH_THROUGHPUT;
  config.num_experts = NUM_EXPERTS;
  config.max_tokens = MAX_TOKENS;
  config.topk = TOPK;
  config.max_token_bytes = HIDDEN * sizeof(float) + 4 * sizeof(int32_t); /* a row of each tensor */
  config.arena_bytes = 1 << 20;
  config.timeout_ns = 30000000000u;
  ncclEpGroup_t group;
  ncclEpGroupInfo_t info = NCCL_EP_GROUP_INFO_INIT;
  CHECK(ncclEpCreateGroupFromCallback(&group, me->rank, me->num_ranks, allgather, me, &config));
  const int num_wrong = run_step(group, me);
  CHECK(ncclEpGroupGetInfo(group, &info));
  printf("rank %d: %d values are wrong; %d dispatches copied rows\n", me->rank, num_wrong,
         (int)info.num_staged_dispatches);
  CHECK(ncclEpGroupDestroy(group));
  return num_wrong;
}

int main(int argc, char** argv) {
  const int num_failed = run_ranks(parse_world(argc, argv), run_rank);
  printf("%s\n",
         num_failed == 0 ? "sums and gradients are those of one rank" : "something came home wrong, or a rank failed");
  return num_failed != 0;
}
