/* One step of a mixture-of-experts layer over ranks that are processes of this program, on the CPU or on GPUs (ranks.h
 * says how it is called, and where the communicator comes from). run_layer() uses nccl_ep.h alone, as any program of
 * NCCL EP does.
 *
 * Every token chooses two of the experts. Expert e multiplies a row by e + 1, so that everybody can tell what a token
 * must be when it comes home: the sum over its choices of weight * (e + 1), times the token. Values are small integers
 * and weights quarters: sums are exact and are compared exactly. */
#include "ranks.h"

enum { TOKENS = 6, TOPK = 2, HIDDEN = 32 };

typedef struct {
  float x[TOKENS][HIDDEN];
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

/* On the host, which any C compiler can do. A real program launches kernels, on the stream of the dispatch. */
static void apply_experts(const Rank* me, const ncclEpTensor_t* rows, const int32_t* counts) {
  const size_t capacity = rows->sizes[1];
  float* values = fetch(me, rows);
  for (int e = 0; e < me->num_local_experts; e++) {
    float* first = values + (size_t)e * capacity * HIDDEN;
    const float factor = (float)(me->rank * me->num_local_experts + e + 1);
    for (int i = 0; i < counts[e] * HIDDEN; i++) first[i] *= factor;
  }
  store(me, rows, values);
}

static int count_wrong(const Tokens* tokens, const float* y) {
  int num_wrong = 0;
  for (int t = 0; t < TOKENS; t++) {
    float factor = 0;
    for (int k = 0; k < TOPK; k++) {
      if (tokens->topk_idx[t][k] >= 0) factor += tokens->weights[t][k] * (float)(tokens->topk_idx[t][k] + 1);
    }
    for (int h = 0; h < HIDDEN; h++) num_wrong += y[t * HIDDEN + h] != factor * tokens->x[t][h];
  }
  return num_wrong;
}

/* Dispatch, experts, combine; returns how many values are wrong. Streams are null: the default one. */
static int run_layer(ncclEpGroup_t group, const Rank* me) {
  const size_t num_local = (size_t)me->num_local_experts;
  Tokens tokens;
  make_tokens(me->rank, &tokens);
  ncclEpTensor_t* x = matrix(me, ncclFloat32, TOKENS, HIDDEN, tokens.x);
  ncclEpTensor_t* topk_idx = matrix(me, ncclInt64, TOKENS, TOPK, tokens.topk_idx);
  ncclEpTensor_t* topk_weights = matrix(me, ncclFloat32, TOKENS, TOPK, tokens.weights);
  ncclEpTensor_t* result = matrix(me, ncclFloat32, TOKENS, HIDDEN, NULL);
  ncclEpTensor_t* rows = describe(ncclFloat32, 3, num_local, (size_t)me->num_ranks * TOKENS, HIDDEN);
  ncclEpTensor_t* counters = describe(ncclInt32, 1, num_local, 0, 0);
  rows->data = allocate(me, bytes_of(rows));
  counters->data = allocate(me, bytes_of(counters));

  ncclEpHandle_t handle;
  CHECK(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, topk_idx, NULL, NULL, NULL));
  ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
  ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  inputs.tokens = x;
  outputs.tokens = rows;
  info.expert_counters = counters;
  CHECK(ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL));
  int32_t* counts = fetch(me, counters);
  int received = 0;
  for (int e = 0; e < me->num_local_experts; e++) received += counts[e];
  printf("rank %d: sent %d tokens; its %d experts received %d rows\n", me->rank, TOKENS, me->num_local_experts,
         received);
  apply_experts(me, rows, counts);
  free(counts);

  ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
  ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
  ncclEpCombineConfig_t combine_config = NCCL_EP_COMBINE_CONFIG_INIT;
  back.tokens = rows;
  home.tokens = result;
  home.topk_weights = topk_weights; /* read: low latency weights at home */
  combine_config.send_only = 1;     /* send and receive; work of the caller's would go between them */
  CHECK(ncclEpCombine(handle, &back, &home, &combine_config, NULL));
  CHECK(ncclEpComplete(handle, NULL, NULL));
  float* y = fetch(me, result); /* waits for the stream, which ncclEpxCheck does not */
  CHECK(ncclEpxCheck(group));
  const int num_wrong = count_wrong(&tokens, y);

  CHECK(ncclEpHandleDestroy(handle));
  free(y);
  ncclEpTensor_t* tensors[] = {x, topk_idx, topk_weights, result, rows, counters};
  for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) drop(me, tensors[i]);
  return num_wrong;
}

static int run_rank(Rank* me) {
  ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
  config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
  config.num_experts = NUM_EXPERTS;
  config.max_dispatch_tokens_per_rank = TOKENS;
  config.num_topk = TOPK;
  config.max_token_bytes = HIDDEN * sizeof(float);
  config.timeout_ns = 30000000000u;
  ncclEpGroup_t group;
  CHECK(ncclEpCreateGroup(&group, me->comm, &config));
  const int num_wrong = run_layer(group, me);
  printf("rank %d: %d of %d values that came home are wrong\n", me->rank, num_wrong, TOKENS * HIDDEN);
  CHECK(ncclEpGroupDestroy(group));
  return num_wrong;
}

int main(int argc, char** argv) {
  const World world = parse_world(argc, argv);
  int version;
  CHECK(ncclEpxGetVersion(&version));
  printf("nccl_ep %d.%d.%d: a world of %d on %s, %d experts, top-%d, rows of %d floats\n", version / 10000,
         version / 100 % 100, version % 100, world.num_ranks, world.on_gpus ? "GPUs" : "the CPU", NUM_EXPERTS, TOPK,
         HIDDEN);
  const int num_failed = run_ranks(world, run_rank);
  printf("%s\n", num_failed == 0 ? "every token came home as its experts made it"
                                 : "some tokens came home wrong, or a rank failed");
  return num_failed != 0;
}
