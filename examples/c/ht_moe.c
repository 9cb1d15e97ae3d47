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
  CHECK(ncclEpxMemAlloc(group, &tensor->data, bytes_of(tensor)));
}

/* ---- The layer ---- */

typedef struct {
  ncclEpHandle_t handle;
  ncclEpTensor_t *topk_idx, *info;
  ncclEpTensor_t *rows, *origin, *row_weights, *row_expert; /* what came */
} Layer;

/* A tensor whose sizes the library fills in. */
static ncclEpTensor_t* unknown(void) { return describe(ncclFloat32, 1, 0, 0, 0); }

/* Returns y. */
static ncclEpTensor_t* forward(ncclEpGroup_t group, const Rank* me, const Tokens* tokens, Layer* layer) {
  const size_t T = (size_t)tokens->num_tokens;
  ncclEpTensor_t* x = matrix(me, ncclFloat32, T, HIDDEN, tokens->x);
  ncclEpTensor_t* origin = matrix(me, ncclInt32, T, 4, tokens->origin);
  ncclEpTensor_t* topk_weights = matrix(me, ncclFloat32, T, TOPK, tokens->weights);
  ncclEpTensor_t* y = matrix(me, ncclFloat32, T, HIDDEN, NULL);
  layer->topk_idx = matrix(me, ncclInt64, T, TOPK, tokens->topk_idx);
  layer->info = describe(ncclInt32, 1, (size_t)NCCL_EPX_INFO_SIZE_PACKED(me->num_local_experts), 0, 0);
  layer->info->data = allocate(me, bytes_of(layer->info));

  ncclEpxHandleOptions_t options = NCCL_EPX_HANDLE_OPTIONS_INIT;
  options.layout = NCCL_EPX_LAYOUT_PACKED;
  options.capacity = NCCL_EPX_CAPACITY_EXACT;
  CHECK(ncclEpxInitHandle(&layer->handle, group, NCCL_EP_LAYOUT_UNSET, NULL, TOPK, NULL, &options));
  CHECK(ncclEpUpdateHandle(layer->handle, layer->topk_idx, NULL, NULL));
  CHECK(ncclEpxRouteHandle(layer->handle, layer->info, NULL)); /* now the number of rows is known */

  layer->rows = unknown();
  layer->origin = unknown();
  layer->row_weights = unknown();
  layer->row_expert = unknown();
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpxDispatchExtra_t extra = NCCL_EPX_DISPATCH_EXTRA_INIT;
  inputs.tokens = x;
  inputs.topk_weights = topk_weights;
  outputs.tokens = layer->rows;
  outputs.topk_weights = layer->row_weights;
  extra.extra[0] = origin; /* a second tensor, which goes where the rows go */
  extra.extra_outputs[0] = layer->origin;
  extra.row_expert = layer->row_expert;
  CHECK(ncclEpxDispatchShapes(layer->handle, &inputs, &outputs, NULL, &extra));
  allocate_shared(group, layer->rows);
  allocate_shared(group, layer->row_weights);
  allocate_shared(group, layer->row_expert);
  allocate_shared(group, layer->origin);
  CHECK(ncclEpxDispatch(layer->handle, &inputs, &outputs, NULL, NULL, &extra, NULL));

  float(*rows)[HIDDEN] = fetch(me, layer->rows);
  int32_t* expert = fetch(me, layer->row_expert);
  for (size_t i = 0; i < layer->rows->sizes[0]; i++) {
    for (int h = 0; h < HIDDEN; h++) rows[i][h] *= (float)(me->rank * me->num_local_experts + expert[i] + 1);
  }
  store(me, layer->rows, rows);
  free(expert);

  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpxCombineExtra_t weighted = NCCL_EPX_COMBINE_EXTRA_INIT;
  back.tokens = layer->rows;
  home.tokens = y;
  weighted.weights = NCCL_EPX_WEIGHTS_DISPATCH;
  CHECK(ncclEpxCombine(layer->handle, &back, &home, NULL, &weighted, NULL));
  drop(me, x); /* the dispatch is done with them: fetch has waited for it */
  drop(me, origin);
  drop(me, topk_weights);
  return y;
}

/* Puts the weighted gradient of an expert's input in the place of that of its output, and out . grad_rows into values.
 */
