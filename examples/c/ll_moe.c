/* One step of a mixture-of-experts layer over ranks that are threads of this program, on the CPU.
 *
 * Every token chooses two of the experts. Expert e multiplies a row by e + 1, so that everybody can tell what a token
 * must be when it comes home: the sum over its choices of weight * (e + 1), times the token. Values are small integers
 * and weights quarters: sums are exact and are compared exactly. */
#include "thread_ranks.h"

enum { NUM_EXPERTS = 8, LOCAL_EXPERTS = NUM_EXPERTS / NUM_RANKS, TOKENS = 6, TOPK = 2, HIDDEN = 32 };

static void allocate(ncclEpTensor_t* tensor) {
  size_t bytes;
  CHECK(ncclEpTensorBytes(tensor, &bytes));
  tensor->data = bytes > 0 ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
  if (bytes > 0 && tensor->data == NULL) exit(1);
}

typedef struct {
  _Alignas(16) float x[TOKENS][HIDDEN];
  int64_t topk_idx[TOKENS][TOPK];
  float weights[TOKENS][TOPK];
} Tokens;

static void make_tokens(int rank, Tokens* tokens) {
  for (int t = 0; t < TOKENS; t++) {
    for (int h = 0; h < HIDDEN; h++) tokens->x[t][h] = (float)(rank * 10 + t + h % 5);
    tokens->topk_idx[t][0] = (rank + t) % NUM_EXPERTS;
    tokens->topk_idx[t][1] = t == 0 ? -1 : (rank + 3 * t + 1) % NUM_EXPERTS; /* the first token has one choice only */
    if (tokens->topk_idx[t][1] == tokens->topk_idx[t][0]) tokens->topk_idx[t][1] = -1;
    tokens->weights[t][0] = 0.75f;
    tokens->weights[t][1] = 0.25f;
  }
}

static void apply_experts(int rank, const ncclEpTensor_t* rows, const int32_t* counts) {
  const int64_t capacity = rows->sizes[1];
  for (int e = 0; e < LOCAL_EXPERTS; e++) {
    float* first = (float*)rows->data + e * capacity * HIDDEN;
    for (int64_t i = 0; i < (int64_t)counts[e] * HIDDEN; i++) first[i] *= (float)(rank * LOCAL_EXPERTS + e + 1);
  }
}

static int count_wrong(const Tokens* tokens, float y[TOKENS][HIDDEN]) {
  int num_wrong = 0;
  for (int t = 0; t < TOKENS; t++) {
    float factor = 0;
    for (int k = 0; k < TOPK; k++) {
      if (tokens->topk_idx[t][k] >= 0) factor += tokens->weights[t][k] * (float)(tokens->topk_idx[t][k] + 1);
    }
    for (int h = 0; h < HIDDEN; h++) num_wrong += y[t][h] != factor * tokens->x[t][h];
  }
  return num_wrong;
}

/* Dispatch, experts, combine; returns how many values are wrong. */
static int run_layer(ncclEpGroup_t group, int rank) {
  Tokens tokens;
  _Alignas(16) float y[TOKENS][HIDDEN];
  make_tokens(rank, &tokens);
  ncclEpTensor_t x = matrix(NCCL_EP_FLOAT32, tokens.x, TOKENS, HIDDEN);
  ncclEpTensor_t topk_idx = matrix(NCCL_EP_INT64, tokens.topk_idx, TOKENS, TOPK);
  ncclEpTensor_t topk_weights = matrix(NCCL_EP_FLOAT32, tokens.weights, TOKENS, TOPK);
  ncclEpTensor_t result = matrix(NCCL_EP_FLOAT32, y, TOKENS, HIDDEN);

  ncclEpHandleConfig_t handle_config = NCCL_EP_HANDLE_CONFIG_INIT;
  handle_config.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
  ncclEpHandle_t handle;
  CHECK(ncclEpCreateHandle(&handle, group, &handle_config, &topk_idx, NULL));

  ncclEpTensor_t rows = NCCL_EP_TENSOR_INIT, row_weights = NCCL_EP_TENSOR_INIT, info = NCCL_EP_TENSOR_INIT;
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  inputs.tokens = &x;
  inputs.topk_weights = &topk_weights;
  outputs.tokens = &rows;
  outputs.topk_weights = &row_weights;
  outputs.info = &info;
  CHECK(ncclEpDispatchShapes(handle, &inputs, NULL, &outputs));
  allocate(&rows);
  allocate(&row_weights);
  allocate(&info);

  CHECK(ncclEpDispatch(handle, &inputs, &outputs, NULL, NULL));
  const int32_t* counts = (const int32_t*)info.data + NCCL_EP_INFO_COUNTS(LOCAL_EXPERTS);
  printf("rank %d: sent %d tokens; its experts %d and %d received %d and %d rows\n", rank, TOKENS, rank * LOCAL_EXPERTS,
         rank * LOCAL_EXPERTS + 1, counts[0], counts[1]);
  apply_experts(rank, &rows, counts);

  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t combine_config = NCCL_EP_COMBINE_CONFIG_INIT;
  back.tokens = &rows;
  home.tokens = &result;
  combine_config.send_only = 1; /* the two halves; work of the caller's would go between them */
  CHECK(ncclEpCombine(handle, &back, &home, &combine_config, NULL));
  CHECK(ncclEpComplete(handle, NULL, NULL));
  CHECK(ncclEpCheck(group));

  CHECK(ncclEpHandleDestroy(handle));
  free(rows.data);
  free(row_weights.data);
  free(info.data);
  return count_wrong(&tokens, y);
}

static void* run_rank(void* argument) {
  Rank* rank = argument;
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.device = NCCL_EP_DEVICE_CPU;
  config.num_experts = NUM_EXPERTS;
  config.max_tokens = TOKENS;
  config.topk = TOPK;
  config.max_token_bytes = HIDDEN * sizeof(float);
  config.timeout_ns = 30000000000u;
  ncclEpGroup_t group;
  CHECK(ncclEpCreateGroupFromCallback(&group, rank->rank, NUM_RANKS, allgather, rank, &config));
  rank->num_wrong = run_layer(group, rank->rank);
  printf("rank %d: %d of %d values that came home are wrong\n", rank->rank, rank->num_wrong, TOKENS * HIDDEN);
  CHECK(ncclEpGroupDestroy(group));
  return NULL;
}

int main(void) {
  int version;
  CHECK(ncclEpGetVersion(&version));
  printf("nccl_ep %d.%d.%d: %d ranks, %d experts, top-%d, rows of %d floats\n", version / 10000, version / 100 % 100,
         version % 100, NUM_RANKS, NUM_EXPERTS, TOPK, HIDDEN);
  const int num_wrong = run_ranks(run_rank);
  printf("%s\n", num_wrong == 0 ? "every token came home as its experts made it" : "some tokens came home wrong");
  return num_wrong != 0;
}