static void experts_backward(const Rank* me, const Layer* layer, const ncclEpTensor_t* grad_rows,
                             const ncclEpTensor_t* values) {
  float(*rows)[HIDDEN] = fetch(me, grad_rows);
  float(*out)[HIDDEN] = fetch(me, layer->rows);
  float* scalars = fetch(me, layer->row_weights); /* the weights, and then the values */
  int32_t* expert = fetch(me, layer->row_expert);
  for (size_t i = 0; i < grad_rows->sizes[0]; i++) {
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
                     ncclEpTensor_t** grad_x, ncclEpTensor_t** grad_w) {
  const size_t T = (size_t)tokens->num_tokens;
  ncclEpTensor_t* grad_y = matrix(me, ncclFloat32, T, HIDDEN, tokens->grad_y);
  ncclEpTensor_t *grad_rows = unknown(), *values = describe(ncclFloat32, 1, layer->row_weights->sizes[0], 0, 0);
  *grad_x = matrix(me, ncclFloat32, T, HIDDEN, NULL);
  *grad_w = matrix(me, ncclFloat32, T, TOPK, NULL);

  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpxDispatchExtra_t cached = NCCL_EPX_DISPATCH_EXTRA_INIT;
  inputs.tokens = grad_y;
  outputs.tokens = grad_rows;
  cached.cached = 1; /* to the rows of the forward pass */
  CHECK(ncclEpxDispatchShapes(layer->handle, &inputs, &outputs, NULL, &cached));
  allocate_shared(group, grad_rows);
  allocate_shared(group, values);
  CHECK(ncclEpxDispatch(layer->handle, &inputs, &outputs, NULL, NULL, &cached, NULL));
  experts_backward(me, layer, grad_rows, values);

  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
  back.tokens = grad_rows; /* the weights are in the rows */
  back.topk_weights = values;
  home.tokens = *grad_x;
  home.topk_weights = *grad_w;
  config.pass_direction = NCCL_EP_BWD_PASS; /* numbers beside the rows */
  CHECK(ncclEpCombine(layer->handle, &back, &home, &config, NULL));
  CHECK(ncclEpxMemFree(group, grad_rows->data)); /* what uses this memory next is on the same stream */
  CHECK(ncclEpxMemFree(group, values->data));
  CHECK(ncclEpTensorDestroy(grad_rows));
  CHECK(ncclEpTensorDestroy(values));
  drop(me, grad_y);
}

/* ---- What must come out ---- */

/* Of rows that came: each from a token with that expert, expert after expert, by rank and token inside one. */
static int count_wrong_origins(const Rank* me, const Layer* layer) {
  int32_t(*origin)[4] = fetch(me, layer->origin);
  int32_t* expert = fetch(me, layer->row_expert);
  int32_t* info = fetch(me, layer->info);
  const int32_t* offsets = info + NCCL_EPX_INFO_OFFSETS(me->num_local_experts);
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
static void* take_home(const Rank* me, ncclEpTensor_t* tensor) {
  void* values = fetch(me, tensor);
  drop(me, tensor);
  return values;
}

static int run_step(ncclEpGroup_t group, const Rank* me) {
  Tokens tokens;
  Layer layer;
  ncclEpTensor_t *grad_x, *grad_w;
  make_tokens(me->rank, &tokens);
  ncclEpTensor_t* y = forward(group, me, &tokens, &layer);
  int num_wrong = count_wrong_origins(me, &layer);
  backward(group, me, &tokens, &layer, &grad_x, &grad_w);

  float(*y_home)[HIDDEN] = take_home(me, y);
  float(*x_home)[HIDDEN] = take_home(me, grad_x);
  float(*w_home)[TOPK] = take_home(me, grad_w);
  CHECK(ncclEpxCheck(group)); /* it does not wait for the stream, taking them home has */
  num_wrong += count_wrong(&tokens, y_home, x_home, w_home);
  free(y_home);
  free(x_home);
  free(w_home);
  CHECK(ncclEpHandleDestroy(layer.handle));
  drop(me, layer.topk_idx);
  drop(me, layer.info);
  ncclEpTensor_t* shared[] = {layer.rows, layer.origin, layer.row_weights, layer.row_expert};
  for (int i = 0; i < 4; i++) CHECK(ncclEpTensorDestroy(shared[i])); /* the group frees the arena's memory */
  return num_wrong;
}

static int run_rank(Rank* me) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  ncclEpxGroupOptions_t options = NCCL_EPX_GROUP_OPTIONS_INIT;
  config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
  config.num_experts = NUM_EXPERTS;
  config.max_dispatch_tokens_per_rank = MAX_TOKENS;
  config.num_topk = TOPK;
  config.max_token_bytes = HIDDEN * sizeof(float) + 4 * sizeof(int32_t); /* a row of each tensor */
  options.arena_bytes = 1 << 20;
  config.timeout_ns = 30000000000u;
  ncclEpGroup_t group;
  ncclEpxGroupInfo_t info = NCCL_EPX_GROUP_INFO_INIT;
  CHECK(ncclEpxCreateGroup(&group, me->comm, &config, &options));
  const int num_wrong = run_step(group, me);
  CHECK(ncclEpxGroupGetInfo(group, &info));
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
